"""`first_nonfinite`: which op made the first inf or NaN of a step, and whether scale, format or model is the cause.

The step runs again with the present random state, and all state is restored. `blame` follows the values back to where
they began, `reruns` runs a step in another format, `rules.nonfinite` writes the finding.

    began in forward          finite in float32: the format     else: the model (or the learning rate before it)
    began in backward         finite at scale 1: the scale      else: as above
    existed before the step   the tensor of the batch, the buffer or the parameter
    not reproduced            finite in a second run in the same format and scale: state that is not restored
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from amplab.amp import Session
from amplab.diagnose.first_nonfinite_page import html, sentence, text
from amplab.diagnose.observed_step.blame import Blame, blame
from amplab.diagnose.observed_step.read_arguments import arguments_read
from amplab.diagnose.observed_step.tensor_summary import TensorSummary, counted
from amplab.diagnose.observed_step.values import ObservedStep, measured_in, observe_step
from amplab.diagnose.remedies.api_styles import ApiStyle, api_style_of
from amplab.diagnose.reruns import Headroom, RerunResult, headroom, probe
from amplab.diagnose.train_step.loop_state import kept
from amplab.display.text import visible
from amplab.policies import PrecisionPolicy
from amplab.policies.nested_tensors import map_tensors, named_tensors_in
from amplab.trace import OpRecord, trace_step
from amplab.trace.argument_checks import check_loss_scale
from amplab.trace.as_found import leaves_as_found
from amplab.trace.handed_step import (
    HandedStep,
    Loss,
    Models,
    Scaler,
    as_model,
    check_scaler,
    handed_step,
    scaler_in_use,
    shows_calls,
)
from amplab.trace.named_state import named_state_kept
from amplab.trace.precision_settings import precision_setting

__all__ = ["FirstNonfinite", "Setting", "explain", "first_nonfinite", "setting_of"]

Cause = Literal["scale", "format", "model", "state", "batch", "buffer", "parameter", "input"]


@dataclass(frozen=True)
class Setting:
    """The conditions of a step: the casts around it and the scale of its loss.

    Args:
        loss_scale: what the loss is multiplied by.
        casting: makes the context in which forward and backward run.
        api_style: who scales the loss: APEX, AMPLAB, TORCH or PLAIN.
        dynamic: whether the scale moves and overflows are skipped.
        level: the opt_level, or empty.
        around_loss: makes the context of the forward and the loss alone, such as an autocast region.
    """

    loss_scale: float = 1.0
    casting: Callable[[], AbstractContextManager[object]] = nullcontext
    api_style: ApiStyle = ApiStyle.PLAIN
    dynamic: bool = False
    level: str = ""
    around_loss: Callable[[], AbstractContextManager[object]] = nullcontext

    def of_step(self, step: HandedStep) -> HandedStep:
        """Return `step` with its forward inside of `around_loss`."""

        def run() -> Any:
            with self.around_loss():
                return step.run()

        return replace(step, run=run)


@dataclass(frozen=True, repr=False)
class FirstNonfinite:
    """Where the first inf or NaN of a step began, and why.

    Args:
        result: the result that is not finite: "loss", or "gradient of NAME".
        cause: "scale" (gone at `fitting_scale`), "format" (gone in float32), "model" (not even finite in float32),
            "state" (finite in a second run under the same conditions, so other runs decide nothing), or the tensor
            that was not finite before the step: "batch", "buffer", "parameter", or "input" for an unnamed tensor.
        record: the op that wrote the first non-finite value; None if a tensor was not finite before the step.
        tensor: the name of that tensor, else empty.
        inputs: summaries of what the op read, or of that tensor.
        output: the summary of what the op wrote.
        chain: the ops from there to the result.
        fitting_scale: the largest power of two, below the scale of the step, at which the step is finite in a run;
            None if there is none from 1 up.
        in_bfloat16: whether the step is finite in bfloat16; None if it did not run.
        in_float32: the result in float32; None if it did not run.
        kind: see `Blame`.
        step: the observed step.
        setting: its casts and its scale.
        at: index of the first element of that tensor that is not finite; empty if unknown.
        reaches: the largest magnitude that the op writes in float64; None if there is no op, or it has no float64.
    """

    result: str
    cause: Cause
    record: OpRecord | None
    tensor: str
    inputs: tuple[TensorSummary, ...]
    output: TensorSummary
    chain: tuple[OpRecord, ...]
    fitting_scale: float | None
    in_bfloat16: bool | None
    in_float32: RerunResult | None
    kind: str
    step: ObservedStep
    setting: Setting
    at: tuple[int, ...] = ()
    reaches: float | None = None

    @property
    def phase(self) -> str:
        """ "forward" or "backward"; empty if a tensor was not finite before the step."""
        return self.record.phase if self.record else ""

    def __str__(self) -> str:
        return visible(text(self))

    def __repr__(self) -> str:
        where = f"{self.record.op} in {self.record.module or 'no module'}" if self.record else self.tensor
        return visible(f"<FirstNonfinite: {sentence(self)}, at {where}>")

    def _repr_html_(self) -> str:
        return html(self)


@shows_calls(
    "amplab.first_nonfinite(model, batch, loss=criterion, scaler=scaler)",
    "amplab.first_nonfinite(model, step=loss_of, scaler=scaler)",
    finds_nothing=True,
)
@leaves_as_found
def first_nonfinite(
    model: Models,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: Loss | None = None,
    scaler: Scaler | ModuleType | None = None,
    opt_level: str | None = None,
    policy: PrecisionPolicy | str | None = None,
    autocast: Any = None,
    loss_scale: float | None = None,
) -> FirstNonfinite | None:
    """Run a step again and report where its first harmful inf or NaN began; None if loss and gradients are finite.

    All state is restored: parameters, buffers, gradients, random states, what the modules' plain attributes refer to,
    and generators among these. Not restored: an object that forward changes in place, and everything outside of the
    modules. If the result depends on these, the cause is "state". A hook of the model may call it, and gets None in the
    runs that this call makes.

    Args:
        model: not compiled; several in a list or dict if `step` runs them all.
        batch, loss, step: as `amplab.xray` takes them, for the step in question. The report uses names for the tensors
            of the batch. `step` may open an autocast region.
        scaler: the GradScaler, `Session` or module ``amp`` that scales the loss; None for this thread's
            ``amp.initialize``, if there was one. A session casts around the step too.
        opt_level, policy, autocast: a precision for the step, as `amplab.xray` takes them; not with a session.
        loss_scale: the scale of the step in question; None for the present one of `scaler`. After a skipped step the
            present scale is smaller than the one that overflowed: pass the one that overflowed.

    Raises:
        TypeError, ValueError: as `amplab.xray`.

    Sync: a few; use it for a step that went wrong.

    >>> model = nn.Linear(2, 1).half()
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(300.0)
    >>> found = first_nonfinite(model, torch.full((1, 2), 300.0).half())
    >>> found.cause, found.record.op, found.result
    ('format', 'linear', 'loss')
    """
    model = as_model(model, values=True)
    if loss_scale is not None:
        check_loss_scale(loss_scale)
    handed = handed_step("first_nonfinite", model, batch, loss=loss, step=step)
    with (
        setting_of(
            model, scaler, opt_level=opt_level, policy=policy, autocast=autocast, loss_scale=loss_scale
        ) as setting,
        kept((), scaler_in_use(scaler), ()),
        named_state_kept(loss, step),
    ):
        handed = setting.of_step(handed)
        seen = observe_step(model, handed, casting=setting.casting(), loss_scale=setting.loss_scale, batch=batch)
        blamed = blame(seen)
        return None if blamed is None else explain(model, handed, setting, seen, blamed, batch=batch)


@contextmanager
def setting_of(
    model: nn.Module,
    scaler: Any,
    *,
    opt_level: str | None = None,
    policy: PrecisionPolicy | str | None = None,
    autocast: Any = None,
    loss_scale: float | None = None,
) -> Iterator[Setting]:
    """Put `model` into the precision of the block; arguments as for `first_nonfinite`.

    Raises:
        TypeError, ValueError: as `precision_setting`; both a session and a precision.
    """
    if opt_level is None and policy is None and autocast is None:
        yield _setting_in_force(scaler_in_use(scaler), loss_scale)
        return
    scaler = check_scaler(scaler)
    if isinstance(scaler, Session):
        raise ValueError(
            "scaler= is a Session (as the module amp is), and opt_level=, policy= or autocast= is given too: expected "
            "one of the two; a session already has the precision that initialize gave it."
        )
    with precision_setting(model, opt_level=opt_level, policy=policy, autocast=autocast) as precision:
        level = (opt_level or "O1") if autocast is None else ""
        if scaler is None:
            style = ApiStyle.APEX if level else ApiStyle.PLAIN
            scale, dynamic = precision.loss_scale, precision.loss_scale > 1
        else:
            scale, style, dynamic = scaler.get_scale(), api_style_of(scaler), scaler.is_enabled()
        yield Setting(loss_scale or scale, precision.casting, style, dynamic, level, precision.around_loss)


def _setting_in_force(scaler: Scaler | None, loss_scale: float | None) -> Setting:
    """Scale and casts of a session or a scaler."""
    if isinstance(scaler, Session):
        dynamic = any(each.dynamic for each in scaler.scalers)
        return Setting(
            loss_scale or scaler.loss_scale(), scaler.casting, ApiStyle.APEX, dynamic, scaler.opt_level or ""
        )
    if scaler is not None:
        return Setting(loss_scale or scaler.get_scale(), nullcontext, api_style_of(scaler), scaler.is_enabled())
    return Setting(loss_scale or 1.0)


def explain(
    model: nn.Module,
    handed: HandedStep,
    setting: Setting,
    step: ObservedStep,
    blamed: Blame,
    *,
    batch: Any = None,
) -> FirstNonfinite:
    """Decide on the cause by running the step under other conditions.

    Args:
        model: the model.
        handed: the step, to run again.
        setting: the conditions of `step`.
        step: the step as it was observed, and `blamed` where its first non-finite value began.
        batch: the tensors of the batch, for their names.
    """
    rerun = _Rerun(model, handed, setting)
    record = None if blamed.op is None else step.trace.records[blamed.op]
    fitting = in_float32 = in_bfloat16 = reaches = None
    at: tuple[int, ...] = ()
    cause: Cause
    if record is None:
        cause = cast(Cause, blamed.value.kind or "input")
        given = _tensor_named(model, batch, blamed.value.name)
        output = blamed.value.summary if given is None else counted([given])[0]
        at = () if given is None else _first_nonfinite_index(given)
        inputs: tuple[TensorSummary, ...] = (output,)
    else:
        begun, seen = step.begun.get(record.index), rerun.around(record.index)
        inputs, wrote, reaches = seen.read, seen.wrote, seen.reaches
        if begun is not None:  # counted while the step was observed, and from before an op in place
            inputs, wrote = begun.inputs, begun.outputs[0]
        output = wrote or blamed.value.summary
        guess = _overflow_of_cast(record, inputs) if record.phase == "backward" else None
        fitting = rerun.fitting_scale(guess) if record.phase == "backward" else None
        cause = "scale"
        if fitting is None:
            in_float32 = rerun.result(torch.float32)
            cause = "format" if in_float32.is_finite else "model"
        if cause != "model" and rerun.result(loss_scale=setting.loss_scale).is_finite:
            cause, fitting, in_float32 = "state", None, None
        in_bfloat16 = rerun.result(torch.bfloat16).is_finite if cause == "format" else None
    return FirstNonfinite(
        blamed.result, cause, record, blamed.value.name, inputs, output, blamed.records(step),
        fitting, in_bfloat16, in_float32, blamed.kind, step, setting, at, reaches,
    )  # fmt: skip


class _Rerun:
    """Runs one step under other conditions."""

    def __init__(self, model: nn.Module, step: HandedStep, setting: Setting) -> None:
        self._model, self._step, self._setting = model, step, setting

    def result(self, number_format: torch.dtype | None = None, loss_scale: float = 1.0) -> RerunResult:
        casting = self._setting.casting()
        return probe(self._model, self._step, casting=casting, loss_scale=loss_scale, number_format=number_format)

    def around(self, op: int) -> _Seen:
        """Return what an op reads and writes, from a run that ends there; nothing if it is not reached."""
        look = _Look(op)
        with contextlib.suppress(_Ended):
            casting, scale = self._setting.casting(), self._setting.loss_scale
            trace_step(self._model, self._step, casting=casting, loss_scale=scale, observer=look)
        return _Seen(tuple(counted(look.inputs)), next(iter(counted(look.outputs)), None), look.reaches)

    def fitting_scale(self, too_large_by: float | None) -> float | None:
        """Return the largest power of two below the scale at which the step is finite; None if 1 is too large.

        Args:
            too_large_by: the least factor by which the scale must fall, known from one value of backward. It saves
                runs if that value decides. None if it is unknown.
        """
        most = self._setting.loss_scale
        if most <= 1:
            return None
        largest = 2.0 ** (math.ceil(math.log2(most)) - 1)
        if too_large_by is not None:
            largest = min(largest, _power_below(most / too_large_by))
        scale = 1.0 if too_large_by is None else largest
        found = self._headroom(scale)
        if scale > 1 and not found.result.is_finite:
            largest, scale, found = scale / 2, 1.0, self._headroom(1.0)
        if found.factor is None:
            return None
        return self._largest_finite(scale, largest, _power_below(min(scale * found.factor, largest)))

    def _largest_finite(self, finite: float, largest: float, expected: float) -> float:
        """Return the largest power of two from `finite` to `largest` at which the step is finite.

        A step may be finite far above `expected`: a double backward, or x ** 3, also writes values in backward that do
        not grow with the scale, and one of these may be the nearest to the end of its format. So after `expected` and
        its neighbours the rest is searched by halves.
        """
        low, high, first = (round(math.log2(each)) for each in (finite, largest, expected))
        tries = [first - 1, first + 1, first]
        while low < high:
            tried = tries.pop() if tries else (low + high + 1) // 2
            if not low < tried <= high:
                continue
            if self.result(loss_scale=2.0**tried).is_finite:
                low = tried
            else:
                high = tried - 1
        return 2.0**low

    def _headroom(self, loss_scale: float) -> Headroom:
        return headroom(self._model, self._step, casting=self._setting.casting(), loss_scale=loss_scale)


def _power_below(scale: float) -> float:
    """Return the largest power of two up to a scale; at least 1."""
    return 2.0 ** math.floor(math.log2(scale)) if scale >= 1 else 1.0


def _overflow_of_cast(record: OpRecord, inputs: tuple[TensorSummary, ...]) -> float | None:
    """Return by what factor the input of a cast leaves the range of its output; None for other ops."""
    if not record.is_cast or not inputs or not inputs[-1].is_finite:
        return None
    to = torch.finfo(record.outputs[0].dtype)
    return inputs[-1].absmax / (to.max * (1 + to.eps / 4))  # which still rounds to the largest number


def _first_nonfinite_index(tensor: Tensor) -> tuple[int, ...]:
    """Return the index of the first element that is not finite; empty for a sparse or nested tensor. Sync: one."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    return tuple(next(iter((~tensor.detach().isfinite()).nonzero().tolist()), ()))


