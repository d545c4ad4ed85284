"""What is the matter, and what to do: so far with the machine."""

from amplab.diagnose.ladder import LadderReport, LadderRung, ladder
from amplab.diagnose.machine import MachineReport, doctor
from amplab.diagnose.twin import twin
from amplab.diagnose.twin_report import TwinReport
from amplab.diagnose.what_if import ScaleRecord, WhatIf, WhatIfs, what_if, what_ifs

__all__ = [
    "LadderReport",
    "LadderRung",
    "MachineReport",
    "ScaleRecord",
    "TwinReport",
    "WhatIf",
    "WhatIfs",
    "doctor",
    "ladder",
    "twin",
    "what_if",
    "what_ifs",
]
