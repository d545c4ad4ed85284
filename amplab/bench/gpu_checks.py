"""Check the kernels on new random data before anything is measured.

    product = float32(x * inv_scale)          exact in float64, rounded once
    output  = round(product)                  or round(float32(output + product))

Every output is filled with a poison value and lies between zones of it, so that missing writes and writes out of bounds
are detected. Inputs begin on and off multiples of 16 bytes; an inf or a NaN is the first, a middle or the last element.

A step is compared with itself on the CPU in float64, three times in a row and a fourth time skipped by an overflow. A
copy must be the rounded parameter. Statistics and the loss scale must have the bits of the PyTorch references.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from amplab import kernels
from amplab.kernels import unscale_, unscale_add, unscale_copy, unscaled_norm
from amplab.kernels.tensor_stats import tensor_stats_reference

__all__ = ["RULES", "Check", "run_checks", "run_step_checks"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ZONE = 64  # elements of poison on each side
_POISON = -77.0


@dataclass(frozen=True)
class Check:
    """One kernel on one combination of dtypes.

    Attributes:
        name: the kernel and the dtypes.
        lists: the number of random lists.
        failure: what was wrong with the first list on which it failed; empty if it passed.
    """

    name: str
    lists: int
    failure: str = ""


class _Lists:
    """A random list of inputs and poisoned outputs, and the tensors that receive the results."""

    def __init__(self, seed: int, dtype: torch.dtype, output: torch.dtype, largest: int, device: str) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        sizes = [draw.choice((1, 7, 8, 1023, 1024, 1025, draw.randint(1, largest))) for _ in range(draw.randint(1, 12))]
        offsets = [draw.choice((0, 0, draw.randrange(8))) for _ in sizes]
        self.inputs = [_placed(size, offset, dtype, device) for size, offset in zip(sizes, offsets, strict=True)]
        offsets = [draw.choice((offset, draw.randrange(8))) for offset in offsets]
        self.outputs = [_placed(size, offset, output, device) for size, offset in zip(sizes, offsets, strict=True)]
        for _, x in self.inputs:
            x.normal_(std=100.0)
        if seed % 2 == 1:
            _, x = draw.choice(self.inputs)
            x[draw.choice((0, x.numel() // 2, x.numel() - 1))] = draw.choice((math.inf, -math.inf, math.nan))
        self.inverse = torch.full((1,), draw.choice((0.5, 1 / 3, 2.0**-16)), device=device)
        self.found_inf = torch.zeros(1, device=device)
        self.first_bad = torch.tensor([-1], device=device)
        self.norm = torch.full((1,), _POISON, device=device)
        self.norms = torch.full((len(sizes),), _POISON, device=device)

    @property
    def x(self) -> list[Tensor]:
        """The inputs."""
        return [tensor for _, tensor in self.inputs]

    @property
    def y(self) -> list[Tensor]:
        """The outputs."""
        return [tensor for _, tensor in self.outputs]

    @property
    def findings(self) -> dict[str, Tensor]:
        """The tensors that receive the optional results."""
        return {"norm": self.norm, "norms": self.norms, "first_bad": self.first_bad}


def run_checks(device: str, *, lists: int = 20, largest: int = 300_000) -> list[Check]:
    """Check every unscale kernel on every combination of dtypes.

    Args:
        device: "cuda", or "cpu" to check the CPU's kernels or the reference.
        lists: the number of random lists for each.
        largest: the largest number of elements of a tensor.
    """
    checks = []
    for dtype in _DTYPES:
        for kernel, check in (("unscale_", _in_place), ("unscaled_norm", _read_only)):
            checks.append(_repeat(f"{kernel} {_short(dtype)}", check, lists, (dtype, dtype, largest, device)))
        for output in _DTYPES:
            for kernel, check in (("unscale_copy", _copy), ("unscale_add", _add)):
                name = f"{kernel} {_short(dtype)} → {_short(output)}"
                checks.append(_repeat(name, check, lists, (dtype, output, largest, device)))
    return checks


def _repeat(name: str, check: Callable[[_Lists], Iterator[str]], lists: int, arguments: tuple[Any, ...]) -> Check:
    for seed in range(lists):
        for failure in check(_Lists(seed, *arguments)):
            return Check(name, seed + 1, f"list {seed}: {failure}")
    return Check(name, lists)


def _in_place(lists: _Lists) -> Iterator[str]:
    expected = [_product(x, x.dtype, lists.inverse) for x in lists.x]
    rooms = [room.clone() for room, _ in lists.inputs]
    unscale_(lists.x, lists.found_inf, lists.inverse, **lists.findings)
    yield from _compare(lists, lists.inputs, expected, rooms)


def _copy(lists: _Lists) -> Iterator[str]:
    expected = [_product(x, y.dtype, lists.inverse) for x, y in zip(lists.x, lists.y, strict=True)]
    rooms = [room.clone() for room, _ in lists.outputs]
    unscale_copy(lists.x, lists.y, lists.found_inf, lists.inverse, **lists.findings)
    yield from _compare(lists, lists.outputs, expected, rooms)


def _add(lists: _Lists) -> Iterator[str]:
    expected = []
    for x, y in zip(lists.x, lists.y, strict=True):
        y.normal_()
        wide = _arithmetic(x.dtype, y.dtype)
        product = (x.double() * lists.inverse.double()).to(wide)
        # float64 holds the exact sum of two float32 numbers unless they are far apart; then it rounds the same way.
        expected.append((y.double() + product.double()).to(wide).to(y.dtype))
    rooms = [room.clone() for room, _ in lists.outputs]
    unscale_add(lists.x, lists.y, lists.found_inf, lists.inverse, **lists.findings)
    yield from _compare(lists, lists.outputs, expected, rooms)


def _read_only(lists: _Lists) -> Iterator[str]:
    rooms = [room.clone() for room, _ in lists.inputs]
    products = [_product(x, _arithmetic(x.dtype), lists.inverse) for x in lists.x]
    unscaled_norm(lists.x, lists.found_inf, lists.inverse, **lists.findings)
    if not all(_same_bits(room, before) for (room, _), before in zip(lists.inputs, rooms, strict=True)):
        yield "wrote an input that it should only read"
    yield from _compare_findings(lists, products)


def _compare(
    lists: _Lists, written: list[tuple[Tensor, Tensor]], expected: list[Tensor], rooms: list[Tensor]
) -> Iterator[str]:
    for index, ((room, now), wanted, before) in enumerate(zip(written, expected, rooms, strict=True)):
        if not _same_bits(now, wanted):
            different = int((now.double().nan_to_num(7e77) != wanted.double().nan_to_num(7e77)).sum())
            yield f"tensor {index}: {different} of {now.numel()} elements differ from float64"
        before[now.storage_offset() :][: now.numel()] = now
        if not _same_bits(room, before):
            yield f"tensor {index}: memory next to it was written"
    yield from _compare_findings(lists, expected)


def _compare_findings(lists: _Lists, values: list[Tensor]) -> Iterator[str]:
    bad = [index for index, value in enumerate(values) if not bool(value.isfinite().all())]
    found, first = lists.found_inf.item(), lists.first_bad.item()
    if (found, first) != (float(bool(bad)), bad[0] if bad else -1):
        yield f"found_inf {found} and first_bad {first}, with {bad} bad"
    norms = torch.stack([value.double().square().sum().sqrt() for value in values])
    for name, here, wanted in (("norms", lists.norms, norms), ("norm", lists.norm, norms.square().sum().sqrt()[None])):
        if not torch.allclose(here.double(), wanted, rtol=1e-6, atol=0.0, equal_nan=True):
            yield f"{name}: {here.tolist()[:3]} … where float64 has {wanted.tolist()[:3]} …"


def _placed(numel: int, offset: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return a poisoned buffer, and a tensor in it, `offset` elements after a multiple of 16 bytes."""
    room = torch.full((numel + 2 * _ZONE + 8,), _POISON, dtype=dtype, device=device)
    return room, room[_ZONE + offset :][:numel]


