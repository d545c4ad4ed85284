"""Compare what the ranks are about to combine, so that a difference is a message and not a hang or a wrong sum."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

__all__ = ["first_rank", "refuse_disagreement"]


class _Entry(NamedTuple):
    """A tensor as every rank has to have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} of shape {self.shape} in {self.dtype}"


def first_rank(group: dist.ProcessGroup | None) -> int:
    """Return the global number of the first rank of ``group``; None for all ranks."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def refuse_disagreement(
    what: str, tensors: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank if the tensors of one differ from those of the first rank in name, shape, dtype or order.

    Args:
        what: what they are, for the message.
        tensors: with their names.
        group: the ranks; None for all.

    Raises:
        RuntimeError: they differ; the message has the first difference of the lowest rank that differs.

    Sync: waits for every rank.
    """
    own = [_Entry(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    everyone: list[list[_Entry]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, own, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RuntimeError(
                f"The {what} differ between ranks. {_difference(everyone[0], theirs, rank)} Build the same model and "
                "the same optimizers on every rank, in the same order, with the same parameters frozen."
            )


def _difference(first: list[_Entry], theirs: list[_Entry], rank: int) -> str:
    for one, other in zip(first, theirs, strict=False):
        if one != other:
            return f"Rank 0 has {one}, where rank {rank} has {other}."
    longer, at = (0, first) if len(first) > len(theirs) else (rank, theirs)
    more = at[min(len(first), len(theirs))]
    return f"Rank 0 has {len(first)} and rank {rank} has {len(theirs)}; {more} is on rank {longer} only."
