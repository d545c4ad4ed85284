"""Widgets for JupyterLab that show and control the objects that a script uses; they do not train.

`Dashboard` is the lab on one screen, `RunView` shows a run that the lab does not control, `BitExplorer` the bits of a
number, `Explorable` a drawing with sliders. The views need the `lab` extra; `import amplab` does not import them. The
browser's side is in `web`.

The files of the dashboard, by part::

    parts                   its widgets: their traits, their front end, and the listener for the page's messages
    *_payload, controls     build the values of the traits
    messages                what the page may send to each part; anything else is refused
    take_away               the files of the menu "Export"
    presenter               decides when the traits change
    tabs                    the tabs below the charts, each with its payload; `tabs/tab.py` says how to add one
    ticker                  the thread that changes them

The traits are the only state, and only the kernel writes them, except for `tab`, which the page writes.
"""

from amplab.views.bit_explorer import BitExplorer
from amplab.views.dashboard import Dashboard
from amplab.views.explorable import Explorable
from amplab.views.explorable_controls import Choice, Slider
from amplab.views.run_view import RunView

__all__ = ["BitExplorer", "Choice", "Dashboard", "Explorable", "RunView", "Slider"]
