"""`xray`: every op of one step of any model, with its dtypes, their reason and the line of code it comes from."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from amplab.policies import PrecisionPolicy
from amplab.trace.argument_checks import check_gradients_on, check_loss_scale
from amplab.trace.as_found import leaves_as_found
from amplab.trace.handed_step import HandedStep, Loss, Models, as_model, handed_step, shows_calls
from amplab.trace.kept_tensors import KeptTensors
from amplab.trace.named_state import named_state_kept
from amplab.trace.precision_settings import PrecisionSetting, precision_setting
from amplab.trace.statistics import Statistics
from amplab.trace.step import record_step
from amplab.trace.xray_value import XRay

__all__ = ["xray"]


@shows_calls("amplab.xray(model, batch, loss=criterion)", "amplab.xray(model, step=loss_of)")
@leaves_as_found
def xray(
    model: Models,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: Loss | None = None,
    opt_level: str | None = None,
    policy: PrecisionPolicy | str | None = None,
    autocast: Any = None,
    loss_scale: float | None = None,
    stats: bool = False,
) -> XRay:
    """Run one forward and backward of `model` and return every op with its dtypes, their reason and its line of code.

    All state is restored: parameters, buffers, gradients, training flags, random states and hooks; what the modules'
    plain attributes refer to, and generators among these; an optimizer that `step` steps. Not restored: an object that
    forward changes in place (a list in an attribute, the elements of a tensor that is not a buffer), and everything
    outside of the modules. Within a region of ``torch.autocast``, its cache of cast weights is empty after the call.

    The step runs in the given precision, or in the one in force: that of a model that `amp.initialize` has prepared, or
    of a region around the call (backward then runs in it as well). `XRay.precision` names it. `autocast=` opens a
    region inside of those; `opt_level` and `policy` are refused there.

    Args:
        model: any module that is not compiled or scripted; several in a list or dict if `step` runs them all.
            Compiled functions that it calls run as they are written.
        batch: what the model is called with: `model(tensor)`, `model(**mapping)`, `model(*tuple)`. Of a tuple the
            model gets as many values as its forward takes and the loss the rest: `(inputs, labels)` with
            `loss=F.cross_entropy` is `F.cross_entropy(model(inputs), labels)`.
        loss: a function of the output, and of the rest or of the batch if it takes two arguments. None for the output's
            own `loss` (an attribute or a key), else for the sum of the output; `XRay.loss` says which.
        step: instead of `loss`, a function that runs the forward itself and returns the loss. It is called as
            `step()`, `step(batch)` or `step(model, batch)`, by the number of arguments it requires.
        opt_level: "O0" to "O3": runs the step as after `amp.initialize` at that level, with its loss scale.
        policy: a PrecisionPolicy or its string form, for O1 or for the given level.
        autocast: runs forward and loss under autocast: arguments of `torch.autocast` as a dict such as
            `dict(dtype=torch.bfloat16)`, by default with the model's device; arguments of `amplab.autocast` if
            `policy` is among them; or an instance of either.
        loss_scale: what the loss is multiplied by; None for the scale that belongs to the precision, else 1.
        stats: measure what every op writes, and the gradients. This is slow without the built `tensor_stats` kernel.
            Without stats, model and batch may be on the meta device.

    Raises:
        ValueError: contradicting arguments; a model that is compiled, scripted or not yet initialized, or with stats
            on the meta device; a loss that is not a single number or depends on no parameter; gradients that are
            disabled around the call. What the model raises passes through, with a note on how it was called.
        TypeError: an argument of another type, or neither a batch nor a step.
        RuntimeError: another `opt_level` than "O0" to "O3", as `amp.initialize` raises it.

    Sync: none; with `stats` one, for all ops together, and one for the gradients.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    >>> found = xray(model, torch.ones(2, 8), opt_level="O1")
    >>> [(cast.op, cast.parameter, cast.nbytes) for cast in found.casts if cast.phase == "forward" and cast.module]
    [('linear', '', 96), ('linear', '0.weight', 192), ('linear', '0.bias', 24)]
    """
    check_gradients_on()
    if loss_scale is not None:
        check_loss_scale(loss_scale)
    model = as_model(model, values=bool(stats))
    handed = handed_step("xray", model, batch, loss=loss, step=step)
    with (
        named_state_kept(loss, step),
        precision_setting(model, opt_level=opt_level, policy=policy, autocast=autocast) as precision,
    ):
        setting = precision if loss_scale is None else replace(precision, loss_scale=loss_scale)
        try:
            return _taken(model, handed, setting, KeptTensors(model), stats=stats)
        except RuntimeError as refusal:
            if "saved tensor hooks" not in str(refusal):
                raise
            return _taken(model, handed, setting, None, stats=stats)  # torch.func takes no such hooks: leave memory out


def _taken(
    model: nn.Module, step: HandedStep, setting: PrecisionSetting, kept: KeptTensors | None, *, stats: bool
) -> XRay:
    """Run the step once."""
    statistics = Statistics() if stats else None

    def run() -> Tensor:
        with setting.around_loss():
            return step()

    events = record_step(
        model,
        run,
        casting=setting.casting(),
        loss_scale=setting.loss_scale,
        observer=statistics,
        kept=kept,
        before_restoring=(lambda: statistics.measure_gradients(model)) if statistics else None,
    )
    if statistics:
        statistics.fetch()
    return XRay(
        precision=setting.name,
        loss=step.loss,
        loss_scale=setting.loss_scale,
        model=type(model).__name__,
        kept=kept.peak() if kept else None,
        measured=statistics,
        events=tuple(events),
    )
