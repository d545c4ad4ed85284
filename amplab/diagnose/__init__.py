"""What is the matter, and what to do: so far with the machine."""

from amplab.diagnose.machine import MachineReport, doctor

__all__ = ["MachineReport", "doctor"]
