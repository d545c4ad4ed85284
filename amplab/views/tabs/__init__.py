"""The tabs below the charts, in the order of the page; `tab.py` says what a tab is made of."""

from amplab.views.tabs.dtypes import DtypesTab
from amplab.views.tabs.findings import FindingsTab
from amplab.views.tabs.gradients import GradientsTab
from amplab.views.tabs.memory import MemoryTab
from amplab.views.tabs.runs import RunsTab
from amplab.views.tabs.scale import ScaleTab
from amplab.views.tabs.skipped import SkippedTab
from amplab.views.tabs.step_through import StepThroughTab
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["TABS", "Desk", "Tab"]

TABS: tuple[type[Tab], ...] = (
    DtypesTab,
    GradientsTab,
    SkippedTab,
    FindingsTab,
    StepThroughTab,
    RunsTab,
    ScaleTab,
    MemoryTab,
)
"""Every tab."""
