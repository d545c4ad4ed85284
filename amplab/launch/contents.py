"""What JupyterLab's server gives to a page: a notebook that its person has not signed comes without saved widgets.

The page restores the widgets that are saved in the metadata of a notebook as soon as it is opened, trusted or not, and
the saved state of an anywidget is JavaScript, which can run code in a kernel. Jupyter's own trust covers outputs alone.
"""

from typing import Any

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

__all__ = ["Contents"]


class Contents(AsyncLargeFileManager):
    """Jupyter's own manager of files. A notebook that is saved without its saved widgets has lost them."""

    def mark_trusted_cells(self, nb: Any, path: str = "") -> None:
        """Mark the cells of a notebook that is read, and remove the widgets of one that is not signed."""
        if not self.notary.check_signature(nb):  # type: ignore[no-untyped-call]
            nb.metadata.pop("widgets", None)
        super().mark_trusted_cells(nb, path)  # type: ignore[no-untyped-call]
