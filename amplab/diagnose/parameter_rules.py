"""Rules about who learns what: the model's parameters, the optimizers, the gradients that a step gave.

parameter-in-no-optimizer     it got a gradient, and no optimizer has it
optimizer-of-other-parameters the optimizer holds none of the model's: it was built before they were replaced
adam-on-half                  an eps and second moments that half cannot hold
stale-masters                 the model's half weights are not what their masters round to
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.diagnose.finding import Finding
from amplab.diagnose.statistics import HALF_VANISHES
from amplab.diagnose.values import ObservedStep

__all__ = ["model_parameters", "parameter_findings"]


def parameter_findings(model: nn.Module, optimizers: Sequence[Optimizer], step: ObservedStep | None) -> list[Finding]:
    """Apply every rule of this file; without optimizers there is nothing to say. Sync: one for each pair of masters."""
    if not optimizers:
        return []
    return [
        *optimizers_of_other_parameters(model, optimizers),
        *parameters_in_no_optimizer(model, optimizers, step),
        *adam_on_half(model, optimizers),
        *stale_masters(model, optimizers),
    ]


def model_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that backward reaches, for an optimizer of any kind: not the masters it may step instead."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_master = {id(master): model for model, master in _pairs(optimizer)}
    return [by_master.get(id(parameter), parameter) for parameter in stepped]


def parameters_in_no_optimizer(
    model: nn.Module, optimizers: Sequence[Optimizer], step: ObservedStep | None
) -> Iterator[Finding]:
    """Parameters whose gradient was not zero in this step and that no optimizer steps; one finding for each module."""
    held = {id(parameter) for optimizer in optimizers for parameter in model_parameters(optimizer)}
    if not held & {id(parameter) for parameter in model.parameters()}:
        return  # the rule about optimizers says it
    gradients = {name: step.values[place].statistics for name, place in step.gradients} if step else {}
    left: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held and name in gradients and gradients[name].absmax > 0:
            left.setdefault(name.rpartition(".")[0], []).append(name)
    for module, names in left.items():
        yield Finding(
            "parameter-in-no-optimizer",
            "warning",
            f"{' and '.join(names)} got a gradient, and no optimizer steps {'them' if len(names) > 1 else 'it'}.",
            "The optimizer was given other parameters, or was built before these were made.",
            f"optimizer.add_param_group({{'params': model.get_submodule({module!r}).parameters()}})",
            module=module,
            tensor=names[0],
            evidence={"parameters": len(names), "gradient_absmax": max(gradients[name].absmax for name in names)},
        )


def optimizers_of_other_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Finding]:
    """An optimizer none of whose parameters is the model's, though some have the shapes of the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    for number, optimizer in enumerate(optimizers):
        params = model_parameters(optimizer)
        alike = sum(tuple(parameter.shape) in shapes for parameter in params)
        if params and alike and not any(id(parameter) in own for parameter in params):
            yield Finding(
                "optimizer-of-other-parameters",
                "error",
                f"Optimizer {number} ({type(optimizer).__name__}) steps {len(params)} parameters, none of this model.",
                "It was built for another object: before .cuda(), .half() or a wrapper replaced them, or for a copy.",
                f"model = model.to(device)  # first\noptimizer = torch.optim.{type(optimizer).__name__}("
                "model.parameters(), ...)  # then",
                evidence={"parameters": len(params), "of_the_models_shapes": alike},
            )


def adam_on_half(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Finding]:
    """Half parameters stepped without masters by an optimizer whose eps is 0 in half."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            halves = [each for each in group["params"] if each.dtype == torch.float16]
            eps = group.get("eps")
            if halves and "betas" in group and isinstance(eps, float) and eps <= HALF_VANISHES:
                name = names.get(id(halves[0]), "")
                yield Finding(
                    "adam-on-half",
                    "error",
                    f"{type(optimizer).__name__} steps {len(halves)} half parameters; its eps of {eps:g} is 0 in half.",
                    "Second moments of gradients below 2.4e-4 are 0 in half as well: the update is 0 / 0, or m / eps.",
                    _MASTERS,
                    "likely",
                    module=name.rpartition(".")[0],
                    tensor=name,
                    evidence={"eps": eps, "half_parameters": len(halves)},
                )


_MASTERS = (
    "model = model.float()  # in place of model.half()\n"
    'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")  # half weights, float32 masters\n'
    "# or keep half weights, with eps=1e-4"
)


def stale_masters(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Finding]:
    """Half weights that differ from what their masters round to, so that the next step throws them away.

    NaN rounds to NaN: a pair of them agrees.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        differing = [pair for pair in _pairs(optimizer) if _differs(*pair)]
        if differing:
            half, master = differing[0]
            name = names.get(id(half), "")
            yield Finding(
                "stale-masters",
                "error",
                f"{len(differing)} half parameters are not what their float32 masters round to.",
                "The model's weights were loaded or edited after the masters were made; the next step undoes that.",
                "amp.initialize(model, optimizer, ...)  # again, after model.load_state_dict(...)",
                module=name.rpartition(".")[0],
                tensor=name,
                evidence={
                    "parameters": len(differing),
                    "largest_difference": (half.detach().float() - master.detach())
                    .abs()
                    .nan_to_num(math.inf)
                    .max()
                    .item(),
                },
            )


def _differs(half: Tensor, master: Tensor) -> bool:
    own, rounded = half.detach(), master.detach().to(half.dtype)
    return not bool(((own == rounded) | (own.isnan() & rounded.isnan())).all())


def _pairs(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """(half parameter, float32 master) of an optimizer that amp has initialized; apex names them so, too."""
    stash = getattr(optimizer, "_amp_stash", None)
    if stash is None or not stash.all_fp32_from_fp16_params:
        return []
    masters = stash.all_fp32_from_fp16_params
    by_id = {id(master) for master in masters}
    groups = zip(stash.fp16_groups, stash.fp32_from_fp16_groups, strict=True)
    return [
        (half, master) for halves, ms in groups for half, master in zip(halves, ms, strict=True) if id(master) in by_id
    ]
