"""`doctor`: examine the machine, or a model in training, and report what is wrong.

    doctor()                                                          the machine
    doctor(model, batch, loss=..., optimizer=..., scaler=...)         one step, its values and its parameters
    doctor(model, step=..., optimizer=..., scaler=...)                the same
    doctor(model, step=..., train_step=..., run=..., ...)             also the loop around it, and the run so far

This file applies the rules and ranks what they find; each rule is in the file of its kind.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from amplab.amp import LossScaleCollapse, Session
from amplab.diagnose.catalogue import CATALOGUE
from amplab.diagnose.finding import Finding, Findings
from amplab.diagnose.first_nonfinite import Setting, explain, setting_of
from amplab.diagnose.machine import MachineReport, machine_report
from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.observed_step.blame import blame
from amplab.diagnose.observed_step.values import ObservedStep, observe_step
from amplab.diagnose.ranking import ranked
from amplab.diagnose.remedies.api_styles import Api, api_style_of
from amplab.diagnose.rules.arithmetic import arithmetic_findings
from amplab.diagnose.rules.digits import digits_findings
from amplab.diagnose.rules.divergence import diverging_in_float32
from amplab.diagnose.rules.gradients import gradient_findings
from amplab.diagnose.rules.half_statistics import statistics_in_half
from amplab.diagnose.rules.lost_gradients import gradients_lost_downstream
from amplab.diagnose.rules.nonfinite import api_in_use, finding_of
from amplab.diagnose.rules.parameters import nonfinite_buffers, parameter_findings
from amplab.diagnose.rules.raised import Raised, finding_of_error
from amplab.diagnose.rules.ranks import (
    compression_keeps_nonfinite,
    gradients_missing_on_a_rank,
    model_of_a_rank_findings,
    ranks_findings,
)
from amplab.diagnose.rules.run import run_findings
from amplab.diagnose.rules.scaled_loss import loss_depends_on_scale
from amplab.diagnose.rules.schedule import schedule_findings
from amplab.diagnose.rules.speed import speed_findings
from amplab.diagnose.rules.updates import (
    averages_lost,
    copies_outdated,
    optimizers_left_out,
    updates_bound_to_be_lost,
    updates_lost,
)
from amplab.diagnose.rules.values import value_findings
from amplab.diagnose.train_step.loop_state import kept
from amplab.diagnose.train_step.rehearse_loop import RecordingError, rehearse_loop
from amplab.diagnose.train_step.schedules import schedulers_of
from amplab.display.numbers import count, power
from amplab.parallel.rank_state import RankState
from amplab.parallel.ranks import NeedsOtherRanks, data_parallel, texts_of_ranks, this_rank
from amplab.policies import PrecisionPolicy
from amplab.policies.nested_tensors import samples_in
from amplab.policies.signals import is_interrupt
from amplab.trace.argument_checks import check_loss_scale
from amplab.trace.as_found import leaves_as_found
from amplab.trace.engines import compiled_functions_eagerly
from amplab.trace.handed_step import (
    HandedStep,
    Loss,
    Models,
    Scaler,
    as_model,
    bound_to_batch,
    handed_step,
    optimizers_of,
    scaler_in_use,
    shows_calls,
)
from amplab.trace.named_state import named_state_kept

__all__ = ["doctor"]

_OF_OPS = RuntimeError, NotImplementedError  # what ops raise
_RANKS_WAIT = 30.0
"""Seconds that the doctor on one rank waits for the others."""


@shows_calls(
    "amplab.doctor(model, batch, loss=criterion, optimizer=optimizer, scaler=scaler)",
    "amplab.doctor(model, step=loss_of, optimizer=optimizer, scaler=scaler)",
)
@leaves_as_found
def doctor(
    model: Models | None = None,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: Loss | None = None,
    train_step: Callable[..., Any] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: Scaler | ModuleType | None = None,
    opt_level: str | None = None,
    policy: PrecisionPolicy | str | None = None,
    autocast: Any = None,
    loss_scale: float | None = None,
    run: Observation | None = None,
    stateful: Sequence[Any] = (),
) -> MachineReport | Findings:
    """Report what is wrong with a model in training, the most harmful first; without arguments report on the machine.

    All state of the model, the optimizers and the scaler is restored. Not restored: an object that forward changes in
    place, such as a list in an attribute, and everything outside of the model that is not in `stateful`.

    `step` and `train_step` differ. A step runs the forward and returns the loss; the doctor runs the backward and
    examines every value. A train step is one whole iteration with its own backward and ``optimizer.step()``; the doctor
    runs it and follows the gradients from the backward to the optimizer.

    Of several ranks call it on every one. A step runs on each rank without the others, and the doctor compares them; it
    waits up to 30 seconds for a rank that does not call it. A train step, too, runs without the exchange of
    DistributedDataParallel, SyncBatchNorm, ``combine_ddp`` and `amplab.parallel.Reducer`. Ranks may need different
    numbers of runs, so collectives that a step or a train step calls itself are refused: leave them out.

    Args:
        model: the model; several in a list or dict if `step` runs them all. Not compiled if a step is given.
        batch, loss, step: one step, as `amplab.xray` takes them, with the loss before it is scaled. The tensors of the
            batch are named in the findings.
        train_step: a whole iteration; called as `step` is, with nothing, with the batch, or with the model and the
            batch. With it a step is examined only if `loss` or `step` is given.
        optimizer: the optimizer, or all of them.
        scaler: the GradScaler, `Session` or module ``amp`` that scales the loss; None for this thread's
            ``amp.initialize``, if there was one.
        opt_level, policy, autocast: a precision for the step, as `amplab.xray` takes them; not with a session.
        loss_scale: the scale of the step; None for the present one.
        run: the steps so far, for the rules about runs: an `amplab.watch`, or its observation.
        stateful: what else `train_step` changes and has a state_dict. The schedulers of `optimizer`, and those that the
            code names, are found.

    Raises:
        TypeError: arguments without a model; an argument of another type.
        ValueError: a model that cannot be traced, see `trace_step`; a loss scale that is not positive. What the step
            itself raises is a finding.
        NeedsOtherRanks: of several ranks, a step or train step that calls a collective of ``torch.distributed``.

    Sync: many.

    >>> import torch
    >>> model = nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD([model.weight], lr=0.1)
    >>> print(doctor(model, torch.ones(8, 8), loss=lambda out: out.square().mean(), optimizer=optimizer)[0].symptom)
    bias received a gradient, but no optimizer updates it.
    """
    if model is None:
        _check_no_arguments(
            batch=batch, loss=loss, step=step, train_step=train_step, optimizer=optimizer, scaler=scaler,
            opt_level=opt_level, policy=policy, autocast=autocast, loss_scale=loss_scale, run=run, stateful=stateful,
        )  # fmt: skip
        return machine_report()
    has_step = loss is not None or step is not None or (batch is not None and train_step is None)
    model = as_model(model, compiled=not has_step, values=has_step or train_step is not None)
    optimizers = optimizers_of(optimizer)
    run = _observation(run)
    _check_options(run=run, stateful=stateful, loss_scale=loss_scale)
    handed = None
    if has_step:
        handed = handed_step("doctor", model, batch, loss=loss, step=step)
    elif (opt_level, policy, autocast) != (None, None, None):
        raise TypeError(
            "opt_level, policy or autocast without a step to run in it: expected amplab.doctor(model, batch, "
            "loss=criterion)."
        )
    if train_step is not None:
        train_step = bound_to_batch("doctor", "train_step", train_step, model, batch, such="lambda: train(batch)")
    in_use = scaler_in_use(scaler)
    found = [] if run is None else run_findings(_with_api(run, in_use))
    observed = None
    with setting_of(
        model, scaler, opt_level=opt_level, policy=policy, autocast=autocast, loss_scale=loss_scale
    ) as setting:
        if handed is not None:
            with kept((), in_use, ()), named_state_kept(loss, step):
                observed, of_step = _examine_step(model, setting.of_step(handed), setting, batch, optimizers, in_use)
            found = [*found, *(of_step if run is None else _with_skips(of_step, run))]
    found += (*parameter_findings(model, optimizers, observed), *nonfinite_buffers(model))
    found += updates_bound_to_be_lost(model, optimizers, observed)
    found += model_of_a_rank_findings(
        model, samples_in(batch), in_use.opt_level if isinstance(in_use, Session) else None
    )
    found += compression_keeps_nonfinite(data_parallel(model), Api(api_style_of(in_use)))
    of_ranks, silent = _compare_ranks(model, observed, optimizers, setting.loss_scale)
    found += of_ranks
    if train_step is not None:
        found += _examine_loop(model, train_step, optimizers, in_use, stateful)
    looked_at = (*_looked_at(observed, model, optimizers, run, train_step), *silent)
    return replace(ranked(found), looked_at=looked_at)


def _compare_ranks(
    model: nn.Module, observed: ObservedStep | None, optimizers: Sequence[Optimizer], loss_scale: float
) -> tuple[list[Finding], list[str]]:
    """Compare the ranks: which parameters have a gradient, loss scales, optimizers, weights.

    Every rank waits at most `_RANKS_WAIT` seconds for the others to call the doctor.

    Returns:
        The findings, and which ranks were not compared.
    """
    if this_rank() is None:
        return [], []
    reached = None if observed is None else {name for name, _ in observed.gradients}
    trainable = [name for name, each in model.named_parameters() if each.requires_grad]
    own = {
        "missing": None if reached is None else [name for name in trainable if name not in reached],
        "loss_scale": loss_scale,
        "state": RankState.of(0, model, optimizers).as_dict(),
    }
    texts = texts_of_ranks("doctor", json.dumps(own), timeout=_RANKS_WAIT)
    told = {rank: json.loads(text) for rank, text in enumerate(texts) if text is not None}
    missing = {rank: each["missing"] for rank, each in told.items() if each["missing"] is not None}
    runs = {rank: Observation((StepObservation(0, None, each["loss_scale"]),)) for rank, each in told.items()}
    read = {rank: RankState.from_dict(each["state"]) for rank, each in told.items()}
    found = ranks_findings(runs, {rank: [state] for rank, state in read.items() if state is not None})
    if missing:
        found += gradients_missing_on_a_rank(missing, model)
    silent = [f"rank {rank}" for rank, text in enumerate(texts) if text is None]
    return found, [f"not looked at: {', '.join(silent)}; call amplab.doctor on every rank"] if silent else []


def _looked_at(
    observed: ObservedStep | None,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    run: Observation | None,
    train_step: Callable[..., Any] | None,
) -> Iterator[str]:
    """What was examined, and what to pass for the rest."""
    if observed is not None:
        backward = sum(record.phase == "backward" for record in observed.trace)
        yield (
            f"looked at the values of {count(len(observed.trace) - backward, 'op')} of one forward and "
            f"{count(backward, 'op')} of its backward, at loss scale {power(observed.loss_scale)}"
        )
    parameters = sum(1 for _ in model.parameters())
    yield f"looked at {count(parameters, 'parameter')} of the model and {count(len(optimizers), 'optimizer')}"
    if train_step is not None:
        yield "looked at one whole iteration: unscaling, clipping, optimizer steps, schedulers"
    if run is not None:
        yield f"looked at the losses, loss scales and skips of {count(len(run), 'step')}"
    for name, is_given, what in (
        ("loss=criterion, or step=", observed is not None, "the values of a step"),
        ("optimizer=", bool(optimizers), "which parameters are updated"),
        ("train_step=", train_step is not None, "the loop: unscaling, clipping, optimizer steps"),
        ("run=", run is not None, "the run so far (amplab.watch records it)"),
    ):
        if not is_given:
            yield f"not looked at: {what}; pass {name}"


def _check_no_arguments(**given: Any) -> None:
    """Raise a TypeError for the first argument without a model; None and () do not count."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, tuple) and not value):
            raise TypeError(
                f"doctor got {name}, but no model: pass the model first, amplab.doctor(model, batch, loss=criterion) "
                "or amplab.doctor(model, step=loss_of); without arguments it reports on the machine."
            )


