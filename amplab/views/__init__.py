"""Widgets for JupyterLab, over the objects that a script uses: they show and steer, and never train.

`Dashboard` is the lab's one screen, `BitExplorer` a number's bits to flip. The views need the `lab` extra;
`import amplab` does not load them.
"""

from amplab.views.bit_explorer import BitExplorer
from amplab.views.dashboard import Dashboard

__all__ = ["BitExplorer", "Dashboard"]