def _product(x: Tensor, output: torch.dtype, inverse: Tensor) -> Tensor:
    return (x.double() * inverse.double()).to(_arithmetic(x.dtype, output)).to(output)


def _arithmetic(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same numbers; NaN equals NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
_STEPS = 3


@dataclass(frozen=True)
class _Rule:
    """A step: its function, the number of states of the parameters' shape, and its constants."""

    step: Callable[..., None]
    states: int
    numbers: dict[str, float | bool]
    counts: bool = True
    norms: bool = False  # one of the states is a number per tensor


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
        self.rooms = [_placed(param.numel(), offset, dtype, device) for param in params]
        self.params = [room for _, room in self.rooms]
        for param, values in zip(self.params, params, strict=True):
            param.copy_(values)
        self.states = [[torch.zeros_like(param) for param in self.params] for _ in range(rule.states)]
        if rule.norms:
            self.states.append([torch.full((), -1.0, device=device) for _ in params])
        self.steps = [[torch.zeros((), device=device) for _ in params]] if rule.counts else []
        self.copies = [_placed(param.numel(), offset, torch.float16, device)[1] for param in params]
        self.device = device

    def step(self, grads: Sequence[Tensor], *, found: float = 0.0) -> None:
        """Step once, with gradients that are three times as large, and grad_factor 1/3."""
        factor, found_inf = (torch.full((1,), value, device=self.device) for value in (1 / 3, found))
        lists = (self.params, grads, *self.states, *self.steps, self.copies)
        self.rule.step(*lists, grad_factor=factor, found_inf=found_inf, **self.rule.numbers)

    def written(self) -> list[Tensor]:
        """Return copies of everything that a step writes."""
        return [each.clone() for each in (*self.params, *chain(*self.states, *self.steps), *self.copies)]


def run_step_checks(device: str, *, lists: int = 4, largest: int = 100_000) -> list[Check]:
    """Check the steps, `tensor_stats` and `update_scale_`. Args: as `run_checks`."""
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
    yield from _compare_steps(here, exact, _TOLERANCE[dtype])
    before = here.written()
    here.step([each.to(device) for each in grads], found=1.0)
    if not all(map(_same_bits, before, here.written())):
        yield "wrote something although found_inf was 1"
    for (room, param), poisoned in zip(here.rooms, rooms, strict=True):
        poisoned[param.storage_offset() :][: param.numel()] = param
        if not _same_bits(room, poisoned):
            yield "memory next to a parameter was written"


def _compare_steps(here: _Side, exact: _Side, tolerance: float) -> Iterator[str]:
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
        if not _same_bits(copy, param.half()):
            yield f"copy of tensor {index}: not the parameter, rounded"


def _check_statistics(dtype: torch.dtype, seed: int, largest: int, device: str) -> Iterator[str]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = []
    for size in (1, 8, 1025, draw.randint(1, largest)):
        values = torch.randn(size, generator=generator) * 2.0 ** torch.randint(-40, 14, (size,), generator=generator)
        values[draw.randrange(size)] = draw.choice((float("inf"), float("nan"), 0.0))
        tensors.append(_placed(size, draw.randrange(3), dtype, "cpu")[1].copy_(values))
    moved = [_placed(each.numel(), draw.randrange(3), dtype, device)[1].copy_(each) for each in tensors]
    table, wanted = torch.ops.amplab.tensor_stats(moved, -47, 64), tensor_stats_reference(tensors, -47, 64)
    if not torch.equal(table.cpu(), wanted):
        yield f"{int((table.cpu() != wanted).sum())} of {wanted.numel()} numbers differ from the reference"


def _check_scale(device: str) -> Iterator[str]:
    scale, tracker = torch.full((1,), _POISON, device=device), torch.zeros(1, dtype=torch.int32, device=device)
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
