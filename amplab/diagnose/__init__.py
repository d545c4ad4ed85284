"""What is the matter, and what to do: with the machine, with a step whose numbers left their range, with a run.

Reading order: `doctor`, which applies every rule; `first_nonfinite`, which explains one step; `Finding`, what a rule
gives; `Observation`, what rules about runs read; `twin` and `ladder`, which train in several precisions; `what_if`.
"""

from amplab.diagnose.examination import doctor
from amplab.diagnose.finding import Finding, Findings
from amplab.diagnose.first_nonfinite import FirstNonfinite, first_nonfinite
from amplab.diagnose.followed_step import FollowedStep, followed_step
from amplab.diagnose.ladder import LadderReport, LadderRung, ladder
from amplab.diagnose.machine import MachineReport
from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.rules.nonfinite import finding_of
from amplab.diagnose.rules.run import run_findings
from amplab.diagnose.twin import twin
from amplab.diagnose.twin_report import TwinReport
from amplab.diagnose.what_if import ScaleHistory, WhatIf, WhatIfs, what_if, what_ifs

__all__ = [
    "doctor",
    "first_nonfinite",
    "FirstNonfinite",
    "FollowedStep",
    "Finding",
    "Findings",
    "LadderReport",
    "LadderRung",
    "MachineReport",
    "Observation",
    "ScaleHistory",
    "StepObservation",
    "TwinReport",
    "WhatIf",
    "WhatIfs",
    "finding_of",
    "followed_step",
    "ladder",
    "run_findings",
    "twin",
    "what_if",
    "what_ifs",
]
