"""Lesson 11, your own functions and batches: a norm of your own in half, batches that arrive, and the checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from amplab.amp import Session, autocast, custom_bwd, custom_fwd
from amplab.display.charts import Chart, line_chart
from amplab.display.html import page
from amplab.display.numbers import binary_power
from amplab.lab import load_task
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import keys_fault, shown, yours
from amplab.views import Choice, Explorable, Slider

__all__ = [
    "DataBatch",
    "RmsNorm",
    "TupleBatch",
    "arriving",
    "check_batch",
    "check_function",
    "check_registrations",
    "digits",
    "in_float32",
    "norm_explorer",
    "output_sizes",
    "rms",
    "rms_norm",
]

GAINS = range(-16, 13)
"""Exponents of the factors on the images."""


def digits(count: int = 8) -> tuple[Tensor, Tensor]:
    """Return images of digits `(count, 64)` in [0, 1] and their labels `(count,)`."""
    images, labels = load_task("digits", 0).batch(0, count)
    return images.flatten(1), labels


def rms(values: Tensor) -> float:
    """Return the root of the mean square of all elements, computed in float64."""
    return float(values.detach().double().square().mean().sqrt())


def rms_norm(x: Tensor) -> Tensor:
    """Return each row of `x` `(rows, features)` divided by its root mean square."""
    r = ((x * x).mean(1, keepdim=True) + 1e-12).rsqrt()  # (rows, 1)
    normed: Tensor = x * r
    return normed


class RmsNorm(Function):
    """`rms_norm` with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return each row divided by its root mean square."""
        r = ((x * x).mean(1, keepdim=True) + 1e-12).rsqrt()  # (rows, 1)
        ctx.save_for_backward(x, r)
        normed: Tensor = x * r
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        x, r = ctx.saved_tensors
        of_x: Tensor = grad * r - x * r**3 * (grad * x).mean(1, keepdim=True)
        return of_x


def in_float32(function: type[Function]) -> type[Function]:
    """Return the autograd function with its decorators: its inputs are cast to float32 under autocast."""
    forward = custom_fwd(function.forward, device_type="cpu", cast_inputs=torch.float32)
    backward = custom_bwd(function.backward, device_type="cpu")
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"{function.__name__}InFloat32", (function,), members)


@lru_cache(maxsize=8)
def output_sizes(decorated: bool) -> list[float]:
    """Return the root mean square of what `RmsNorm` returns in half, for images times each of 2^`GAINS`.

    Args:
        decorated: with `custom_fwd` and ``cast_inputs=torch.float32``.
    """
    images, _ = digits()
    function = in_float32(RmsNorm) if decorated else RmsNorm
    sizes = []
    with torch.no_grad(), autocast("cpu", dtype=torch.float16):
        for gain in GAINS:
            sizes.append(rms(function.apply((images * 2.0**gain).half())))
    return sizes


@dataclass(frozen=True)
class _NormAtGain:
    """What the norm returns at one gain, over the chart of all gains."""

    gain: int
    size: float
    chart: Chart

    def __repr__(self) -> str:
        return f"images × {binary_power(self.gain)}: root mean square of the output {self.size:.2f}, expected 1.00"

    def _repr_html_(self) -> str:
        return page(f"{self!r}.", self.chart.html())


def _norm_at(gain: int, decorators: str) -> _NormAtGain:
    sizes = output_sizes(decorators != "none")
    chart = line_chart(
        {"output": sizes},
        x=list(GAINS),
        x_label="factor of the images, as a power of two",
        y_label="root mean square of the output",
        marks={gain: "here"},
    )
    return _NormAtGain(gain, sizes[gain - GAINS[0]], chart)


def norm_explorer() -> Explorable:
    """Return the output of `RmsNorm` in half, with the size of its input and its decorators to choose."""
    return Explorable(
        _norm_at,
        gain=Slider(GAINS[0], GAINS[-1], value=0, label="images × 2^"),
        decorators=Choice(("none", "custom_fwd(cast_inputs=torch.float32)"), label="decorators"),
    )


class TupleBatch(NamedTuple):
    """Images and labels as a named tuple."""

    images: Tensor
    labels: Tensor


@dataclass
class DataBatch:
    """Images and labels as a dataclass."""

    images: Tensor
    labels: Tensor


class _Look(nn.Module):
    """A model that keeps the batch which its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.seen: Any = None

    def forward(self, batch: Any) -> Tensor:
        self.seen = batch
        out: Tensor = self.layer.weight.sum()
        return out


def arriving(batch: Any, opt_level: str = "O2") -> Any:
    """Return the batch as the forward of a model gets it at an opt_level."""
    session = Session()
    model = session.initialize(_Look(), opt_level=opt_level, verbosity=0)
    try:
        model(batch)
        return model.seen
    finally:
        session.reset()


