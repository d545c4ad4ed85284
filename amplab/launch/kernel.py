"""`start_kernel`: the lab's kernel, which imports from the folder of its notebook from its first cell on.

The kernel spec in ``jupyter/data`` starts it, in a Python that has not put that folder on `sys.path` (``-P``).
"""

import sys
from typing import Any

from ipykernel.kernelapp import IPKernelApp

__all__ = ["start_kernel"]


def start_kernel() -> None:
    """Serve a notebook, with the arguments of this process, as ``python -m ipykernel_launcher`` does.

    From the first cell on, the folder is the last one of `sys.path`. Before that cell nothing in it is imported: not
    for Tab and Shift-Tab, for which IPython and jedi look for modules that may not be installed, such as colorama, and
    not by the silent code that a page sends by itself.
    """
    kernel: Any = IPKernelApp.instance()
    kernel.initialize()
    events = kernel.shell.events

    def begin(_cell: object) -> None:
        sys.path.append("")
        events.unregister("pre_run_cell", begin)

    events.register("pre_run_cell", begin)  # not triggered by silent code
    kernel.start()
