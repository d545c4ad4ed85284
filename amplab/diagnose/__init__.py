"""What is the matter, and what to do: so far with the machine."""

from amplab.diagnose.machine import MachineReport, doctor
from amplab.diagnose.what_if import ScaleRecord, WhatIf, WhatIfs, what_if, what_ifs

__all__ = ["MachineReport", "ScaleRecord", "WhatIf", "WhatIfs", "doctor", "what_if", "what_ifs"]
