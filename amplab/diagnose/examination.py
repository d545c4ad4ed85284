"""`doctor`: look at the machine, or at a model in training, and say what is wrong with it.

    doctor()                                                      the machine
    doctor(model, loss_fn, optimizers=..., amp=...)               one step, its values and its parameters
    doctor(model, loss_fn, train_step=..., run=..., ...)          the loop around it, and the run so far, too

Here the rules are applied and what they find is put in order; each rule is in a file of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp import LossScaleCollapse, Session, default_session
from amplab.diagnose.arguments import check_arguments, check_no_arguments
from amplab.diagnose.finding import Finding, Findings
from amplab.diagnose.first_nonfinite import Setting, explain, setting_of
from amplab.diagnose.machine import MachineReport, machine_report
from amplab.diagnose.observations import Observation
from amplab.diagnose.observed_step.blame import blame
from amplab.diagnose.observed_step.values import ObservedStep, observe_step
from amplab.diagnose.rehearsals import rehearse_loop
from amplab.diagnose.remedies.api_styles import face_of
from amplab.diagnose.rules.arithmetic import arithmetic_findings
from amplab.diagnose.rules.gradients import gradient_findings
from amplab.diagnose.rules.nonfinite import finding_of, level_in_use
from amplab.diagnose.rules.parameters import nonfinite_buffers, parameter_findings
from amplab.diagnose.rules.raised import Raised, finding_of_error
from amplab.diagnose.rules.run import run_findings
from amplab.diagnose.rules.schedule import schedule_findings
from amplab.diagnose.rules.speed import speed_findings
from amplab.diagnose.rules.updates import optimizers_left_out, updates_bound_to_be_lost, updates_lost
from amplab.diagnose.rules.values import value_findings
from amplab.diagnose.train_step.schedules import schedulers_of
from amplab.trace.engines import compiled_functions_eagerly

__all__ = ["causes_first", "doctor"]

_OF_THE_RUN = ("scale-collapse", "nonfinite-loss")
_SYMPTOMS = (*_OF_THE_RUN, "nonfinite-parameter")
_SAYS_MORE = ("scale-too-large", "nonfinite-gradient")  # of skipped steps than that they are skipped
_WRONG_STEPS = ("adam-on-half", "stepped-with-scaled-gradients", "unscaled-twice")  # after which any rate diverges
_CONSEQUENCES_OF_DIVERGING = (*_SYMPTOMS, "overflow-in-half", "logits-overflow-half", "reduction-overflows-half",
                              "nonfinite-in-float32", "cast-overflows-half")  # fmt: skip


def doctor(
    model: nn.Module | None = None,
    loss_fn: Callable[[], Tensor] | None = None,
    *,
    train_step: Callable[[], Any] | None = None,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    amp: Session | torch.amp.GradScaler | None = None,
    loss_scale: float | None = None,
    batch: Any = None,
    run: Observation | None = None,
    stateful: Sequence[Any] = (),
) -> MachineReport | Findings:
    """Say what is wrong with a model in training, the most harmful first; without arguments look at the machine.

    The model, the optimizers and the scaler are afterwards what they were: of the model what `amplab.xray` puts back,
    so not what its attributes hold and forward changes in place, nor what lies outside of it and is not `stateful`.

    Args:
        model: the model, or a ModuleList of several that learn together; not compiled.
        loss_fn: runs the forward on one batch and returns the loss, not scaled: for what the values say.
        train_step: one whole iteration, with backward and step: for what happens to gradients on their way.
        optimizers: the optimizer, or all of them: for who learns what.
        amp: the session or GradScaler; None takes the apex session of this thread, where there is one.
        loss_scale: the scale to look at the step at; None for the present one.
        batch: the tensors of the batch, to have them named.
        run: the steps so far: for what only a run shows.
        stateful: what else `train_step` changes and has a state_dict; schedulers that its code names are known.

    Raises:
        TypeError: no model, but other arguments; an argument of another type.
        ValueError: a model that cannot be traced, see `trace_step`; a loss scale that is not positive. What the step
            itself raises is a finding.

    Sync: many; this is for a look, once.

    >>> model = nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD([model.weight], lr=0.1)
    >>> print(doctor(model, lambda: model(torch.ones(8, 8)).square().mean(), optimizers=optimizer)[0].symptom)
    bias got a gradient, and no optimizer steps it.
    """
    if model is None:
        check_no_arguments(
            loss_fn=loss_fn, train_step=train_step, optimizers=optimizers, amp=amp, loss_scale=loss_scale, batch=batch,
            run=run, stateful=stateful,
        )  # fmt: skip
        return machine_report()
    chosen = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    chosen = list(chosen) if isinstance(chosen, Iterable) else chosen
    check_arguments(model, loss_fn, train_step, chosen, loss_scale=loss_scale, run=run, stateful=stateful)
    setting = setting_of(amp, loss_scale)
    found = [] if run is None else run_findings(_with_face(run, amp))
    step = None
    if loss_fn is not None:
        step, of_step = _look_at_step(model, loss_fn, setting, batch)
        found = [*found, *of_step]
    found += (*parameter_findings(model, chosen, step), *nonfinite_buffers(model))
    if train_step is None:
        found += updates_bound_to_be_lost(model, chosen, step)
    else:
        found += _look_at_loop(model, train_step, chosen, amp, stateful)
    return Findings.ranked(causes_first(found))


def _with_face(run: Observation, amp: Session | torch.amp.GradScaler | None) -> Observation:
    """A run that does not say who scaled its losses, with what the doctor was given for that."""
    amp = default_session() if amp is None and default_session().initialized else amp
    if run.scaling or amp is None:
        return run
    return replace(run, scaling=face_of(amp), level=(amp.opt_level or "") if isinstance(amp, Session) else "")


def _look_at_step(
    model: nn.Module, loss_fn: Callable[[], Tensor], setting: Setting, batch: Any
) -> tuple[ObservedStep | None, list[Finding]]:
    raised = Raised(loss_fn)
    try:
        step = observe_step(
            model, raised, casting=setting.casting(), loss_scale=setting.loss_scale, batch=batch, detailed=True
        )
    except Exception as error:
        if raised.error is not error and not isinstance(error, RuntimeError | NotImplementedError):
            raise
        return None, [finding_of_error(error, model)]
    blamed = blame(step)
    first = [] if blamed is None else [finding_of(explain(model, loss_fn, setting, step, blamed, batch=batch))]
    level = level_in_use(setting, step)
    of_values = (*value_findings(step, level), *arithmetic_findings(step, level))
    return step, [*first, *of_values, *speed_findings(step.trace, level)]


def _look_at_loop(
    model: nn.Module, train_step: Callable[[], Any], optimizers: Sequence[Optimizer], amp: Any, stateful: Sequence[Any]
) -> list[Finding]:
    raised = Raised(train_step)
    if amp is None and default_session().initialized:
        amp = default_session()
    reached = [each for each in schedulers_of(train_step) if not any(each is other for other in stateful)]
    try:
        with compiled_functions_eagerly():
            seen = rehearse_loop(model, raised, optimizers, amp=amp, stateful=[*stateful, *reached])
        return [
            *gradient_findings(seen, face_of(amp)),
            *optimizers_left_out(seen, face_of(amp)),
            *updates_lost(seen.lost),
            *schedule_findings(seen, face_of(amp)),
        ]
    except LossScaleCollapse:
        return []  # which the run and the step show
    except Exception as error:
        if raised.error is not error and not isinstance(error, RuntimeError | NotImplementedError):
            raise
        return [finding_of_error(error, model, "train_step")]


def causes_first(found: Iterable[Finding]) -> list[Finding]:
    """Leave out symptoms whose cause was found, and doubt causes that a run which diverges explains as well.

    That it diverges is doubted in turn where a step was run again in float32 and its loss had not grown.

    >>> left = causes_first([Finding("diverging", "error", "a", "b", "c", "likely"),
    ...                      Finding("overflow-in-half", "error", "d", "e", "f", "certain")])
    >>> [each.name for each in Findings.ranked(left)]
    ['diverging', 'overflow-in-half']
    """
    found = list(found)
    if any(each.severity == "error" or each.name in _SAYS_MORE for each in found):
        found = [each for each in found if each.name != "still-skipping"]
    names = {each.name for each in found if each.severity == "error"}
    left_out = _OF_THE_RUN if "nonfinite-parameter" in names else ()
    if names.difference(_SYMPTOMS):
        left_out = _SYMPTOMS
    kept = [each for each in found if each.name not in left_out]
    if names.intersection(_WRONG_STEPS):
        return [each for each in kept if each.name != "diverging"]
    if "diverging" not in names:
        return kept
    if _is_refuted(kept):
        return [replace(each, certainty="possible") if each.name == "diverging" else each for each in kept]
    return [replace(each, certainty="possible") if each.name in _CONSEQUENCES_OF_DIVERGING else each for each in kept]


def _is_refuted(found: Sequence[Finding]) -> bool:
    """Whether a step that overflowed in its format has no larger a loss in float32 than the run began with."""
    began = min(each.evidence.get("first_loss", -math.inf) for each in found if each.name == "diverging")
    again = (each.evidence.get("loss_in_float32") for each in found if each.name in _CONSEQUENCES_OF_DIVERGING)
    return any(isinstance(loss, int | float) and loss <= began for loss in again)
