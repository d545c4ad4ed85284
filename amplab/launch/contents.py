"""What JupyterLab's server gives to a page: a notebook that its person has not signed comes without saved widgets.

The page restores the widgets that are saved in the metadata of a notebook as soon as it is opened, trusted or not, and
the saved state of an anywidget is JavaScript, which can run code in a kernel. Jupyter's own trust covers outputs alone.
"""

from typing import Any

import nbformat
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from jupyter_server.utils import ApiPath, to_os_path

__all__ = ["Contents"]


class Contents(AsyncLargeFileManager):
    """Jupyter's own manager of files.

    An unsigned notebook that the page saves has lost its saved widgets. Jupyter signs what it saves if no cell has an
    output that is not trusted, so also what is uploaded; with saved widgets, only in place of a signed notebook.
    """

    def mark_trusted_cells(self, nb: Any, path: str = "") -> None:
        """Mark the cells of a notebook that is read, and remove the widgets of one that is not signed."""
        if not self.notary.check_signature(nb):  # type: ignore[no-untyped-call]
            nb.metadata.pop("widgets", None)
        super().mark_trusted_cells(nb, path)  # type: ignore[no-untyped-call]

    def check_and_sign(self, nb: Any, path: str = "", **named: Any) -> None:
        """Sign a notebook that is about to be saved, if it may be."""
        if "widgets" not in nb.metadata or self._has_signed(path):
            super().check_and_sign(nb, path, **named)  # type: ignore[no-untyped-call]

    def _has_signed(self, path: str) -> bool:
        """Return whether there is a notebook at `path`, and it is signed."""
        try:
            before = nbformat.read(to_os_path(ApiPath(path), self.root_dir), as_version=4)  # type: ignore[no-untyped-call]
            return bool(self.notary.check_signature(before))  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001  no file, or none that is a notebook: the save must go on
            return False
