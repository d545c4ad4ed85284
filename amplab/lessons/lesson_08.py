"""Lesson 08, master weights and clipping: the network, updates that half loses, and runs that clip at both places.

lost_updates    of each tensor, the share of the updates that do not change a half weight
losses_of       a run on real digits at one opt_level
clipped_losses  the same with clipping before or after the gradients are unscaled
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amplab import amp
from amplab.amp import MemoryUse, Session
from amplab.display.charts import Chart, bar_chart, line_chart
from amplab.display.numbers import binary_power
from amplab.lab.tasks.digits import digit_images
from amplab.lessons.exercises import exercise

__all__ = [
    "LATE",
    "RIGHT",
    "before_the_step",
    "check_bytes_per_parameter",
    "check_clipped_step",
    "check_smallest_rate",
    "clipped_losses",
    "digits",
    "draw_clipping",
    "draw_lost_updates",
    "losses_of",
    "lost_updates",
    "memory_at",
    "network",
]

RIGHT = "unscale, then clip"
LATE = "clip, then unscale"

_MAX_NORM, _STEPS = 0.5, 30
_RATES = {"SGD": 0.5, "Adam": 0.01}


@functools.lru_cache(maxsize=2)
def digits(gray_levels: int = 1) -> tuple[Tensor, Tensor]:
    """Return 256 images ``(256, 64)`` with values from 0 to ``gray_levels``, and their labels ``(256,)``."""
    images, labels = digit_images()
    return images[:256].flatten(1) * gray_levels, labels[:256]


def network() -> nn.Sequential:
    """Return a network for the digits with 2410 weights, the same at every call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def before_the_step() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network and SGD at O2 after one backward: the gradients of the digits are on the masters."""
    amp.reset()
    start = network()
    model, optimizer = amp.initialize(start, torch.optim.SGD(start.parameters(), lr=2**-8), opt_level="O2", verbosity=0)
    images, labels = digits()
    with amp.scale_loss(F.cross_entropy(model(images), labels), optimizer) as scaled_loss:
        scaled_loss.backward()
    return model, optimizer


def lost_updates(model: nn.Module, learning_rate: float) -> dict[str, float]:
    """Return the share of each tensor's updates by SGD that a half weight loses; updates of exactly 0 do not count.

    Args:
        model: float32, with gradients.
        learning_rate: > 0.

    Sync: one per tensor.
    """
    shares = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        weight, update = param.detach().half(), learning_rate * param.grad
        unchanged = (weight.float() - update).half() == weight
        moves = update != 0
        shares[name] = (unchanged & moves).sum().item() / max(1, int(moves.sum()))
    return shares


@functools.cache
def _with_gradients() -> nn.Sequential:
    model = network()
    images, labels = digits()
    F.cross_entropy(model(images), labels).backward()
    return model


def draw_lost_updates(power: int) -> Chart:
    """Draw `lost_updates` of the network at the learning rate ``2 ** power``, in percent."""
    shares = lost_updates(_with_gradients(), 2.0**power)
    percent = {name: float(round(100 * share)) for name, share in shares.items()}
    return bar_chart(
        percent, unit="%", label=f"updates that half loses at learning rate {binary_power(power)}", whole=100
    )


def losses_of(opt_level: str, learning_rate: float, steps: int = 200) -> list[float]:
    """Train the network with SGD on digits of 16 gray levels, and return the loss of every step."""
    images, labels = digits(16)
    session, model = Session(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    session.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images).float(), labels)
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    session.reset()
    return losses


def memory_at(opt_level: str) -> MemoryUse:
    """Return the bytes of the network and of Adam after one step at ``opt_level``."""
    images, labels = digits()
    session, model = Session(), network()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    session.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    loss = F.cross_entropy(model(images).float(), labels)
    with session.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    memory = session.memory()
    session.reset()
    return memory


@functools.lru_cache(maxsize=64)
def clipped_losses(order: str, scale: float, optimizer: str = "SGD") -> tuple[float, ...]:
    """Train at O1 with a static loss scale, clip to a norm of 0.5, and return the loss of each of 30 steps.

    Args:
        order: `RIGHT` or `LATE`, which clips gradients that are still scaled.
        scale: the loss scale.
        optimizer: "SGD" or "Adam".
    """
    images, labels = digits()
    session, model = Session(), network()
    chosen: Any = getattr(torch.optim, optimizer)(model.parameters(), lr=_RATES[optimizer])
    session.initialize(model, chosen, opt_level="O1", loss_scale=scale, verbosity=0)
    losses = []
    for _ in range(_STEPS):
        chosen.zero_grad()
        loss = F.cross_entropy(model(images).float(), labels)
        with session.scale_loss(loss, chosen) as scaled_loss:
            scaled_loss.backward()
            if order == LATE:
                nn.utils.clip_grad_norm_(session.master_params(chosen), _MAX_NORM)
        if order == RIGHT:
            nn.utils.clip_grad_norm_(session.master_params(chosen), _MAX_NORM)
        chosen.step()
        losses.append(loss.item())
    session.reset()
    return tuple(losses)


def draw_clipping(power: int, order: str, optimizer: str) -> Chart:
    """Draw the losses of `clipped_losses` at the scale ``2 ** power``, and those of the right order."""
    curves = {RIGHT: clipped_losses(RIGHT, 2.0**power, optimizer)}
    if order != RIGHT:
        curves[order] = clipped_losses(order, 2.0**power, optimizer)
    rounded = {name: [round(loss, 2) for loss in losses] for name, losses in curves.items()}
    return line_chart(rounded, x_label="step", y_label=f"loss ({optimizer}, scale {binary_power(power)})")


@exercise("08-1")
def check_smallest_rate(answer: float) -> str | None:
    """The smallest power of two that moves a half weight of 0.75 by SGD, with a gradient of 1.

    Form:
        write 2**-3 for an eighth.

    Right:
        Above 0.5 half numbers are 2^-11 apart. 2^-12 is exactly half of that, and the tie goes back to 0.75.
    """
    weight, rate = torch.tensor(0.75, dtype=torch.float16), float(answer)
    if math.frexp(rate)[0] != 0.5:
        return f"{answer} is not a power of two: write 2**-3 for an eighth."
    if weight - rate == weight:
        spacing = 2.0**-11
        return f"0.75 - {rate:.3g} rounds back to 0.75: the update is {rate / spacing:g} of the spacing, 2^-11."
    if weight - rate / 2 != weight:
        return f"{rate:.3g} moves the weight, but half of it, {rate / 2:.3g}, moves it, too: try smaller ones."
    return None


@exercise("08-2")
def check_bytes_per_parameter(answer: float) -> str | None:
    """The bytes that weights, masters and Adam's state take for each parameter at O2.

    Right:
        2 for the half weight, 4 for its master, 8 for Adam's two float32 moments.
    """
    memory = memory_at("O2")
    parameters = sum(param.numel() for param in network().parameters())
    right = round((memory.parameters + memory.masters + memory.optimizer_state) / parameters)
    if answer == right:
        return None
    missing: dict[float, str] = {
        right - 2: "you count no half weights: the model still computes with them",
        right - 4: "one part is missing: masters are float32, and so are both of Adam's moments",
        right - 8: "Adam keeps two moments for each parameter, in float32",
        right + 4: "gradients are not asked for here",
        right + 2: "gradients are not asked for here",
    }
    return f"{answer} is not what memory() counts: {missing.get(answer, 'add 2, 4 or 8 bytes for each part')}."


_Step = Callable[[Session, Tensor, torch.optim.Optimizer], Any]


@exercise("08-3")
def check_clipped_step(answer: _Step) -> str | None:
    """A function of (session, loss, optimizer) that makes a step at O2 with gradients clipped to a norm of 1.

    Form:
        write def answer(session, loss, optimizer).

    Right:
        The scale is removed at the end of the block, the masters are clipped after it, and then comes the step.
    """
    used, asked = _used_by(answer, norm := 8.0)
    if (fault := _misstep(used, norm, asked)) is not None:
        return fault
    if abs((used := _used_by(answer, 0.5)[0]) - 0.5) < 0.01:
        return None
    return f"gradients of norm 0.5, which is below the limit, became {used:.3g}: a clip leaves them as they are."


_SCALE, _RATE = 1024.0, 0.5


class _Recorded(Session):
    """A session that keeps when its parameters were asked for, to be clipped: (which, when)."""

    def __init__(self) -> None:
        super().__init__()
        self.when, self.asked = "before the block of scale_loss", set[tuple[str, str]]()

    @contextmanager
    def scale_loss(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        with super().scale_loss(*args, **kwargs) as scaled_loss:
            self.when = "inside the block of scale_loss"
            yield scaled_loss
        self.when = "between"

    def master_params(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        self.asked.add(("masters", self.when))
        return super().master_params(optimizer)

    def model_params(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        self.asked.add(("model", self.when))
        return super().model_params(optimizer)

    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        self.asked.add(("masters", self.when))
        return super().clip_grad_norm_(optimizer, *args, **kwargs)


def _used_by(answer: _Step, norm: float) -> tuple[float, set[tuple[str, str]]]:
    """Run a step on a loss whose gradient has norm `norm`; return the norm that it used, and what it asked for."""
    session, model = _Recorded(), nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    session.initialize(model, optimizer, opt_level="O2", loss_scale=_SCALE, verbosity=0)
    optimizer.register_step_post_hook(lambda *_: setattr(session, "when", "after optimizer.step()"))
    try:
        loss = model(torch.full((1, 4), norm / 2)).float().sum()  # four elements: its gradient has this norm
        answer(session, loss, optimizer)
        asked = set(session.asked)
        (master,) = session.master_params(optimizer)
        return float(master.detach().norm()) / _RATE, asked
    finally:
        session.reset()


def _misstep(used: float, norm: float, asked: set[tuple[str, str]]) -> str | None:
    """Return what is wrong with a step that used gradients of norm ``used``; None for 1."""
    for wrong, sentence in (
        (0.0, "the weights did not change: call backward on the scaled loss, and optimizer.step() at the end"),
        (norm, f"the step used gradients of norm {norm:g}: {_unclipped(asked)}"),
        (1 / _SCALE, f"the step is {_SCALE:g} times too short: the gradients were clipped while they were scaled"),
        (norm * _SCALE, "the step used gradients that are still scaled: let the block of scale_loss end first"),
    ):
        if abs(used - wrong) <= 0.01 * wrong:
            return f"{sentence}."
    return None if abs(used - 1) < 0.01 else f"the step used gradients of norm {used:.3g}; expected 1."


def _unclipped(asked: set[tuple[str, str]]) -> str:
    """Return why gradients were not clipped, from which parameters were asked for, and when."""
    if ("masters", "between") in asked:
        return "session.master_params was called at the right place; the limit of the clip has to be 1.0"
    if late := [when for which, when in sorted(asked) if which == "masters"]:
        return (
            f"session.master_params was called {late[0]}: clip after the block of scale_loss, before optimizer.step()"
        )
    if asked:
        return "at O2 the optimizer uses the masters: clip session.master_params, not the parameters of the model"
    return "nothing clips them; clip session.master_params(optimizer) between the block of scale_loss and the step"