@exercise("11-1")
def check_function(answer: type[Function]) -> str | None:
    """Check an autograd function with one input that has to compute x * x in float32 under autocast.

    Form:
        run the cell that decorates Square, and set answer = Square, without a call.

    Right:
        Forward computes in float32, and backward runs as forward did.
    """
    x = torch.full((4,), 300.0, requires_grad=True)
    with autocast("cpu", dtype=torch.float16):
        hidden = x.half()
        squares = yours(answer.apply)(hidden)
    if not isinstance(squares, Tensor):
        return f"forward returned {shown(squares)}: expected x * x, a tensor."
    if not bool(squares.isfinite().all()):
        return f"300 * 300 is inf: forward still computes in half. {_why_half(answer.forward)}"
    yours(squares.sum().backward)()
    if x.grad is None or not torch.equal(x.grad, torch.full((4,), 600.0)):
        return f"the gradient of x * x at 300 is 600, not {x.grad if x.grad is None else x.grad[0].item():g}."
    if not hasattr(answer.backward, "__wrapped__"):
        return "backward has no decorator: without custom_bwd it does not know in which dtypes forward ran."
    return None


def _why_half(forward: Callable[..., Any]) -> str:
    """Return why a forward computes in half, from the arguments with which it was decorated."""
    given = inspect.getclosurevars(forward).nonlocals
    cast, device = given.get("cast_inputs"), given.get("device_type")
    if not hasattr(forward, "__wrapped__"):
        return "It has no decorator: write @amplab.custom_fwd(…) below @staticmethod, with cast_inputs=torch.float32."
    if forward.__globals__["__name__"].startswith("torch."):
        return "Its decorator is that of torch, which amplab.autocast does not turn on: write @amplab.custom_fwd(…)."
    if cast is not torch.float32:
        return f"Its decorator has cast_inputs={cast}: write cast_inputs=torch.float32."
    if device != "cpu":
        return f'Its decorator has device_type={device!r}, and these tensors are on the CPU: write device_type="cpu".'
    return "Its decorator gives it float32 tensors: leave out what makes them half in its body."


@exercise("11-2")
def check_batch(answer: Callable[[Tensor, Tensor], Any]) -> str | None:
    """Check a batch class: `answer(images, labels)` makes a batch, which O2 casts by calling its ``to``.

    Form:
        complete MyBatch and set answer = MyBatch, without a call.

    Right:
        Images arrive in half, labels keep their dtype, and devices work, too.
    """
    images, labels = torch.rand(2, 64), torch.tensor([2049, 7])
    batch = answer(images, labels)
    if not hasattr(batch, "to"):
        return "the batch has no method to: at O2 it arrives uncast."
    seen = yours(arriving)(batch)
    if not (_is_batch(batch) and _is_batch(seen)):
        return f"to returned {shown(seen)}: it has to return a batch with the tensors images and labels."
    if seen.images.dtype != torch.float16:
        return f"the images arrive in {seen.images.dtype}: pass on to images.to(...) what to gets."
    if seen.labels.dtype != torch.int64:
        return (
            f"the labels arrive in {seen.labels.dtype}, and label 2049 is now {seen.labels[0].item():.0f}: cast only "
            "floating-point tensors."
        )
    if batch.images.dtype != torch.float32:
        return "to changed the batch itself: return a new one, as Tensor.to does."
    moved = yours(batch.to)("meta")  # a device that every machine has
    if not _is_batch(moved) or moved.images.dtype != torch.float32:
        return 'to("cuda") has to keep the dtypes.'
    if {moved.images.device.type, moved.labels.device.type} != {"meta"}:
        return 'to("cuda") has to move the images and the labels.'
    return None


def _is_batch(given: Any) -> bool:
    return all(isinstance(getattr(given, name, None), Tensor) for name in ("images", "labels"))


@exercise("11-3")
def check_registrations(answer: Mapping[str, str]) -> str | None:
    """Check "half", "float" or "promote" for three functions.

    Form:
        write "half", "float" or "promote" behind each name.

    Right:
        Products in half, sums of squares in float32, and a sum of two tensors in the wider dtype of the two.
    """
    why = {
        "my_matmul": ("half", "a matrix product is what half is fast at, and its sums are accumulated in float32"),
        "my_rms_norm": ("float", "squares above 65504 or below 2^-25 leave the range of half"),
        "my_residual": ("promote", "x + y needs one dtype for both, and a float32 argument must not be rounded"),
    }
    if fault := keys_fault(answer, why):
        return fault
    for name, (right, reason) in why.items():
        if answer[name] not in ("half", "float", "promote"):
            return f"{name}: {answer[name]!r} is none of 'half', 'float', 'promote'."
        if answer[name] != right:
            return f"{name}: {answer[name]!r} does not fit, since {reason}."
    return None