def _observation(run: Any) -> Any:
    """Return the steps of a watch; another value unchanged."""
    return getattr(run, "observation", run)


def _check_options(*, run: Any, stateful: Any, loss_scale: Any) -> None:
    """Raise a TypeError or ValueError for the first wrong option of `doctor`.

    >>> _check_options(run=3, stateful=(), loss_scale=None)
    Traceback (most recent call last):
    TypeError: run=int: expected an amplab.watch, its observation, or None.
    """
    if run is not None and not isinstance(run, Observation):
        raise TypeError(f"run={type(run).__name__}: expected an amplab.watch, its observation, or None.")
    if not isinstance(stateful, Iterable) or not all(hasattr(each, "load_state_dict") for each in stateful):
        kinds = f" of {', '.join(type(each).__name__ for each in stateful)}" if isinstance(stateful, list) else ""
        raise TypeError(
            f"stateful={type(stateful).__name__}{kinds}: expected a list of objects with state_dict and "
            "load_state_dict, such as [scheduler]."
        )
    if loss_scale is not None:
        check_loss_scale(loss_scale)


def _with_api(run: Observation, scaler: Scaler | None) -> Observation:
    """Return a run; add who scaled its losses if it does not say so."""
    if run.scaling or scaler is None:
        return run
    level = (scaler.opt_level or "") if isinstance(scaler, Session) else ""
    return replace(run, scaling=api_style_of(scaler), level=level)


