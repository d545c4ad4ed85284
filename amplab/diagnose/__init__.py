"""What is the matter, and what to do: with the machine, and with the first step whose numbers left their range."""

from amplab.diagnose.finding import Finding, Findings
from amplab.diagnose.first_nonfinite import FirstNonfinite, first_nonfinite
from amplab.diagnose.machine import MachineReport, doctor
from amplab.diagnose.nonfinite_findings import finding_of
from amplab.diagnose.observations import Observation, StepObservation

__all__ = [
    "Finding",
    "Findings",
    "FirstNonfinite",
    "MachineReport",
    "Observation",
    "StepObservation",
    "doctor",
    "finding_of",
    "first_nonfinite",
]
