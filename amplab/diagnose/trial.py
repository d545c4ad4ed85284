"""A model in training in one precision, with its own session: `twin` and `ladder` run these.

precision        the arguments of `Session.initialize`
"O0" … "O3"      that opt_level
"bf16"           O1's lists with bfloat16 instead of float16, and no loss scale
"fp32"           O0
a policy         O1 with that policy, or its string form, such as "apex/bfloat16"
a dict           these arguments, such as dict(opt_level="O1", loss_scale=128.0)
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp import ScaleRecord, Session
from amplab.policies import PrecisionPolicy, disable_casts
from amplab.trace.argument_checks import accepts, check_model
from amplab.trace.handed_step import Loss, handed_step
from amplab.trace.step import explains_second_backward

__all__ = [
    "MakeOptimizer",
    "Precision",
    "Trial",
    "TrialStep",
    "check_called_with",
    "check_optimizer",
    "check_seed",
    "check_step_of_copies",
    "check_steps",
    "check_tolerance",
    "check_trained",
    "no_casts_of_the_caller",
    "precision_named",
]

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
Precision = str | PrecisionPolicy | Mapping[str, Any]

_NO_SETTINGS = ("self", "models", "optimizers")
_BF16 = {"opt_level": "O1", "policy": PrecisionPolicy(compute_dtype=torch.bfloat16), "loss_scale": 1.0}
_NAMED: dict[str, dict[str, Any]] = {
    **{level: {"opt_level": level} for level in ("O0", "O1", "O2", "O3")},
    "fp32": {"opt_level": "O0"},
    "bf16": _BF16,
}
_SETTINGS = tuple(name for name in signature(Session.initialize).parameters if name not in _NO_SETTINGS)


def precision_named(precision: Precision, argument: str = "precision") -> tuple[str, dict[str, Any]]:
    """Return the name of a precision and the arguments of `Session.initialize` for it.

    Args:
        precision: see the module's table.
        argument: where the caller got it from, for error messages.

    Raises:
        ValueError: no precision has this name.
        TypeError: another type, or a dict with a key that is not an argument of `Session.initialize`.

    >>> precision_named("O2"), precision_named({"opt_level": "O1", "loss_scale": 128.0})[0]
    (('O2', {'opt_level': 'O2'}), 'opt_level=O1 loss_scale=128.0')
    """
    if isinstance(precision, str):
        if "/" in precision:
            return precision, {"opt_level": "O1", "policy": PrecisionPolicy.parse(precision)}
        if precision not in _NAMED:
            raise ValueError(
                f"{argument}={precision!r}: expected one of {', '.join(map(repr, _NAMED))}, or a policy such as "
                "'apex/bfloat16'."
            )
        return precision, dict(_NAMED[precision])
    if isinstance(precision, PrecisionPolicy):
        return str(precision), {"opt_level": "O1", "policy": precision}
    if isinstance(precision, Mapping):
        unknown = next((name for name in precision if name not in _SETTINGS), None)
        if unknown is not None:
            raise TypeError(
                f"{argument}={dict(precision)!r} has the key {unknown!r}: expected only arguments of amp.initialize: "
                f"{', '.join(_SETTINGS)}."
            )
        return " ".join(f"{name}={value}" for name, value in precision.items()), dict(precision)
    given, also = repr(precision), ""
    if callable(precision):
        given = getattr(precision, "__name__", type(precision).__name__)
        also = "; pass a function that computes the loss as loss="
    raise TypeError(
        f"{argument}={given}: expected a precision: an opt_level such as 'O1', 'bf16', 'fp32', a PrecisionPolicy, or a "
        f"dict of arguments of amp.initialize{also}."
    )


def check_trained(model: Any) -> nn.Module:
    """Return `model`, which a trial can train.

    Raises:
        TypeError, ValueError: as `check_model`; or none of its parameters requires a gradient.
    """
    trained = check_model(model, values=True)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"model={type(model).__name__}: no parameter requires a gradient, so there is nothing to train; expected "
            "one that does, parameter.requires_grad_(True)."
        )
    return trained


@contextmanager
def no_casts_of_the_caller(model: nn.Module, *, none_at_all: bool = True) -> Iterator[None]:
    """Disable the casts in force around the caller; each trial has its own precision.

    Args:
        model: autocast is disabled on its device.
        none_at_all: whether sessions do not cast either. If False, a session that is entered in the block casts instead
            of those around it.
    """
    device = next((weight.device.type for weight in model.parameters()), "cpu")
    with torch.autocast(device, enabled=False), disable_casts() if none_at_all else nullcontext():
        yield


def check_called_with(name: str, function: Any, given: int, such: str) -> None:
    """Raise a TypeError unless `function` takes `given` positional arguments.

    Args:
        name: of the argument.
        function: its value.
        given: the number of values that it will be called with.
        such: code of a valid value, for the message.
    """
    if not callable(function):
        raise TypeError(f"{name}={type(function).__name__}: expected a function, such as {such}.")
    refused = accepts(function, given)
    if refused is not None:
        what = f"{given} argument{'s' * (given != 1)}" if given else "no argument"
        raise TypeError(f"{name} is called with {what}, and {refused}: expected a function such as {such}.")


def check_steps(steps: Any, least: int = 1) -> None:
    """Raise a ValueError unless `steps` is a whole number of at least `least`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < least:
        wanted = "a whole number > 0, such as 10" if least == 1 else f"at least {least} steps, to see a loss fall"
        raise ValueError(f"steps={steps!r}: expected {wanted}.")


