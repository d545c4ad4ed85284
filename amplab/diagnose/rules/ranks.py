"""Rules about several processes that train together: their runs, their gradients, and the model of one of them.

ranks-skip-differently       a step was skipped on some ranks and taken on others
scale-differs-by-rank        the ranks skip the same steps, but their loss scales differ
gradient-missing-on-a-rank   a parameter has a gradient on some ranks only
wrapped-before-initialize    the dtype of parameters changed after DistributedDataParallel wrapped them
batchnorm-not-synchronized   each rank normalizes with its own share of the batch

The first two read the runs of all ranks, the third what each rank reports, the others one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.remedies.api_styles import Api
from amplab.display.numbers import count, power
from amplab.parallel.ranks import data_parallel, this_rank

__all__ = ["gradients_missing_on_a_rank", "model_of_a_rank_findings", "ranks_findings"]

SMALL_BATCH = 16
"""Samples of one rank below which statistics of its own are too noisy; from there on it is a note."""

_TYPES = {"c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}


def ranks_findings(runs: Mapping[int, Observation]) -> list[Finding]:
    """Apply the rules that compare the runs of all ranks, given by rank."""
    return [*ranks_skip_differently(runs), *scale_differs_by_rank(runs)]


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
            api=_api(runs),
            evidence={"first_step": _number(apart[0]), "steps": len(apart)},
            scales=", ".join(f"{power(scale)} on rank {rank}" for rank, scale in scales.items()),
        )


def _together(runs: Mapping[int, Observation]) -> Iterator[Mapping[int, StepObservation]]:
    """Yield the steps that every rank has, by rank."""
    by_step = [{step.step: step for step in run} for run in runs.values()]
    for number in sorted(set.intersection(*(set(each) for each in by_step))):
        yield {rank: each[number] for rank, each in zip(runs, by_step, strict=True)}


def _number(steps: Mapping[int, StepObservation]) -> int:
    return next(iter(steps.values())).step


def _api(runs: Mapping[int, Observation]) -> Api:
    return next(iter(runs.values())).api


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


def _is_synchronized(layer: nn.Module) -> bool:
    return any(kind.__name__ == "SyncBatchNorm" for kind in type(layer).__mro__)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
