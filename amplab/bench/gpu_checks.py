"""Check the kernels against float64 on fresh random data before anything is measured.

    product = float32(x * inv_scale)          exact in float64, rounded once
    output  = round(product)                  or round(float32(output + product))

Every output lies between zones of poison and holds poison itself: what is not written, or written beside it, is seen.
Inputs begin on and off multiples of 16 bytes; an inf or a NaN lies at the first, a middle or the last element.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from amplab.kernels import unscale_, unscale_add, unscale_copy, unscaled_norm

__all__ = ["POISON", "Check", "placed", "run_checks", "same_bits"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ZONE = 64  # elements of poison on each side
POISON = -77.0
"""What lies in and around outputs before a kernel writes them."""


@dataclass(frozen=True)
class Check:
    """One kernel on one combination of dtypes.

    Attributes:
        name: the kernel and the dtypes.
        lists: how many random lists it was given.
        failure: what was wrong with the first list on which it failed; empty where it passed.
    """

    name: str
    lists: int
    failure: str = ""


class _Lists:
    """A random list of inputs and of poisoned outputs, and what float64 says of it."""

    def __init__(self, seed: int, dtype: torch.dtype, output: torch.dtype, largest: int, device: str) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        sizes = [draw.choice((1, 7, 8, 1023, 1024, 1025, draw.randint(1, largest))) for _ in range(draw.randint(1, 12))]
        offsets = [draw.choice((0, 0, draw.randrange(8))) for _ in sizes]
        self.inputs = [placed(size, offset, dtype, device) for size, offset in zip(sizes, offsets, strict=True)]
        offsets = [draw.choice((offset, draw.randrange(8))) for offset in offsets]
        self.outputs = [placed(size, offset, output, device) for size, offset in zip(sizes, offsets, strict=True)]
        for _, x in self.inputs:
            x.normal_(std=100.0)
        if seed % 2 == 1:
            _, x = draw.choice(self.inputs)
            x[draw.choice((0, x.numel() // 2, x.numel() - 1))] = draw.choice((math.inf, -math.inf, math.nan))
        self.inverse = torch.full((1,), draw.choice((0.5, 1 / 3, 2.0**-16)), device=device)
        self.found_inf = torch.zeros(1, device=device)
        self.first_bad = torch.tensor([-1], device=device)
        self.norm = torch.full((1,), POISON, device=device)
        self.norms = torch.full((len(sizes),), POISON, device=device)

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
        """What receives what is found besides found_inf."""
        return {"norm": self.norm, "norms": self.norms, "first_bad": self.first_bad}


def run_checks(device: str, *, lists: int = 20, largest: int = 300_000) -> list[Check]:
    """Check every unscale kernel on every combination of dtypes.

    Args:
        device: "cuda", or "cpu" to check the CPU's kernels or the reference.
        lists: random lists for each.
        largest: elements of a tensor.
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


def _repeat(name: str, check: Callable[[_Lists], Iterator[str]], lists: int, arguments: tuple) -> Check:
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
        # Of two float32 numbers float64 holds the sum, but for far-apart ones, where the rounding is the same.
        expected.append((y.double() + product.double()).to(wide).to(y.dtype))
    rooms = [room.clone() for room, _ in lists.outputs]
    unscale_add(lists.x, lists.y, lists.found_inf, lists.inverse, **lists.findings)
    yield from _compare(lists, lists.outputs, expected, rooms)


def _read_only(lists: _Lists) -> Iterator[str]:
    rooms = [room.clone() for room, _ in lists.inputs]
    products = [_product(x, _arithmetic(x.dtype), lists.inverse) for x in lists.x]
    unscaled_norm(lists.x, lists.found_inf, lists.inverse, **lists.findings)
    if not all(same_bits(room, before) for (room, _), before in zip(lists.inputs, rooms, strict=True)):
        yield "wrote what it was to read"
    yield from _compare_findings(lists, products)


def _compare(
    lists: _Lists, written: list[tuple[Tensor, Tensor]], expected: list[Tensor], rooms: list[Tensor]
) -> Iterator[str]:
    for index, ((room, now), wanted, before) in enumerate(zip(written, expected, rooms, strict=True)):
        if not same_bits(now, wanted):
            different = int((now.double().nan_to_num(7e77) != wanted.double().nan_to_num(7e77)).sum())
            yield f"tensor {index}: {different} of {now.numel()} elements differ from float64"
        before[now.storage_offset() :][: now.numel()] = now
        if not same_bits(room, before):
            yield f"tensor {index}: memory beside it was written"
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


def placed(numel: int, offset: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A tensor `offset` elements after a multiple of 16 bytes, and the poisoned room that it lies in."""
    room = torch.full((numel + 2 * _ZONE + 8,), POISON, dtype=dtype, device=device)
    return room, room[_ZONE + offset :][:numel]


def _product(x: Tensor, output: torch.dtype, inverse: Tensor) -> Tensor:
    return (x.double() * inverse.double()).to(_arithmetic(x.dtype, output)).to(output)


def _arithmetic(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN and NaN being the same."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
