"""What every rank of data-parallel training has in common, as a few numbers that each rank writes down for itself.

    weights     the sum of their bits, exact in any order; their sum and norm say how far two ranks are apart
    rates       the learning rate of each parameter group
    settings    the class and the other settings of each optimizer

`RankState.of` calls no collective. `diagnose.rules.ranks` compares the states of the ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amplab.optimizers.group_settings import learning_rate
from amplab.parallel.ranks import data_parallel

__all__ = ["RankState", "is_state_due"]

Averages = Literal["all", "some", "unknown"]

EVERY = 64
"""Steps from one state to the next; in the first 64 steps, states are at the powers of two."""

_NO_SETTINGS = ("params", "param_names", "lr", "initial_lr", "step", "foreach", "fused", "capturable", "differentiable")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_state_due(step: int) -> bool:
    """Return whether ranks write down their state after a step, which is counted from 0; the same on every rank.

    >>> [step for step in range(200) if is_state_due(step)]
    [0, 1, 3, 7, 15, 31, 63, 127, 191]
    """
    done = step + 1
    return done % EVERY == 0 or (done < EVERY and done & step == 0)


@dataclass(frozen=True)
class RankState:
    """The state of one rank after a step.

    Attributes:
        step: number of the step, from 0.
        model: identifies the names and shapes of the parameters: other models are not compared.
        checksum: of the bits of the weights; None if they are sharded, and so differ by rank.
        total: the sum of the weights.
        norm: their L2 norm.
        rounding: the relative rounding error of their coarsest dtype.
        rates: the learning rate of each parameter group; 0.0 for one that has none.
        settings: the other settings of each optimizer, as text.
        averages: with which ranks DistributedDataParallel averages the gradients; "unknown" if none was seen.
    """

    step: int
    model: int
    checksum: int | None
    total: float
    norm: float
    rounding: float
    rates: tuple[float, ...]
    settings: str
    averages: Averages

    @classmethod
    def of(
        cls,
        step: int,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        wrappers: Sequence[DistributedDataParallel] = (),
    ) -> RankState:
        """Return the state of this rank now. Masters are taken in place of the weights that they update.

        Args:
            step: number of the step.
            model: whose parameters are taken if there is no optimizer.
            optimizers: whose parameters and settings are taken.
            wrappers: DistributedDataParallel around the model.

        Sync: one for each device of the weights.
        """
        groups = [group for each in optimizers for group in each.param_groups]
        weights = _weights(model, groups)
        whole = not any(_is_shard(each) for each in (*weights, *model.parameters()))
        checksum, total, norm = _sums(weights) if whole else (None, 0.0, 0.0)
        found = dict.fromkeys([*wrappers, *data_parallel(model)])
        return cls(
            step,
            crc32("".join(f"{name}{tuple(each.shape)}" for name, each in _inner(model).named_parameters()).encode()),
            checksum,
            total,
            norm,
            max((torch.finfo(each.dtype).eps for each in weights if each.is_floating_point()), default=0.0),
            tuple(learning_rate(group) or 0.0 for group in groups),
            "; ".join(map(_settings, optimizers)),
            _averages(list(found), whole=whole),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, which are plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankState | None:
        """Return what `as_dict` wrote, None if it is damaged; fields of later versions are ignored."""
        known = {each.name: values.get(each.name) for each in fields(cls)}
        numbers = (known["step"], known["model"], known["total"], known["norm"], known["rounding"])
        rates = known["rates"]
        sound = isinstance(rates, list | tuple) and all(map(_is_finite, (*numbers, *rates)))
        sound = sound and isinstance(known["checksum"], int | None) and isinstance(known["settings"], str)
        if not sound or known["averages"] not in get_args(Averages):
            return None
        return cls(**{**known, "rates": tuple(rates)})  # type: ignore[arg-type]


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _is_shard(tensor: Tensor) -> bool:
    """Whether a rank holds a part of a parameter, by the names of its classes: importing FSDP takes long."""
    return any(kind.__name__ in ("DTensor", "FlatParameter") for kind in type(tensor).__mro__)


def _weights(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Return what the optimizers update, if it has the shapes of parameters; flat parts of them differ by rank."""
    shapes = {each.shape for each in model.parameters()}
    updated = [each for group in groups for each in group["params"]]
    fits = bool(updated) and all(each.shape in shapes for each in updated)
    return [each.detach() for each in (updated if fits else model.parameters()) if each.numel()]


@torch.no_grad()
def _sums(weights: Sequence[Tensor]) -> tuple[int, float, float]:
    """Return the sum of the bits, the sum and the norm; the largest float if it is not finite.

    Sync: one for each device.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in weights:
        by_device.setdefault(each.device, []).append(torch.view_as_real(each) if each.is_complex() else each)
    bits, total, squares = 0, 0.0, 0.0
    for own in by_device.values():
        # Each place has another factor, so that parameters that have changed places have another sum.
        of_bits = [(2 * place + 1) * _bits(each).sum(dtype=torch.int64) for place, each in enumerate(own)]
        sums = torch.stack([each.sum(dtype=torch.float64) for each in own]).sum()
        norms = torch.stack([torch.linalg.vector_norm(each.float()).double() for each in own])
        read = torch.stack([torch.stack(of_bits).sum().view(torch.float64), sums, norms.square().sum()]).cpu()
        bits += int(read[0].view(torch.int64))
        total, squares = total + float(read[1]), squares + float(read[2])
    return bits, _finite(total), _finite(math.sqrt(squares))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _finite(value: float) -> float:
    return value if math.isfinite(value) else sys.float_info.max


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _settings(optimizer: Optimizer) -> str:
    """Return the class and the settings of an optimizer but its learning rates, as text."""
    groups = [
        ", ".join(f"{name}={_plain(value)}" for name, value in sorted(group.items()) if name not in _NO_SETTINGS)
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(dict.fromkeys(groups))})"


def _plain(value: Any) -> Any:
    """Return a value as it is on every rank; the text of other objects may contain an address."""
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _averages(wrappers: Sequence[DistributedDataParallel], *, whole: bool) -> Averages:
    if not wrappers:
        return "unknown" if whole else "all"  # shards of FSDP: their gradients are averaged
    everyone = torch.distributed.get_world_size()
    partly = any(each.process_group.size() < everyone or _is_local(each) for each in wrappers)
    return "some" if partly else "all"


def _is_local(wrapper: DistributedDataParallel) -> bool:
    """Whether a hook lets ranks differ between two averages, as torch's local SGD."""
    return any("post_localSGD" in str(hook) for hook, _ in wrapper._comm_hooks)
