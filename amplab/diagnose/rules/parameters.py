"""Rules about who learns what: the model's parameters, the optimizers, the gradients that a step gave.

parameter-in-no-optimizer     it got a gradient, and no optimizer has it
optimizer-of-other-parameters the optimizer holds none of the model's: it was built before they were replaced
nonfinite-buffer              statistics that a bad batch has spoilt for good, whatever became of its step
adam-on-half                  an eps and second moments that half cannot hold
stale-masters                 the model's half weights are not what their masters round to
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from amplab.diagnose.finding import Finding
from amplab.diagnose.observed_step.tensor_summary import HALF_VANISHES
from amplab.diagnose.observed_step.values import ObservedStep

__all__ = ["adam_on_half", "model_parameters", "nonfinite_buffers", "parameter_findings"]

_NAMED = 3
"""Parameters that a sentence names; of more it says how many there are."""


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
    held_by = [{id(parameter) for parameter in model_parameters(optimizer)} for optimizer in optimizers]
    held = set().union(*held_by)
    if not held & {id(parameter) for parameter in model.parameters()}:
        return  # the rule about optimizers says it
    gradients = {name: step.values[place].summary for name, place in step.gradients} if step else {}
    left: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held and name in gradients and gradients[name].absmax > 0:
            left.setdefault(_left_out(model, name, held), []).append(name)
    for module, names in left.items():
        yield Finding(
            "parameter-in-no-optimizer",
            "warning",
            f"{_listed(names)} got a gradient, and no optimizer steps {'them' if len(names) > 1 else 'it'}.",
            "The optimizer was given other parameters, or was built before these were made.",
            _taken_in(model, module, names, optimizers, held_by),
            module=module,
            tensor=names[0],
            evidence={"parameters": len(names), "gradient_absmax": max(gradients[name].absmax for name in names)},
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return " and ".join(names if more <= 0 else [*names[:_NAMED], f"{more} more"])


def _left_out(model: nn.Module, name: str, held: set[int]) -> str:
    """The largest module around a parameter of which no optimizer has anything; its own module at least."""
    module = name.rpartition(".")[0]
    while "." in module:
        above = module.rpartition(".")[0]
        if any(id(each) in held for each in model.get_submodule(above).parameters()):
            break
        module = above
    return module


def _taken_in(
    model: nn.Module, module: str, names: Sequence[str], optimizers: Sequence[Optimizer], held_by: Sequence[set[int]]
) -> str:
    """The line that gives parameters to the one optimizer of what is around them, or to one built anew."""
    own = f"model.get_submodule({module!r}).parameters()"
    if not module or any(id(each) in held for each in model.get_submodule(module).parameters() for held in held_by):
        own = f"[{', '.join(f'model.get_parameter({name!r})' for name in names)}]"
    around = module
    while len(optimizers) > 1:
        near = {id(each) for each in model.get_submodule(around).parameters()}
        neighbours = [number for number, held in enumerate(held_by) if held & near]
        if len(neighbours) == 1:
            return f"optimizers[{neighbours[0]}].add_param_group({{'params': {own}}})"
        if neighbours or not around:
            return _built_anew(own, optimizers, held_by)
        around = around.rpartition(".")[0]
    return f"optimizer.add_param_group({{'params': {own}}})"


def _built_anew(own: str, optimizers: Sequence[Optimizer], held_by: Sequence[set[int]]) -> str:
    numbers = range(len(held_by))
    twice = [one for one in numbers if any(held_by[one] <= held_by[other] for other in numbers if other != one)]
    like = optimizers[twice[0] if twice else 0]
    made = f"torch.optim.{type(like).__name__}({own}, lr={float(like.param_groups[0]['lr']):g})"
    if not twice:
        return f"optimizers.append({made})"
    return f"optimizers[{twice[0]}] = {made}  # what it holds now, another holds as well"


def nonfinite_buffers(model: nn.Module) -> Iterator[Finding]:
    """NaN in a buffer, or inf in running statistics; inf elsewhere may be meant, as in a mask. Sync: one for each.

    Where weights are not finite either, what they compute is not, and the rules about them say why.
    """
    for path, module in model.named_modules():
        is_norm = isinstance(module, _NormBase)
        spoilt = {name: buffer for name, buffer in module.named_buffers(recurse=False) if _is_spoilt(buffer, is_norm)}
        if spoilt and all(bool(each.detach().isfinite().all()) for each in model.parameters()):
            yield _nonfinite_buffer(path, spoilt, is_norm=is_norm)


def _is_spoilt(buffer: Tensor, statistics: bool) -> bool:
    return buffer.is_floating_point() and bool((~buffer.isfinite() if statistics else buffer.isnan()).any())


def _nonfinite_buffer(path: str, spoilt: dict[str, Tensor], *, is_norm: bool) -> Finding:
    names = [f"{path}.{name}".lstrip(".") for name in spoilt]
    where = f"model.get_submodule({path!r})" if path else "model"
    again = "reset_running_stats()" if is_norm else f"{next(iter(spoilt))}.zero_()"
    cause = "A forward wrote it there, and a skipped step does not take that back."
    cause += " In training a norm does not read its statistics; in eval every output is NaN." if is_norm else ""
    return Finding(
        "nonfinite-buffer",
        "error",
        f"{' and '.join(names)} {'hold' if len(names) > 1 else 'holds'} inf or NaN.",
        cause,
        f"{where}.{again}  # or load the last good checkpoint\n"
        "# and before the model sees a batch: assert torch.isfinite(x).all()",
        module=path,
        tensor=names[0],
        evidence={
            "nonfinite": sum(int((~each.isfinite()).sum()) for each in spoilt.values()),
            "elements": sum(each.numel() for each in spoilt.values()),
        },
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
