"""`followed_step`: follow every step of a loop as it runs, for steps that cannot run again.

    for batch in loader:
        with amplab.diagnose.followed_step(model, batch) as step:
            loss = step.loss(criterion(model(batch.x), batch.y))
            scaler.scale(loss).backward()
        if step.first is not None:
            print(step)

A followed step takes about twice as long: on one thread of a CPU 1.8 × for a small transformer, 2.1 × for an MLP 512
wide, and 9 × for a tiny MLP of 64-32-10. The smallest and the largest element of every tensor are recorded; on the CPU
also full summaries of the inputs and outputs of the op at fault. `first_nonfinite` costs nothing until a step goes
wrong. It also determines whether the scale, the format or the model is the cause, which takes more than one run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from amplab.diagnose.observed_step.blame import Blame, blame
from amplab.diagnose.observed_step.values import NamedMemory, ObservedStep, StepWatcher, memory_of, named_tensors
from amplab.formats.kept_property import kept_property
from amplab.policies.casting.function_modes import without_function_modes
from amplab.trace.argument_checks import check_model
from amplab.trace.as_found import Undo
from amplab.trace.engines import compiled_functions_eagerly
from amplab.trace.recorder import Recorder

__all__ = ["FollowedStep", "followed_step"]

_GRADIENT = "gradient"


class FollowedStep:
    """One forward and backward, followed while it runs; made by `followed_step`, for a ``with`` block."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._watcher = StepWatcher(_gradients_before(model) | named_tensors(model, batch))
        self._recorder = Recorder(model, self._watcher)
        self._undo: Undo | None = None
        self._ended = False

    def __enter__(self) -> FollowedStep:
        """Start to follow the ops of this thread, and those of its backward."""
        if self._ended:
            raise RuntimeError("this step was followed already: expected a new followed_step for each `with` block.")
        undo = self._undo = Undo()
        try:
            undo.enter_block(compiled_functions_eagerly)
            self._recorder.follow(undo)
        except BaseException:  # an interrupt: the block does not begin, so `__exit__` is not called
            undo.end()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        """Stop following."""
        if self._undo is not None:
            self._undo.__exit__(kind, error, where)
        self._ended = True

    def loss(self, value: Tensor) -> Tensor:
        """Record the loss, before it is scaled, and return it. Without it only gradients are checked."""
        if not isinstance(value, Tensor):
            raise TypeError(f"loss({value!r}): expected the tensor that backward starts from, before .item().")
        with without_function_modes():
            self._watcher.note_loss(value)
        return value

    @kept_property
    def observed(self) -> ObservedStep:
        """Every op with its values. Sync: one.

        Raises:
            RuntimeError: the ``with`` block has not ended, or no op ran in it.
        """
        if not (self._ended and self._recorder.events):
            state = "no op ran in its `with` block" if self._ended else "its `with` block has not ended"
            raise RuntimeError(f"followed_step: {state}; expected a forward in it; read the result after the block.")
        return self._watcher.observed(self._recorder.events, 1.0)

    @kept_property
    def first(self) -> Blame | None:
        """The origin of the first loss or gradient that is not finite; None if all are finite. Sync: one."""
        return blame(self.observed)

    def __str__(self) -> str:
        """Return the op, its module, its line, what it read and what it wrote."""
        found = self.first
        if found is None:
            return f"all finite: {len(self.observed.ops)} ops"
        if found.op is None and found.value.kind == _GRADIENT:
            held = "NaN" if found.value.summary.has_nan else "inf"
            return (
                f"{found.result} is not finite: {found.value.name} contained {held} before the step, and backward adds "
                "to it; call optimizer.zero_grad() first"
            )
        if found.op is None:
            name = found.value.name or "a tensor"
            return f"{found.result} is not finite: {name} was not finite before the step: {found.value.summary}"
        record, begun = self.observed.trace.records[found.op], self.observed.begun.get(found.op)
        inputs = [value.summary for value in self.observed.inputs(found.op)] if begun is None else begun.inputs
        written = found.value.summary if begun is None else begun.outputs[0]
        read = "; ".join(map(str, inputs))
        where = f"{record.op} in {record.module or 'no module'} ({record.phase}, {record.line})"
        return f"{found.result} is not finite: it began at {where}, read {read} and wrote {written}"


def _gradients_before(model: nn.Module) -> dict[int, NamedMemory]:
    """Return the gradients before the step by their memory; backward adds to them."""
    held = ((f"{name}.grad", each.grad) for name, each in model.named_parameters() if each.grad is not None)
    return {memory_of(grad): NamedMemory(name, _GRADIENT) for name, grad in held if memory_of(grad)}


def followed_step(model: nn.Module, batch: Any = None) -> FollowedStep:
    """Return a context manager that follows the forward and the backward in its ``with`` block, op by op.

    The results of the step are bitwise the same as without it, except for an RNN that amplab runs in half on a CPU
    without float16 arithmetic. There an `nn.GRU` or `nn.LSTM` is one call, computed in float32 and rounded once at its
    end; when it is followed, its ops run one by one, and each rounds. Outputs up to 1 then differ by about 4.9e-4, one
    rounding.

    Args:
        model: the model, or a ModuleList of several; not compiled.
        batch: the tensors of the batch in any nesting, for their names in the result.

    Raises:
        TypeError, ValueError: as `amplab.trace.trace_step` of the model.

    Sync: none in the block; one when the result is read.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> with followed_step(model) as step:
    ...     step.loss((model(torch.ones(4, 2)) * float("inf")).sum()).backward()
    >>> step.first.result, step.observed.trace.records[step.first.op].op
    ('loss', 'mul')
    """
    check_model(model, values=True)
    return FollowedStep(model, batch)
