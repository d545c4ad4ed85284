"""Optimizers that scripts import from ``apex.optimizers``, and LARC.

`FusedAdam` and `FusedSGD` are torch's own optimizers with apex's arguments. apex's others are not here: importing one
says so.
"""

from amplab.optimizers.fused_adam import FusedAdam
from amplab.optimizers.fused_sgd import FusedSGD
from amplab.optimizers.larc import LARC
from amplab.optimizers.parameter_groups import merge_groups

__all__ = ["LARC", "FusedAdam", "FusedSGD", "merge_groups"]

_INSTEAD = {
    "FusedLAMB": "FusedAdam, or LARC around FusedSGD",
    "FusedMixedPrecisionLamb": "FusedAdam, or LARC around FusedSGD",
    "FusedNovoGrad": "FusedAdam",
    "FusedAdagrad": "torch.optim.Adagrad",
}


def __getattr__(name: str) -> object:
    """Refuse what only apex has, with what to use (PEP 562)."""
    if name in _INSTEAD:
        # An AttributeError would be replaced by "cannot import name" in `from apex.optimizers import FusedLAMB`.
        raise ImportError(f"amplab.optimizers has no {name}; there are {', '.join(__all__)}. Use {_INSTEAD[name]}.")
    raise AttributeError(f"module 'amplab.optimizers' has no attribute {name!r}; there are {', '.join(__all__)}.")
