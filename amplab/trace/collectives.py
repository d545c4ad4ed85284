"""`NoCollectives`: a step that a tool runs on one rank alone starts no collective of ``torch.distributed``.

The other ranks may not run the step, or not as often. A collective would wait for them without end, or take what they
send for their own steps.
"""

from typing import Any

import torch
import torch.distributed as dist

from amplab.parallel.ranks import NeedsOtherRanks
from amplab.trace.dispatch_mode import DispatchMode, run_op

__all__ = ["NoCollectives"]

_OF_RANKS = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
_OF_THIS_RANK = {"c10d::check_for_nan", "_c10d_functional::wait_tensor"}  # they send nothing


class NoCollectives(DispatchMode):
    """Refuse ops that exchange values with other ranks, before they begin; all others run as they are."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op.

        Raises:
            NeedsOtherRanks: It is a collective of several ranks.
        """
        exchanges = func.namespace in _OF_RANKS and func.name() not in _OF_THIS_RANK
        if exchanges and not _is_of_one_rank((*args, *kwargs.values())):
            raise NeedsOtherRanks(
                f"the step calls a collective of torch.distributed ({func.name()}). On one rank alone it would wait "
                "for the others: expected a step with the values of this rank only; leave the collective out of what "
                "the tool is given as loss, step or train_step."
            )
        return run_op(func, args, kwargs)


def _is_of_one_rank(given: tuple[Any, ...]) -> bool:
    """Return whether the group among the arguments of an op, the first object of C++, has no other rank."""
    group = next((each for each in given if isinstance(each, torch.ScriptObject)), None)
    return group is not None and dist.ProcessGroup.unbox(group).size() == 1
