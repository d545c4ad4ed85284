"""`twin`: train two copies of a model in lockstep, in two precisions, and report per module how far they differ.

Both copies start from the same weights and get the same batches and the same random numbers. After every step the
outputs of their modules, the gradients of these outputs and the gradients of the parameters are compared. A copy whose
dynamic scale was too large repeats the step with the next scale, so that both copies make the same steps: a dynamic
scale that settles is not a difference of the precisions. The model itself does not change.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amplab.diagnose.trial import (
    MakeOptimizer,
    Precision,
    Trial,
    TrialStep,
    check_optimizer,
    check_seed,
    check_step_of_copies,
    check_steps,
    check_tolerance,
    check_trained,
    precision_named,
)
from amplab.diagnose.twin_report import TwinReport, TwinRow, TwinStep, twin_error
from amplab.policies.nested_tensors import floating_tensors_in
from amplab.trace.argument_checks import accepts, check_gradients_on, copy_of
from amplab.trace.as_found import leaves_as_found
from amplab.trace.handed_step import Loss, handed_step, shows_calls
from amplab.trace.named_state import named_state_kept
from amplab.trace.random_states import seed_all
from amplab.trace.tensor_copies import write_value
from amplab.trace.untouched import untouched

__all__ = ["twin"]

_ROUNDING = 1e-5  # relative: a sum of a million float32 values that cancel is about this large against their norm
_SINCE = "each side trains a copy"


@shows_calls(
    "amplab.twin(model, batch, loss=criterion)",
    "amplab.twin(model, batch, step=lambda model, batch: criterion(model(batch)))",
)
@leaves_as_found
def twin(
    model: nn.Module,
    batch: Any,
    left: Precision = "O0",
    right: Precision = "O2",
    *,
    steps: int = 10,
    loss: Loss | None = None,
    step: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    seed: int = 0,
    tolerance: float = 0.1,
) -> TwinReport:
    """Train two copies of `model` in lockstep and report, per module, how far the right one is from the left one.

    A session of `amp` and autocast regions around the call do not cast here.

    Args:
        model: float32, in no session; it does not change. Each side is a deep copy of it, with its plain attributes: a
            state that forward keeps in an attribute belongs to the side, and advances also when a step is repeated.
            Detach a tensor in an attribute that is part of the graph of the step before.
        batch: one batch, used in every step, or a function of the step's number that returns one; see `amplab.xray`
            for how the model is called with it.
        left, right: precisions: an opt_level, "bf16", "fp32", a `PrecisionPolicy` or its string form, or a dict of
            `amp.initialize`'s arguments, such as ``dict(opt_level="O2", loss_scale=128.0)``.
        steps: the number of steps, > 0.
        loss: a function of the output (and the batch); None for the output's own.
        step: instead of `loss`, a function that is called as `step(model, batch)` with the copy that is trained, runs
            its forward and returns the loss.
        optimizer: a function that makes an optimizer of the parameters it gets; by default
            ``SGD(lr=0.01, momentum=0.9)``.
        seed: of the random numbers in each forward, such as dropout's: those of torch, numpy and Python.
        tolerance: the relative error above which the two sides count as diverged.

    Raises:
        TypeError, ValueError: a wrong argument, a model without parameters to train or that cannot be copied, gradients
            that are disabled around the call, or what `amp.initialize` refuses.

    Sync: one per compared tensor.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> report = twin(model, torch.ones(2, 4), loss=lambda out: (out - 1).square().mean(), steps=2)
    >>> report.parted is None, [row.module for row in report.rows() if row.step == 0 and row.what == "output"]
    (True, ['0', '1', '2', ''])
    """
    check_steps(steps)
    check_seed(seed)
    check_tolerance(tolerance)
    check_trained(model)
    for argument, precision in (("left", left), ("right", right)):
        precision_named(precision, argument)
    check_optimizer(optimizer)
    check_gradients_on()
    check_step_of_copies("twin", step, "model, batch")
    if callable(batch):
        _check_batches(batch)
    else:
        handed_step("twin", model, batch, loss=loss, step=step)
    batches = batch if callable(batch) else lambda _: batch
    make = optimizer or (lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9))
    with named_state_kept(loss, step), untouched(model):
        copies = [(copy_of(model, "model", _SINCE), precision) for precision in (left, right)]
        pair = [_Side(Trial(each, make, precision, loss=loss, step=step)) for each, precision in copies]
        try:
            made = tuple(_lockstep(pair, number, batches(number), seed) for number in range(steps))
        finally:
            for side in pair:
                side.close()
    one, other = pair
    return TwinReport(one.name, other.name, made, tolerance, one.scale_cuts, other.scale_cuts)


def _check_batches(batch: Callable[..., Any]) -> None:
    """Raise a TypeError unless `batch` is a function of the step's number."""
    if isinstance(batch, type) or accepts(batch, 1) is not None:
        raise TypeError(
            f"batch={type(batch).__name__}: expected a batch, or a function of the step's number such as "
            "lambda number: batches[number]. A function that returns the loss goes to step=, amplab.twin(model, batch, "
            "step=lambda model, batch: criterion(model(batch)))."
        )


