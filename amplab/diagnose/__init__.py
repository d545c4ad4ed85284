"""What is the matter, and what to do: with the machine, with a step, with a run."""

from amplab.diagnose.finding import Finding, Findings
from amplab.diagnose.first_nonfinite import FirstNonfinite, first_nonfinite
from amplab.diagnose.ladder import LadderReport, LadderRung, ladder
from amplab.diagnose.machine import MachineReport, doctor
from amplab.diagnose.nonfinite_findings import finding_of
from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.run_rules import run_findings
from amplab.diagnose.twin import twin
from amplab.diagnose.twin_report import TwinReport
from amplab.diagnose.what_if import ScaleRecord, WhatIf, WhatIfs, what_if, what_ifs

__all__ = [
    "Finding",
    "Findings",
    "FirstNonfinite",
    "LadderReport",
    "LadderRung",
    "MachineReport",
    "Observation",
    "ScaleRecord",
    "StepObservation",
    "TwinReport",
    "WhatIf",
    "WhatIfs",
    "doctor",
    "finding_of",
    "first_nonfinite",
    "ladder",
    "run_findings",
    "twin",
    "what_if",
    "what_ifs",
]