def _examine_step(
    model: nn.Module,
    handed: HandedStep,
    setting: Setting,
    batch: Any,
    optimizers: Sequence[Optimizer],
    scaler: Scaler | None,
) -> tuple[ObservedStep | None, list[Finding]]:
    raised = Raised(handed.run)
    try:
        step = observe_step(
            model,
            replace(handed, run=raised),
            casting=setting.casting(),
            loss_scale=setting.loss_scale,
            batch=batch,
            detailed=True,
        )
    except NeedsOtherRanks:
        raise
    except Exception as error:
        if is_interrupt(error) or (raised.error is not error and not isinstance(error, _OF_OPS)):
            raise
        return None, [finding_of_error(error, model, "step()" if handed.name == "step" else "model(batch)")]
    blamed = blame(step)
    first = [] if blamed is None else [finding_of(explain(model, handed, setting, step, blamed, batch=batch))]
    if blamed is not None and first[0].name in CATALOGUE["diverging"].explains:
        first += diverging_in_float32(model, handed, setting, optimizers, api_in_use(setting, step))
    api = api_in_use(setting, step)
    of_values = [*value_findings(step, api), *arithmetic_findings(step, api), *digits_findings(step, api)]
    if setting.dynamic:  # the scale grows by itself, and an error has lowered it in each step that it made skip
        lowered = bool(first) and first[0].severity == "error"
        of_values = [
            each for each in of_values if each.name != "gradients-underflow" or not (lowered or each.severity == "note")
        ]
    again = _findings_of_reruns(model, handed, setting, step, api, scaler)
    of_values = [*again, *(each for each in of_values if each.name not in {found.name for found in again})]
    return step, [*first, *of_values, *speed_findings(step.trace, api)]


