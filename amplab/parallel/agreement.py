"""Compare what the ranks are about to combine, so that a difference is a message and not a hang or a wrong sum."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from amplab.policies.signals import is_interrupt

__all__ = ["explained_absence", "first_rank", "refuse_disagreement", "refuse_other_call"]


class _Entry(NamedTuple):
    """A tensor as every rank has to have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: str

    def __str__(self) -> str:
        return f"{self.name} of shape {self.shape} in {self.dtype}{self.values}"


def first_rank(group: dist.ProcessGroup | None) -> int:
    """Return the global number of the first rank of ``group``; None for all ranks."""
    return 0 if group is None else dist.get_global_rank(group, 0)


@contextmanager
def explained_absence(purpose: str) -> Iterator[None]:
    """Say what an error of torch.distributed in the block may come from: it reports a timeout or a connection only.

    Args:
        purpose: of the exchange in the block, as "average gradients".

    Raises:
        RuntimeError: in place of that of torch.distributed, which is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        if is_interrupt(error):
            raise
        raise RuntimeError(
            f"This rank waited for the others to {purpose}, but one has ended, or has not come here: every rank must "
            "make the same calls of amp.initialize, of the model in training mode, and of scale_loss. Give every rank "
            "the same number of batches (a DistributedSampler, drop_last=True), call model.eval() before one rank "
            "alone evaluates, and see the output of the other ranks. torch.distributed says: "
            f"{error}"
        ) from error


def refuse_other_call(call: str, group: dist.ProcessGroup | None, device: torch.device | None) -> None:
    """Raise on every rank if another rank makes another call, before tensors of different size are sent.

    Args:
        call: what this rank does, as "scale_loss for optimizer 0". Its checksum is sent, in a message of 16 bytes.
        group: the ranks; None for all.
        device: of the message.

    Raises:
        RuntimeError: they do; the message has the call of every rank.

    Sync: waits for every rank; one.
    """
    own = crc32(call.encode())
    highest = torch.tensor([own, -own], device=device)
    with explained_absence("compare the calls"):
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    high, minus_low = highest.tolist()
    if high != -minus_low:
        refuse_disagreement("calls", [], group, settings={"this call": call})


def refuse_disagreement(
    what: str,
    tensors: Sequence[tuple[str, Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    with_values: Sequence[Tensor] = (),
    settings: Mapping[str, str] | None = None,
    problem: str = "",
) -> None:
    """Raise on every rank if the tensors of one differ from those of the first rank in name, shape, dtype or order.

    Args:
        what: what they are, for the message.
        tensors: with their names.
        group: the ranks; None for all.
        with_values: those of them whose values have to be equal, too; by a checksum.
        settings: what else all ranks must have in common: values as text, by name. They travel in the same message.
        problem: why this rank cannot go on; "" if it can.

    Raises:
        RuntimeError: they differ; the message has the first difference of the lowest rank that differs. Or settings
            differ; the message has the values of all ranks. Or a rank has a problem.

    Sync: waits for every rank; one for each of ``with_values``.
    """
    valued = set(map(id, with_values))
    own = [
        _Entry(name, tuple(tensor.shape), str(tensor.dtype), _checksum(tensor) if id(tensor) in valued else "")
        for name, tensor in tensors
    ]
    everyone: list[tuple[list[_Entry], dict[str, str], str]] = [([], {}, "")] * dist.get_world_size(group)
    with explained_absence(f"compare {what}"):
        dist.all_gather_object(everyone, (own, dict(settings or {}), problem), group=group)
    _refuse_problems([theirs for _, _, theirs in everyone])
    first = everyone[0][0]
    for rank, (theirs, _, _) in enumerate(everyone):
        if theirs != first:
            raise RuntimeError(
                f"The {what} differ between ranks. {_difference(first, theirs, rank)} Build the same model and "
                "the same optimizers on every rank, in the same order, with the same parameters frozen. For new "
                "parameters set the same seed on every rank, or pass their module to amp.initialize, which sends the "
                "values of rank 0."
            )
    _refuse_settings([theirs for _, theirs, _ in everyone])


def _checksum(tensor: Tensor) -> str:
    """Say the checksum of the bits of a tensor. Sync: one."""
    bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f" with values of checksum {crc32(bits.numpy().tobytes()):08x}"


def _refuse_problems(everyone: Sequence[str]) -> None:
    """Raise if a rank has a problem, with the first one and its ranks."""
    problem = next(filter(None, everyone), "")
    if problem:
        ranks = [str(rank) for rank, theirs in enumerate(everyone) if theirs == problem]
        raise RuntimeError(f"{problem} (Found on {_few(ranks)}.)")


def _refuse_settings(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise if a setting differs between ranks."""
    names = dict.fromkeys(name for settings in everyone for name in settings)
    differ = [name for name in names if len({settings.get(name) for settings in everyone}) > 1]
    # A setting that a rank lacks comes of another one, such as the number of optimizers.
    differ = [name for name in differ if all(name in settings for settings in everyone)] or differ
    if not differ:
        return
    told = "; ".join(f"{name} is {_by_rank([each.get(name, 'absent') for each in everyone])}" for name in differ[:3])
    more = f"; and {len(differ) - 3} more" if len(differ) > 3 else ""
    raise RuntimeError(
        f"The settings of amp.initialize and its optimizers differ between ranks: {told}{more}. Weights differ now, or "
        "would after the next step: pass, or load from a checkpoint, the same values on every rank, and run the same "
        "blocks of scale_loss and the same steps."
    )


def _by_rank(values: Sequence[str]) -> str:
    """Say which ranks have which value.

    >>> _by_rank(["0.1", "0.2", "0.1"])
    '0.1 on ranks 0, 2 and 0.2 on rank 1'
    """
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return " and ".join(f"{value} on {_few(each)}" for value, each in ranks.items())


def _few(ranks: Sequence[str]) -> str:
    """Name the first ranks of many."""
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks[:4])}{more}"


def _difference(first: list[_Entry], theirs: list[_Entry], rank: int) -> str:
    for one, other in zip(first, theirs, strict=False):
        if one != other:
            return f"Rank 0 has {one}, where rank {rank} has {other}."
    longer, at = (0, first) if len(first) > len(theirs) else (rank, theirs)
    more = at[min(len(first), len(theirs))]
    return f"Rank 0 has {len(first)} and rank {rank} has {len(theirs)}; {more} is on rank {longer} only."
