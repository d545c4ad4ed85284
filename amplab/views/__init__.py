"""Widgets for JupyterLab that show and control the objects that a script uses; they do not train.

`Dashboard` is the lab on one screen, `RunView` shows a run that the lab does not control, `BitExplorer` the bits of a
number. The views need the `lab` extra; `import amplab` does not import them. The browser's side is in `web`.
"""

from amplab.views.bit_explorer import BitExplorer
from amplab.views.dashboard import Dashboard
from amplab.views.run_view import RunView

__all__ = ["BitExplorer", "Dashboard", "RunView"]
