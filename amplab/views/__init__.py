"""Widgets for JupyterLab, over the objects that a script uses: they show and steer, and never train.

`Dashboard` is the lab's one screen, `RunView` a run that is not steered from here, `BitExplorer` a number's bits to
flip. The views need the `lab` extra; `import amplab` does not load them.
"""

from amplab.views.bit_explorer import BitExplorer
from amplab.views.dashboard import Dashboard
from amplab.views.run_view import RunView

__all__ = ["BitExplorer", "Dashboard", "RunView"]
