"""LARC under apex's module path, ``apex.parallel.LARC``; the class is in `amplab.optimizers`."""

from amplab.optimizers import LARC

__all__ = ["LARC"]
