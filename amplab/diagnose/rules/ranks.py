"""Rules about several processes that train together: their runs, their gradients, and the model of one of them.

ranks-skip-differently       a step was skipped on some ranks and taken on others
scale-differs-by-rank        the ranks skip the same steps, but their loss scales differ
optimizer-differs-by-rank    learning rates or other settings of the optimizers differ
weights-differ-by-rank       the weights differ, with none of these reasons
rank-lost                    a rank ended or hung, and others went on
gradient-missing-on-a-rank   a parameter has a gradient on some ranks only
wrapped-before-initialize    the dtype of parameters changed after DistributedDataParallel wrapped them
batchnorm-not-synchronized   each rank normalizes with its own share of the batch
compression-keeps-nonfinite  the state of a compression of gradients holds NaN or inf

The first two read the runs of all ranks, the next two their states (`parallel.rank_state`), then how each log ends, and
which gradients each rank reports. The others read one rank alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.remedies.api_styles import Api
from amplab.display.numbers import count, number, power
from amplab.parallel.rank_state import RankState
from amplab.parallel.ranks import data_parallel, this_rank

__all__ = [
    "RankEnd",
    "compression_keeps_nonfinite",
    "gradients_missing_on_a_rank",
    "model_of_a_rank_findings",
    "rank_lost",
    "ranks_findings",
]

States = Mapping[int, Sequence[RankState]]

SMALL_BATCH = 16
"""Samples of one rank below which statistics of its own are too noisy; from there on it is a note."""

ROUNDINGS = 16
"""Processors of other kinds round otherwise: ranks that differ by less than so many roundings are taken as equal."""

QUIET = 10.0
"""Seconds without a line after which a rank is taken to hang, if another one has stopped with an exception."""

_TYPES = {"c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}


@dataclass(frozen=True)
class RankEnd:
    """How the log of a rank ends.

    Attributes:
        steps: the number of its steps.
        state: "closed" in order, by a process that is "running", "lost" with its process, or "unknown".
        raised: the exception that ended the loop, in words; "" for none.
        quiet: seconds since its last line.
    """

    steps: int
    state: Literal["closed", "running", "lost", "unknown"]
    raised: str = ""
    quiet: float = 0.0


def ranks_findings(runs: Mapping[int, Observation], states: States | None = None) -> list[Finding]:
    """Apply the rules that compare the runs of all ranks, and their states, given by rank."""
    states = states or {}
    return [
        *ranks_skip_differently(runs),
        *scale_differs_by_rank(runs),
        *optimizer_differs_by_rank(states),
        *weights_differ_by_rank(states),
    ]


def ranks_skip_differently(runs: Mapping[int, Observation]) -> Iterator[Finding]:
    """A step that some ranks skipped and others took: from then on their weights differ."""
    steps = [*_together(runs)]
    apart = [each for each in steps if len({step.skipped for step in each.values()}) > 1]
    if apart:
        skipping = [rank for rank, step in apart[0].items() if step.skipped]
        taking = [rank for rank, step in apart[0].items() if not step.skipped]
        yield finding(
            "ranks-skip-differently",
            api=_api(runs),
            evidence={"first_step": _number(apart[0]), "steps": len(apart), "all_steps": len(steps)},
            skipping=_ranks(skipping),
            taking=_ranks(taking),
        )


def scale_differs_by_rank(runs: Mapping[int, Observation]) -> Iterator[Finding]:
    """Loss scales that differ although every step was skipped on all ranks or on none."""
    steps = [*_together(runs)]
    if any(len({step.skipped for step in each.values()}) > 1 for each in steps):
        return
    apart = [each for each in steps if len({step.loss_scale for step in each.values()}) > 1]
    if apart:
        scales = {rank: step.loss_scale for rank, step in apart[0].items()}
        yield finding(
            "scale-differs-by-rank",
            "now" if len(steps) == 1 else "",
            api=_api(runs),
            evidence={"first_step": _number(apart[0]), "steps": len(apart)},
            scales=", ".join(f"{power(scale)} on rank {rank}" for rank, scale in scales.items()),
        )


def _together(runs: Mapping[int, Observation]) -> Iterator[Mapping[int, StepObservation]]:
    """Yield the steps that every rank has, by rank."""
    by_step = [{step.step: step for step in run} for run in runs.values()]
    for place in sorted(set.intersection(*(set(each) for each in by_step))):
        yield {rank: each[place] for rank, each in zip(runs, by_step, strict=True)}


def _number(steps: Mapping[int, StepObservation]) -> int:
    return next(iter(steps.values())).step


def _api(runs: Mapping[int, Observation]) -> Api:
    return next(iter(runs.values())).api


def optimizer_differs_by_rank(states: States) -> Iterator[Finding]:
    """Learning rates or other settings that differ: each rank makes another update of the same gradients."""
    together = _states_together(states)
    apart = [each for each in together if len({(own.rates, own.settings) for own in each.values()}) > 1]
    if apart:
        first = apart[0]
        yield finding(
            "optimizer-differs-by-rank",
            certainty=_certainty(first),
            evidence={"first_step": _step(first)},
            when=_when(together, first),
            settings=_differing_settings(first),
        )


def _differing_settings(states: Mapping[int, RankState]) -> str:
    """Say in words what differs: the rates of the first parameter group that differs, else the other settings."""
    for place, rates in enumerate(zip(*(each.rates for each in states.values()), strict=False)):
        if len({*rates}) > 1:
            values = ", ".join(f"{number(own)} on rank {rank}" for rank, own in zip(states, rates, strict=True))
            group = f" of parameter group {place}" if place else ""
            return f"the learning rate{group} is {values}"
    return "the optimizer is " + ", ".join(f"{each.settings} on rank {rank}" for rank, each in states.items())


def weights_differ_by_rank(states: States) -> Iterator[Finding]:
    """Weights that differ by more than roundings, and are not made equal again, as by local SGD."""
    together = [each for each in _states_together(states) if all(own.checksum is not None for own in each.values())]
    apart = [len({own.checksum for own in each.values()}) > 1 for each in together]
    if True not in apart or not all(apart[apart.index(True) :]):
        return
    first, last = together[apart.index(True)], together[-1]
    distance = max(_distance(own, other) for own in last.values() for other in last.values())
    if distance <= ROUNDINGS * max(own.rounding for own in last.values()):
        return
    (usual, _), *_ = Counter(own.checksum for own in first.values()).most_common(1)
    equal = [rank for rank, own in first.items() if own.checksum == usual]
    others = [rank for rank in first if rank not in equal]
    yield finding(
        "weights-differ-by-rank",
        "" if all(own.averages == "all" for own in first.values()) else "unwrapped",
        certainty=_certainty(first),
        evidence={"first_step": _step(first), "last_step": _step(last), "distance": distance},
        when=_when(together, first),
        differing=_ranks(others),
        usual=_ranks(equal),
    )


def _distance(one: RankState, other: RankState) -> float:
    """How far the weights of two ranks are apart at least, relative to their norm."""
    apart = max(abs(one.total - other.total), abs(one.norm - other.norm))
    return apart / max(one.norm, other.norm) if apart else 0.0


def _states_together(states: States) -> list[Mapping[int, RankState]]:
    """Return the states of the steps that every rank has, by rank; none of ranks that need not be equal."""
    if len(states) < 2:
        return []
    by_step = [{each.step: each for each in own} for own in states.values()]
    steps = sorted(set.intersection(*(set(each) for each in by_step)))
    together = [{rank: each[step] for rank, each in zip(states, by_step, strict=True)} for step in steps]
    comparable = all(own.averages != "some" for each in together for own in each.values())
    return [each for each in together if comparable and len({own.model for own in each.values()}) == 1]


def _certainty(states: Mapping[int, RankState]) -> Literal["certain", "likely"]:
    """Certain if gradients are averaged over all ranks; else each rank may train a model of its own on purpose."""
    return "certain" if all(each.averages == "all" for each in states.values()) else "likely"


def _step(states: Mapping[int, RankState]) -> int:
    return next(iter(states.values())).step


def _when(together: Sequence[Mapping[int, RankState]], first: Mapping[int, RankState]) -> str:
    """Say since when ranks differ, as exactly as the steps with a state tell."""
    place = together.index(first)
    if len(together) == 1:
        return "In this step"
    return f"After step {_step(first)}" + (f", and not yet after step {_step(together[place - 1])}" if place else "")


def rank_lost(ends: Mapping[int, RankEnd]) -> Iterator[Finding]:
    """A rank whose process ended without closing its log, or hangs, while others closed theirs or run on."""
    states = {end.state for end in ends.values()}
    closed = [rank for rank, end in ends.items() if end.state == "closed"]
    lost = [rank for rank, end in ends.items() if end.state == "lost"]
    unsure = [rank for rank, end in ends.items() if end.state == "unknown"]
    waiting = [rank for rank, end in ends.items() if end.state == "running" and end.quiet > QUIET]
    stopped = [rank for rank in closed if ends[rank].raised and ends[rank].quiet > QUIET]
    if lost and states & {"closed", "running"}:
        yield _lost("", lost, ends, certainty="certain")
    elif lost and not unsure and not waiting:
        yield _lost("all", lost, ends, certainty="certain", severity="note")
    elif unsure and any(ends[rank].quiet > QUIET for rank in closed):
        yield _lost("", unsure, ends, certainty="likely")
    elif waiting and stopped:
        yield _lost("hung", waiting, ends, certainty="likely")


def _lost(
    case: str,
    ranks: Sequence[int],
    ends: Mapping[int, RankEnd],
    *,
    certainty: Literal["certain", "likely"],
    severity: Literal["error", "note"] = "error",
) -> Finding:
    others = [rank for rank in ends if rank not in ranks]
    raised = [f" Rank {rank} stopped: {ends[rank].raised}." for rank in others if ends[rank].raised]
    steps = max((ends[rank].steps for rank in others), default=0)
    last = min(ends[rank].steps for rank in ranks) - 1
    return finding(
        "rank-lost",
        case,
        severity=severity,
        certainty=certainty,
        evidence={"rank": ranks[0], "last_step": last, "ranks": len(ends)},
        lost=_ranks(ranks).capitalize(),
        others=f" The log of {_ranks(others)} goes up to step {steps - 1}." if others else "",
        raised="".join(raised[:1]),
    )


def gradients_missing_on_a_rank(missing: Mapping[int, Sequence[str]], model: nn.Module) -> Iterator[Finding]:
    """Parameters that the backward reached on some ranks and not on others.

    With ``find_unused_parameters=True`` a gradient that is missing counts as zero, which is no fault.

    Args:
        missing: the names of the trainable parameters without a gradient, by rank.
        model: names them.
    """
    wrappers = data_parallel(model)
    zero = {id(each) for wrapper in wrappers if wrapper.find_unused_parameters for each in wrapper.parameters()}
    judged = [name for name, each in model.named_parameters() if id(each) not in zero]
    nowhere = set.intersection(*map(set, missing.values()))
    for rank, names in missing.items():
        here = [name for name in judged if name in set(names) - nowhere]
        if here:
            yield finding(
                "gradient-missing-on-a-rank",
                "" if wrappers else "unwrapped",
                severity="error" if wrappers else "note",
                certainty="certain" if wrappers else "possible",
                module=here[0].rpartition(".")[0],
                tensor=here[0],
                evidence={"rank": rank, "parameters": len(here), "ranks": len(missing)},
                missing=count(len(here), "parameter"),
            )
            return


def model_of_a_rank_findings(model: nn.Module, batch_size: int | None, level: str | None) -> list[Finding]:
    """Apply the rules about the model of one rank; there are no findings for one process.

    Args:
        model: with its DistributedDataParallel.
        batch_size: samples of this rank in a step; None if unknown.
        level: the opt_level, if amp.initialize is used.
    """
    if this_rank() is None:
        return []
    return [*wrapped_before_initialize(model, level), *batchnorm_not_synchronized(model, batch_size)]


def wrapped_before_initialize(model: nn.Module, level: str | None) -> Iterator[Finding]:
    """Parameters of another dtype than when DistributedDataParallel wrapped them, so its hooks are not called."""
    for wrapper in data_parallel(model):
        described = str(wrapper._get_ddp_logging_data().get("dtypes", ""))
        then = {_TYPES[name] for name in described.split(", ") if name in _TYPES}
        named = [(name, each.dtype) for name, each in model.named_parameters() if each.requires_grad]
        changed = [(name, dtype) for name, dtype in named if then and dtype not in then]
        if changed:
            name, dtype = changed[0]
            yield finding(
                "wrapped-before-initialize",
                module=name.rpartition(".")[0],
                tensor=name,
                evidence={"parameters": len(changed)},
                changed=count(len(changed), "parameter"),
                now=str(dtype).removeprefix("torch."),
                before=" and ".join(sorted(str(each).removeprefix("torch.") for each in then)),
                level=level or "O2",
            )


def batchnorm_not_synchronized(model: nn.Module, batch_size: int | None) -> Iterator[Finding]:
    """BatchNorm layers in training mode that compute statistics of the batch of their own rank."""
    place = this_rank()
    layers = [
        name
        for name, each in model.named_modules()
        if isinstance(each, _BatchNorm) and not _is_synchronized(each) and each.training
    ]
    if layers and place is not None:
        known = {} if batch_size is None else {"batch_size": batch_size}
        yield finding(
            "batchnorm-not-synchronized",
            severity="warning" if batch_size is not None and batch_size < SMALL_BATCH else "note",
            module=layers[0],
            evidence={"layers": len(layers), "ranks": place.world_size, **known},
            counted=count(len(layers), "BatchNorm layer"),
            samples="its own share of the batch" if batch_size is None else f"its own {count(batch_size, 'sample')}",
        )


def compression_keeps_nonfinite(
    wrappers: Iterable[DistributedDataParallel], api: Api | None = None
) -> Iterator[Finding]:
    """Yield a finding for a PowerSGDState that holds NaN or inf: it adds them to the gradients of every later step.

    Args:
        wrappers: whose communication hooks have a state.
        api: what scales the loss, for the remedy.

    Sync: one if there is such a state.

    Reference: ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.
    """
    for state in (state for wrapper in wrappers for _hook, state in wrapper._comm_hooks):
        if not any(kind.__name__ == "PowerSGDState" for kind in type(state).__mro__):
            continue
        kept = {name: getattr(state, name) for name in ("error_dict", "p_memory_dict", "q_memory_dict")}
        bad = [name for name, own in kept.items() if not all(bool(each.isfinite().all()) for each in own.values())]
        if bad:
            yield finding("compression-keeps-nonfinite", api=api, state=type(state).__name__, kept=" and ".join(bad))


def _is_synchronized(layer: nn.Module) -> bool:
    return any(kind.__name__ == "SyncBatchNorm" for kind in type(layer).__mro__)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