def _with_skips(found: Sequence[Finding], run: Observation) -> list[Finding]:
    """Add to an error of the step how many steps of the run were skipped, and which was the first."""
    skipped = [step.step for step in run if step.skipped]
    if not skipped or not found or found[0].severity != "error":
        return list(found)
    said = f"{len(skipped):,} of {count(len(run), 'step')} were skipped, first step {skipped[0]}."
    evidence = {**found[0].evidence, "skips": len(skipped), "first_skip": skipped[0]}
    return [replace(found[0], symptom=f"{found[0].symptom} {said}", evidence=evidence), *found[1:]]


def _findings_of_reruns(*given: Any) -> list[Finding]:
    """Apply the rules that run a step again; a step that cannot, such as one that reads an iterator, has none."""
    found: list[Finding] = []
    for rule in (loss_depends_on_scale, gradients_lost_downstream, statistics_in_half):
        try:
            found += rule(*given)
        except Exception as error:
            if is_interrupt(error):
                raise
    return found


def _examine_loop(
    model: nn.Module,
    train_step: Callable[[], Any],
    optimizers: Sequence[Optimizer],
    scaler: Scaler | None,
    stateful: Sequence[Any],
) -> list[Finding]:
    raised = Raised(train_step)
    schedulers = schedulers_of(train_step, optimizers=optimizers, counting=False)
    reached = [each for each in schedulers if not any(each is other for other in stateful)]
    api = Api(api_style_of(scaler))
    try:
        with compiled_functions_eagerly():
            seen = rehearse_loop(model, raised, optimizers, scaler=scaler, stateful=[*stateful, *reached])
        return [
            *gradient_findings(seen, api),
            *optimizers_left_out(seen, api),
            *updates_lost(seen.lost),
            *averages_lost(seen.averages),
            *copies_outdated(seen.stale),
            *schedule_findings(seen, api),
        ]
    except LossScaleCollapse:
        return []  # the run and the step show it
    except RecordingError as error:
        warnings.warn(
            f"amplab.doctor: the rules about the loop were not applied: {error}", RuntimeWarning, stacklevel=5
        )
        return []
    except NeedsOtherRanks:
        raise
    except Exception as error:
        if is_interrupt(error) or (raised.error is not error and not isinstance(error, _OF_OPS)):
            raise
        return [finding_of_error(error, model, "train_step()")]
