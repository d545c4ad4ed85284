"""Check the kernels that step, that count and that move the loss scale, before anything is measured.

A step is held against itself on the CPU in float64, three times in a row and a fourth that an overflow skips; a copy is
the parameter, rounded; what is counted and the loss scale are those of the pure-torch references to the bit. As in
``gpu_checks.py``, poison lies in the copies and around everything that is written.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from amplab import kernels
from amplab.bench.gpu_checks import POISON, Check, placed, same_bits
from amplab.kernels.tensor_stats import tensor_stats_reference

__all__ = ["RULES", "run_step_checks"]

_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
_STEPS = 3


@dataclass(frozen=True)
class _Rule:
    """A step: its function, how many states it has of the parameters' shape, and its numbers."""

    step: Callable[..., None]
    states: int
    numbers: dict[str, float | bool]
    counts: bool = True
    norms: bool = False  # one number for each tensor among the states


_DECAY = {"lr": 0.01, "weight_decay": 0.1}
RULES = {
    "sgd_": _Rule(kernels.sgd_, 1, {**_DECAY, "momentum": 0.9, "nesterov": True}, counts=False),
    "adam_": _Rule(kernels.adam_, 2, _DECAY),
    "adagrad_": _Rule(kernels.adagrad_, 1, _DECAY),
    "adadelta_": _Rule(kernels.adadelta_, 2, _DECAY),
    "rmsprop_": _Rule(kernels.rmsprop_, 3, {**_DECAY, "momentum": 0.9}),
    "lamb_": _Rule(kernels.lamb_, 2, _DECAY),
    "novograd_": _Rule(kernels.novograd_, 1, _DECAY, norms=True),
}


class _Side:
    """The lists of one rule, on one device in one dtype."""

    def __init__(self, rule: _Rule, params: Sequence[Tensor], dtype: torch.dtype, device: str, offset: int) -> None:
        self.rule = rule
        self.rooms = [placed(param.numel(), offset, dtype, device) for param in params]
        self.params = [room for _, room in self.rooms]
        for param, values in zip(self.params, params, strict=True):
            param.copy_(values)
        self.states = [[torch.zeros_like(param) for param in self.params] for _ in range(rule.states)]
        if rule.norms:
            self.states.append([torch.full((), -1.0, device=device) for _ in params])
        self.steps = [[torch.zeros((), device=device) for _ in params]] if rule.counts else []
        self.copies = [placed(param.numel(), offset, torch.float16, device)[1] for param in params]
        self.device = device

    def step(self, grads: Sequence[Tensor], *, found: float = 0.0) -> None:
        """Step once, with gradients that are three times too large."""
        factor, found_inf = (torch.full((1,), value, device=self.device) for value in (1 / 3, found))
        lists = (self.params, grads, *self.states, *self.steps, self.copies)
        self.rule.step(*lists, grad_factor=factor, found_inf=found_inf, **self.rule.numbers)

    def written(self) -> list[Tensor]:
        """Copies of everything that a step writes."""
        return [each.clone() for each in (*self.params, *chain(*self.states, *self.steps), *self.copies)]


def run_step_checks(device: str, *, lists: int = 4, largest: int = 100_000) -> list[Check]:
    """Check the steps, `tensor_stats` and `update_scale_`. Args: as ``run_checks``."""
    checks = []
    for name, rule in RULES.items():
        for dtype, grad in ((torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float64,) * 2):
            failures = (_check_rule(rule, dtype, grad, seed, largest, device) for seed in range(lists))
            checks.append(_first_failure(f"{name} {_short(dtype)}, gradients {_short(grad)}", lists, failures))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        failures = (_check_statistics(dtype, seed, largest, device) for seed in range(lists))
        checks.append(_first_failure(f"tensor_stats {_short(dtype)}", lists, failures))
    return [*checks, _first_failure("update_scale_", 1, [_check_scale(device)])]


