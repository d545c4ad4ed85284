"""Lesson 12, torch.amp: its recipe with one line left out, and the checks of its exercises."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.display.charts import line_chart
from amplab.display.html import Markup, markup, page
from amplab.display.numbers import binary_power, count
from amplab.lab import load_task
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import keys_fault, shown
from amplab.views import Choice, Explorable, Slider

__all__ = [
    "RECIPE",
    "RecipeRun",
    "check_loaded_scale",
    "check_order",
    "check_train_step",
    "new_model",
    "plain_loop",
    "recipe_explorer",
    "recipe_without",
]

RECIPE = (
    ("autocast", 'with autocast("cpu", dtype=torch.float16):'),
    ("", "    loss = F.cross_entropy(model(images), labels)"),
    ("zero_grad", "optimizer.zero_grad()"),
    ("scale", "scaler.scale(loss).backward()"),
    ("unscale_", "scaler.unscale_(optimizer)"),
    ("", "clip_grad_norm_(model.parameters(), 1.0)"),
    ("", "scaler.step(optimizer)"),
    ("update", "scaler.update()"),
)
"""The lines of one iteration, with the name of each line that can be left out."""

STEPS = 40
_BRIGHT = 16  # a factor on the images of exercise 2: their gradients have norms above 1, so that clipping changes them


class Mlp(NamedTuple):
    """A model and its optimizer."""

    model: nn.Module
    optimizer: Optimizer


def new_model(seed: int = 0) -> Mlp:
    """Return a small network for the digits, and SGD with momentum; the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Mlp(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def plain_loop(steps: int) -> nn.Module:
    """Return the network after a loop in float32 that has neither autocast nor a scaler."""
    model, optimizer = new_model()
    task = load_task("digits", 0)
    for step in range(steps):
        images, labels = task.batch(step, 64)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@dataclass(frozen=True)
class RecipeRun:
    """40 steps of the recipe without one of its lines.

    Attributes:
        left_out: the name of the line in `RECIPE`; "nothing" for the whole recipe.
        losses: the loss of each step.
        scales: the loss scale after each step.
        skipped: the numbers of the skipped steps.
        error: the message of the exception that ended the run; empty if none did.
    """

    left_out: str
    losses: list[float]
    scales: list[float]
    skipped: list[int]
    error: str = ""

    def __repr__(self) -> str:
        """Return the result in one line."""
        name = "the whole recipe" if self.left_out == "nothing" else f"without {self.left_out}"
        if self.error:
            return f"{name}: stops at step {len(self.losses)}: {self.error}"
        return (
            f"{name}: loss {self.losses[0]:.1f} → {self.losses[-1]:.1f}, "
            f"{count(len(self.skipped), 'step')} skipped, "
            f"last loss scale {binary_power(round(math.log2(self.scales[-1])))}"
        )

    def _repr_html_(self) -> str:
        code = "\n".join(f"<s>{markup(line)}</s>" if name == self.left_out else markup(line) for name, line in RECIPE)
        listing = Markup(f"<pre>{code}</pre>")
        if self.error:
            return page(f"Stops at step {len(self.losses)}: {self.error}", listing)
        marks: dict[float, str] = dict.fromkeys(self.skipped, "skipped")
        loss = line_chart({"loss": self.losses}, x_label="step", y_label="loss", marks=marks)
        scale = line_chart({"loss scale": self.scales}, x_label="step", y_label="loss scale", log_y=True)
        return page(f"{self!r}"[:1].upper() + f"{self!r}"[1:], listing, loss.html(), scale.html())


@lru_cache(maxsize=64)
def recipe_without(left_out: str = "nothing", first_scale: int = 16) -> RecipeRun:
    """Run 40 steps of the recipe of `torch.amp` on the digits, without one of its lines.

    Args:
        left_out: the name of a line in `RECIPE`, or "nothing".
        first_scale: the exponent of the first loss scale, 2^first_scale.
    """
    model, optimizer = new_model()
    task = load_task("digits", 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**first_scale)
    losses: list[float] = []
    scales: list[float] = []
    skipped: list[int] = []
    try:
        for step in range(STEPS):
            images, labels = task.batch(step, 64)
            before = scaler.get_scale()
            losses_of_step = _iteration(model, optimizer, scaler, images, labels, left_out)
            losses.append(losses_of_step)
            scales.append(scaler.get_scale())
            if scales[-1] < before:
                skipped.append(step)
    except (AssertionError, RuntimeError) as refused:
        return RecipeRun(left_out, losses, scales, skipped, str(refused).split("  ")[0])
    return RecipeRun(left_out, losses, scales, skipped)


def _iteration(
    model: nn.Module, optimizer: Optimizer, scaler: Any, images: Tensor, labels: Tensor, left_out: str
) -> float:
    """Run one iteration of `RECIPE` without a line; return its loss."""
    with torch.autocast("cpu", dtype=torch.float16, enabled=left_out != "autocast"):
        loss = F.cross_entropy(model(images), labels)
    if left_out != "zero_grad":
        optimizer.zero_grad()
    (loss if left_out == "scale" else scaler.scale(loss)).backward()
    if left_out != "unscale_":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    if left_out != "update":
        scaler.update()
    return loss.item()


def recipe_explorer() -> Explorable:
    """Return the recipe with a switch for each line and a slider for the first loss scale."""
    lines = ("nothing", *(name for name, _ in RECIPE if name))
    return Explorable(
        recipe_without,
        left_out=Choice(lines, label="leave out"),
        first_scale=Slider(0, 24, value=16, label="first loss scale 2^"),
    )


@exercise("12-1")
def check_order(answer: str | Sequence[str]) -> str | None:
    """Check the order of the six calls of an iteration with clipping.

    Form:
        write a list of the six names in order.

    Right:
        Gradients are unscaled before they are clipped, and `update` comes last.
    """
    right = ["scale", "backward", "unscale_", "clip", "step", "update"]
    given = answer.split() if isinstance(answer, str) else list(answer)
    if sorted(given) != sorted(right):
        return f"{shown(given)} are not the six names: use each of {', '.join(sorted(right))} once."
    if given.index("backward") < given.index("scale"):
        return "backward comes before scale: then the gradients are those of the loss without a scale."
    if given.index("unscale_") < given.index("backward"):
        return "unscale_ comes before backward: there is no gradient yet that it can divide."
    if given.index("clip") < given.index("unscale_"):
        return "clip comes before unscale_: it limits gradients that are still multiplied by the loss scale."
    if given.index("step") < given.index("clip"):
        return "step comes before clip: the optimizer uses gradients that nothing limits."
    if given != right:
        return "update is not last: it resets what the scaler knows about this iteration."
    return None


class _Recorded(torch.amp.GradScaler):
    """A scaler that keeps the names of the calls."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.calls: list[str] = []

    def scale(self, outputs: Any) -> Any:
        self.calls.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        self.calls.append("unscale_")
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        self.calls.append("update")
        super().update(new_scale)


@exercise("12-2")
def check_train_step(answer: Callable[..., object]) -> str | None:
    """Check a function that runs one iteration, by running it for five steps on the digits.

    Form:
        complete my_step and set answer = my_step.

    Right:
        Five steps of your function and five of the recipe give the same weights.
    """
    (model, optimizer), (expected, its_optimizer) = new_model(), new_model()
    task, scaler, its_scaler = load_task("digits", 0), _Recorded(), torch.amp.GradScaler("cpu")
    for step in range(5):
        digits = task.batch(step, 64)
        batch = digits._replace(images=digits.images * _BRIGHT)
        answer(model, batch, optimizer, scaler)
        _iteration(expected, its_optimizer, its_scaler, batch.images, batch.labels, "nothing")
        if (fault := _fault(scaler.calls)) is not None:
            return fault
        scaler.calls.clear()
    given, right = (nn.utils.parameters_to_vector(each.parameters()).detach() for each in (model, expected))
    if not torch.equal(given, right):
        worst = float((given - right).abs().max())
        return (
            f"after five steps the weights differ by {worst:.1g} from those of the recipe: compare yours line by line. "
            "Forward and loss are inside autocast, in float16; gradients are set to zero before backward, and clipped "
            "to a norm of 1.0 between unscale_ and step."
        )
    return None


def _fault(calls: list[str]) -> str | None:
    """Return what is wrong with the calls of one iteration."""
    why = {
        "scale": "the backward must start from scaler.scale(loss)",
        "unscale_": "clipping then sees gradients that are still multiplied by the loss scale",
        "step": "use scaler.step(optimizer), which skips a step with inf or NaN",
        "update": "without it the scale never changes",
    }
    for name, reason in why.items():
        if calls.count(name) != 1:
            return f"scaler.{name} was called {calls.count(name)} times in an iteration, expected once: {reason}."
    if calls.index("step") < calls.index("unscale_"):  # step calls it where the loop did not
        return f"scaler.unscale_ is missing: {why['unscale_']}."
    return None


@exercise("12-3")
def check_loaded_scale(answer: Mapping[str, float]) -> str | None:
    """Check a state for `GradScaler.load_state_dict` that continues apex's scale of 32768 after 12 clean steps.

    Form:
        start from a whole state, {**GradScaler("cpu").state_dict(), …}.

    Right:
        A GradScaler that loads this state continues where apex stopped.
    """
    scaler = torch.amp.GradScaler("cpu")
    fresh = scaler.state_dict()
    if fault := keys_fault(answer, fresh):
        return f"{fault} Start from a whole state: {{**GradScaler('cpu').state_dict(), …}}."
    if answer["scale"] != 32768.0:
        return f"the scale is {answer['scale']!r}, expected 32768: apex's `loss_scale` is torch's `scale`."
    if changed := [name for name in fresh if name not in ("scale", "_growth_tracker") and answer[name] != fresh[name]]:
        return f"{changed[0]} is {answer[changed[0]]!r}, expected {fresh[changed[0]]}: keep the rest of the state."
    if answer["_growth_tracker"] != 12:
        return (
            f"the counter of clean steps is {answer['_growth_tracker']!r}, expected 12: apex's `unskipped` is torch's "
            "`_growth_tracker`."
        )
    scaler.load_state_dict(dict(answer))
    loaded = (scaler.get_scale(), scaler._get_growth_tracker())
    return None if loaded == (32768.0, 12) else f"a GradScaler that loads it has scale and counter {loaded}."
