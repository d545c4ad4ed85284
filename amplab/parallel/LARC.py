"""LARC where apex has it: ``from apex.parallel.LARC import LARC``. It is one of the `optimizers`."""

from amplab.optimizers import LARC

__all__ = ["LARC"]