def _first_failure(name: str, lists: int, runs: Sequence[Iterator[str]] | Iterator[Iterator[str]]) -> Check:
    for seed, failures in enumerate(runs):
        for failure in failures:
            return Check(name, seed + 1, f"list {seed}: {failure}")
    return Check(name, lists)


def _check_rule(
    rule: _Rule, dtype: torch.dtype, grad: torch.dtype, seed: int, largest: int, device: str
) -> Iterator[str]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [draw.choice((1, 7, 1024, 1025, draw.randint(1, largest))) for _ in range(draw.randint(1, 6))]
    params = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    here = _Side(rule, params, dtype, device, offset=draw.choice((0, 1)))
    exact = _Side(rule, params, torch.float64, "cpu", offset=0)
    rooms = [room.clone() for room, _ in here.rooms]
    for _ in range(_STEPS):
        grads = [torch.randn(size, generator=generator).to(grad) for size in sizes]
        here.step([each.to(device) for each in grads])
        exact.step([each.double() for each in grads])
    yield from _compare(here, exact, _TOLERANCE[dtype])
    before = here.written()
    here.step([each.to(device) for each in grads], found=1.0)
    if not all(map(same_bits, before, here.written())):
        yield "wrote something though found_inf was 1"
    for (room, param), poisoned in zip(here.rooms, rooms, strict=True):
        poisoned[param.storage_offset() :][: param.numel()] = param
        if not same_bits(room, poisoned):
            yield "memory beside a parameter was written"


def _compare(here: _Side, exact: _Side, tolerance: float) -> Iterator[str]:
    kinds = [("parameters", here.params, exact.params)]
    kinds += [
        (f"state {n}", mine, other) for n, (mine, other) in enumerate(zip(here.states, exact.states, strict=True))
    ]
    kinds += [("steps", mine, other) for mine, other in zip(here.steps, exact.steps, strict=True)]
    for kind, mine, other in kinds:
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            apart = (a.cpu().double() - b.double()).abs().max().item()
            if not apart <= tolerance * max(1.0, b.abs().max().item()):
                yield f"{kind} of tensor {index}: {apart:.1e} from float64"
    for index, (param, copy) in enumerate(zip(here.params, here.copies, strict=True)):
        if not same_bits(copy, param.half()):
            yield f"copy of tensor {index}: not the parameter, rounded"


def _check_statistics(dtype: torch.dtype, seed: int, largest: int, device: str) -> Iterator[str]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = []
    for size in (1, 8, 1025, draw.randint(1, largest)):
        values = torch.randn(size, generator=generator) * 2.0 ** torch.randint(-40, 14, (size,), generator=generator)
        values[draw.randrange(size)] = draw.choice((float("inf"), float("nan"), 0.0))
        tensors.append(placed(size, draw.randrange(3), dtype, "cpu")[1].copy_(values))
    moved = [placed(each.numel(), draw.randrange(3), dtype, device)[1].copy_(each) for each in tensors]
    table, wanted = torch.ops.amplab.tensor_stats(moved, -47, 64), tensor_stats_reference(tensors, -47, 64)
    if not torch.equal(table.cpu(), wanted):
        yield f"{int((table.cpu() != wanted).sum())} of {wanted.numel()} numbers differ from the reference"


def _check_scale(device: str) -> Iterator[str]:
    scale, tracker = torch.full((1,), POISON, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    wanted, clean = 1024.0, 0
    scale.fill_(wanted)
    for step, found in enumerate((0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)):
        found_inf = torch.full((1,), found, device=device)
        kernels.update_scale_(scale, tracker, None, found_inf, 2.0, 0.5, 2, floor=300.0, ceiling=1500.0)
        clean = 0 if found else clean + 1
        if found:
            wanted = max(wanted * 0.5, 300.0)
        elif clean == 2:
            wanted, clean = min(wanted * 2.0, 1500.0), 0
        if (scale.item(), tracker.item()) != (wanted, clean):
            yield f"step {step}: {scale.item()} after {tracker.item()} clean steps, not {wanted} after {clean}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