def check_tolerance(tolerance: Any) -> None:
    """Raise unless `tolerance` is a finite number >= 0."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        raise TypeError(f"tolerance={tolerance!r}: expected a number >= 0, such as 0.05 for 5 %.")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance}: expected a finite number >= 0, such as 0.05 for 5 %.")


def check_seed(seed: Any) -> None:
    """Raise unless `seed` is a whole number that torch takes."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r}: expected a whole number, such as 0.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed}: expected a whole number of 64 bits, such as 0.")


def check_step_of_copies(tool: str, step: Any, batches: str) -> None:
    """Raise a TypeError unless `step` accepts two arguments: the model copy that the tool made, and a batch."""
    if step is None:
        return
    refused = accepts(step, 2) if callable(step) else f"it is of type {type(step).__name__}"
    if isinstance(step, nn.Module):
        refused = f"this is the module {type(step).__name__}"
    if refused is not None:
        raise TypeError(
            f"step is called as step(model, batch) with the model that {tool} trains, and {refused}: expected a "
            f"function, such as amplab.{tool}({batches}, step=lambda model, batch: criterion(model(batch))); pass a "
            "function of the model's output as loss=."
        )


def check_optimizer(make_optimizer: Any) -> None:
    """Raise a TypeError unless `make_optimizer` is None or a function of the parameters."""
    if make_optimizer is None:
        return
    if isinstance(make_optimizer, Optimizer) or not callable(make_optimizer):
        raise TypeError(
            f"optimizer={type(make_optimizer).__name__}: expected a function that makes an optimizer of the parameters "
            f"it gets, such as {_SUCH}; each trained copy needs its own."
        )
    refused = accepts(make_optimizer, 1)
    if refused is not None:
        raise TypeError(f"optimizer is called with the parameters, and {refused}: expected a function such as {_SUCH}.")


_SUCH = "lambda weights: torch.optim.SGD(weights, lr=0.1)"


def _made(make_optimizer: MakeOptimizer, weights: list[Tensor]) -> Optimizer:
    optimizer = make_optimizer(weights)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer returned {type(optimizer).__name__}: expected a torch optimizer, such as {_SUCH}.")
    if not {*map(id, weights)}.issuperset(map(id, _stepped(optimizer))):
        raise ValueError(f"optimizer steps other parameters than it was given: expected only these, such as {_SUCH}.")
    return optimizer


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