def _lockstep(pair: list["_Side"], number: int, batch: Any, seed: int) -> TwinStep:
    left, right = (side.step_in_range(batch, seed + number) for side in pair)
    return TwinStep(number, left, right, tuple(_rows(number, *pair)))


def _rows(step: int, left: "_Side", right: "_Side") -> Iterator[TwinRow]:
    for (what, name), value in left.seen.items():
        other = right.seen.get((what, name))
        if other is not None and other.shape == value.shape:
            dtype = str(right.grad_dtypes.get(name, other.dtype) if what == "output grad" else other.dtype)
            error = twin_error(value, other)
            yield TwinRow(step, name, what, dtype.removeprefix("torch."), error, _cancels(what, name, left.seen))


def _cancels(what: str, name: str, left: dict[tuple[str, str], Tensor]) -> bool:
    """Whether a parameter's gradient is 0 except for rounding, as that of a bias before a BatchNorm."""
    outer = left.get(("output grad", name.rpartition(".")[0]))
    if what != "weight grad" or outer is None:
        return False
    return bool(left[what, name].double().norm() < _ROUNDING * outer.norm())


class _Side:
    """One copy in training.

    Attributes:
        seen: the tensors of its last step, {(what, name): tensor} in the order of execution.
        grad_dtypes: the dtypes of the gradients of outputs, which `seen` holds unscaled in float64.
        scale_cuts: how many steps were repeated.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.name = self.trial.name
        self.seen: dict[tuple[str, str], Tensor] = {}
        self.grad_dtypes: dict[str, torch.dtype] = {}
        self.scale_cuts = 0
        self._hooks = [
            module.register_forward_hook(self._see(path), with_kwargs=False)
            for path, module in trial.model.named_modules()
        ]

    def step_in_range(self, batch: Any, seed: int) -> TrialStep:
        """Train one step; repeat it with a smaller scale if the loss is finite and the gradients overflowed."""
        scale = math.inf
        while True:
            buffers = [(buffer, buffer.clone()) for buffer in self.trial.model.buffers()]
            seed_all(seed)
            outcome = self._step(copy_of(batch, "batch", _SINCE))
            if not (outcome.found_inf and math.isfinite(outcome.loss) and 1 < outcome.loss_scale < scale):
                return outcome
            scale = outcome.loss_scale
            self.scale_cuts += 1
            for buffer, value in buffers:  # so that BatchNorm counts the batch once
                write_value(buffer, value)

    def _step(self, batch: Any) -> TrialStep:
        self.seen = {}
        self._scale = self.trial.loss_scale
        self.trial.backward(batch)
        gradients = self.trial.gradients()
        if not gradients:
            raise ValueError(
                "the loss depends on no parameter of the model: each side trains a copy, so loss= and step= take "
                "what they are called with, as in step=lambda model, batch: criterion(model(batch))."
            )
        for name, grad in gradients.items():
            self.seen["weight grad", name] = grad.detach().clone()
        return self.trial.finish()

    def close(self) -> None:
        """Remove the hooks and the precision."""
        for hook in self._hooks:
            hook.remove()
        self.trial.close()

    def _see(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001  torch passes three
            for place, tensor in enumerate(floating_tensors_in(output)):
                self._keep(path if place == 0 else f"{path}[{place}]", tensor)

        return hook

    def _keep(self, name: str, output: Tensor) -> None:
        calls = 1
        first = name
        while ("output", name) in self.seen:  # the module was called before
            calls += 1
            name = f"{first} #{calls}"
        self.seen["output", name] = output.detach().clone()  # an in-place op may change it
        if output.requires_grad:
            output.register_hook(lambda grad: self._keep_grad(name, grad))

    def _keep_grad(self, name: str, grad: Tensor) -> None:
        self.grad_dtypes[name] = grad.dtype
        self.seen["output grad", name] = grad.detach().double() / self._scale