class _Seen(NamedTuple):
    """Summaries of what one op reads and writes, and the largest finite magnitude that it writes in float64."""

    read: tuple[TensorSummary, ...]
    wrote: TensorSummary | None
    reaches: float | None


class _Ended(Exception):
    """The op has run."""


class _Look:
    """Copy what one op reads and writes, then end the run; an `amplab.trace.recorder.Observer`."""

    def __init__(self, op: int) -> None:
        self._left = op
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.reaches: float | None = None

    def before(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._left == 0:
            self.inputs = [each.clone() for each in measured_in(arguments_read(overload, args, kwargs))]
            self.reaches = _largest_in_float64(overload, args, kwargs)

    def after(self, _seen: Any, _event: Any, result: Any) -> None:
        if self._left == 0:
            self.outputs = [each.clone() for each in measured_in((result,))]
            raise _Ended
        self._left -= 1


def _largest_in_float64(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Run an op on copies in float64; return the largest magnitude it writes, None if that fails or is not finite."""
    try:
        args, kwargs = map_tensors((args, kwargs), _in_float64)
        result = overload(*map(_asked, args), **{name: _asked(value) for name, value in kwargs.items()})
    except (RuntimeError, TypeError, NotImplementedError):  # no kernel for float64, or no memory
        return None
    largest = max((each.absmax for each in counted(measured_in((result,)))), default=math.nan)
    return largest if math.isfinite(largest) else None


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _asked(value: Any) -> Any:
    """A requested dtype of floating-point numbers becomes float64."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


@torch.no_grad()
def _tensor_named(model: nn.Module, batch: Any, name: str) -> Tensor | None:
    named = (*model.named_parameters(), *model.named_buffers(), *named_tensors_in(batch, "batch"))
    return next((tensor.detach() for known, tensor in named if known == name), None)