@dataclass(frozen=True)
class TrialStep:
    """One training step of a trial.

    Attributes:
        loss: before scaling.
        loss_scale: what it was multiplied by.
        found_inf: whether a gradient was inf or NaN.
        skipped: whether the optimizer did not change the weights.
        first_nonfinite: the parameter with such a gradient that is nearest the loss.
    """

    loss: float
    loss_scale: float
    found_inf: bool
    skipped: bool
    first_nonfinite: str | None


class Trial:
    """Trains a model in one precision, with its own session and optimizer.

    Args:
        model: in float32. The trial trains this model, not a copy; `close` removes the precision, not the training.
        make_optimizer: a function that returns an optimizer of the parameters it gets, those that require a gradient.
        precision: one of the module's table.
        loss, step: how the loss is computed, as `handed_step` takes them.
        tool: the name of the function that runs the trial, for error messages.
        on_collapse: passed to `Session.initialize`: "warn" or "raise".

    Attributes:
        name: of the precision.
        model: the model in training.

    Raises:
        TypeError, ValueError: not a precision, or not such a function.

    Sync: one per step.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        precision: Precision,
        *,
        loss: Loss | None = None,
        step: Loss | None = None,
        tool: str = "twin",
        on_collapse: str = "warn",
    ) -> None:
        self.name, settings = precision_named(precision)
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._handed = partial(handed_step, tool, loss=loss, step=step)
        self.model, self._optimizer = model, _made(make_optimizer, list(trained.values()))
        names = {id(weight): name for name, weight in trained.items()}
        self._names = [names.get(id(weight), "") for weight in _stepped(self._optimizer)]
        self._casts = settings.get("policy") is not None or settings.get("opt_level", "O1") != "O0"
        self._session = Session()
        self._session.initialize(model, self._optimizer, **{"verbosity": 0, "on_collapse": on_collapse, **settings})
        self._session.subscribe(self._remember)
        self._scaled: ScaleRecord | None = None

    @property
    def loss_scale(self) -> float:
        """What the next loss will be multiplied by."""
        return self._session.loss_scale()

    def train(self, batch: Any) -> TrialStep:
        """Make one step."""
        self.backward(batch)
        return self.finish()

    def backward(self, batch: Any) -> None:
        """Compute the unscaled gradients of one step."""
        self._optimizer.zero_grad()
        with no_casts_of_the_caller(self.model, none_at_all=not self._casts), self._session.casting():
            value = self._handed(self.model, batch)()
            with (
                explains_second_backward(self.model),
                self._session.scale_loss(value, self._optimizer) as scaled,
            ):
                scaled.backward()
        self._loss = value.detach()

    def finish(self) -> TrialStep:
        """Step the optimizer and return the result of the step."""
        self._optimizer.step()
        scaled = self._scaled
        if scaled is None:
            raise RuntimeError("finish() before backward(): expected the gradients of a step.")
        skipped = not self._session.last_step(self._optimizer).stepped
        return TrialStep(self._loss.item(), scaled.loss_scale, scaled.found_inf, skipped, scaled.first_nonfinite)

    def gradients(self) -> dict[str, Tensor]:
        """Return the unscaled gradients of this step by parameter; those of the masters if there are masters."""
        weights = zip(self._names, self._session.master_params(self._optimizer), strict=True)
        grads = {name: weight.grad for name, weight in weights if weight.grad is not None}
        return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads.items()}

    def is_finite(self) -> bool:
        """Whether every weight is finite."""
        return all(math.isfinite(weight.detach().float().abs().sum()) for weight in self.model.parameters())

    def state_bytes(self) -> int:
        """Return the bytes of weights, gradients, masters and optimizer state."""
        return self._session.memory().total

    def close(self) -> None:
        """Remove the precision from the model."""
        self._session.reset()

    def _remember(self, record: ScaleRecord) -> None:
        self._scaled = record
