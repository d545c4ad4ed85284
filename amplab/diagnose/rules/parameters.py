"""Rules about parameters, optimizers and gradients: which optimizer updates what.

parameter-in-no-optimizer    it has a gradient, and no optimizer updates it
optimizer-of-another-model   the optimizer has none of the model's parameters: it was created before they were replaced
nonfinite-buffer             a bad batch made running statistics non-finite, and skipping its step does not undo that
adam-on-half                 an eps and second moments that are 0 in float16
stale-masters                the model's half weights differ from their masters rounded to float16
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.observed_step.tensor_summary import HALF_UNDERFLOWS
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.train_step.masters import half_and_master, model_parameters
from amplab.formats.stored_values import stored_values

__all__ = ["adam_on_half", "nonfinite_buffers", "parameter_findings"]

_NAMED = 3
"""Number of parameters that a sentence names; the others are counted."""


def parameter_findings(model: nn.Module, optimizers: Sequence[Optimizer], step: ObservedStep | None) -> list[Finding]:
    """Apply every rule of this file; without optimizers there are no findings. Sync: one per pair of masters."""
    if not optimizers:
        return []
    return [
        *optimizers_of_another_model(model, optimizers),
        *parameters_in_no_optimizer(model, optimizers, step),
        *adam_on_half(model, optimizers),
        *stale_masters(model, optimizers),
    ]


def parameters_in_no_optimizer(
    model: nn.Module, optimizers: Sequence[Optimizer], step: ObservedStep | None
) -> Iterator[Finding]:
    """Parameters whose gradient was not zero in this step and that no optimizer updates; one finding per module."""
    held_by = [{id(parameter) for parameter in model_parameters(optimizer)} for optimizer in optimizers]
    held = set().union(*held_by)
    if not held & {id(parameter) for parameter in model.parameters()}:
        return  # `optimizers_of_another_model` reports it
    gradients = {name: step.values[place].summary for name, place in step.gradients} if step else {}
    left: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held and name in gradients and gradients[name].absmax > 0:
            left.setdefault(_left_out(model, name, held), []).append(name)
    for module, names in left.items():
        yield finding(
            "parameter-in-no-optimizer",
            module=module,
            tensor=names[0],
            evidence={"parameters": len(names), "gradient_absmax": max(gradients[name].absmax for name in names)},
            names=_listed(names),
            them="them" if len(names) > 1 else "it",
            code=_added(model, module, names, optimizers, held_by),
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return " and ".join(names if more <= 0 else [*names[:_NAMED], f"{more} more"])


def _left_out(model: nn.Module, name: str, held: set[int]) -> str:
    """The largest module around a parameter of which no optimizer has any parameter; at least its own module."""
    module = name.rpartition(".")[0]
    while "." in module:
        above = module.rpartition(".")[0]
        if any(id(each) in held for each in model.get_submodule(above).parameters()):
            break
        module = above
    return module


def _added(
    model: nn.Module, module: str, names: Sequence[str], optimizers: Sequence[Optimizer], held_by: Sequence[set[int]]
) -> str:
    """The line that adds parameters to the optimizer of the surrounding module, or to a new optimizer."""
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
            return _new_optimizer(own, optimizers, held_by)
        around = around.rpartition(".")[0]
    return f"optimizer.add_param_group({{'params': {own}}})"


def _new_optimizer(own: str, optimizers: Sequence[Optimizer], held_by: Sequence[set[int]]) -> str:
    numbers = range(len(held_by))
    twice = [one for one in numbers if any(held_by[one] <= held_by[other] for other in numbers if other != one)]
    like = optimizers[twice[0] if twice else 0]
    made = f"torch.optim.{type(like).__name__}({own}, lr={float(like.param_groups[0]['lr']):g})"
    if not twice:
        return f"optimizers.append({made})"
    return f"optimizers[{twice[0]}] = {made}  # another optimizer has all of its present parameters"


def nonfinite_buffers(model: nn.Module) -> Iterator[Finding]:
    """NaN in a buffer, or inf in running statistics; inf elsewhere may be intended, as in a mask. Sync: one per buffer.

    If weights are not finite either, the buffers follow from them, and another rule reports the weights.
    """
    for path, module in model.named_modules():
        is_norm = isinstance(module, _NormBase)
        buffers = {name: stored_values(buffer) for name, buffer in module.named_buffers(recurse=False)}
        bad = {name: values for name, values in buffers.items() if _is_bad(values, is_norm)}
        if bad and all(bool(each.detach().isfinite().all()) for each in model.parameters()):
            yield _nonfinite_buffer(path, bad, is_norm=is_norm)


def _is_bad(values: Tensor, statistics: bool) -> bool:
    return values.is_floating_point() and bool((~values.isfinite() if statistics else values.isnan()).any())


def _nonfinite_buffer(path: str, bad: dict[str, Tensor], *, is_norm: bool) -> Finding:
    names = [f"{path}.{name}".lstrip(".") for name in bad]
    where = f"model.get_submodule({path!r})" if path else "model"
    again = "reset_running_stats()" if is_norm else f"{next(iter(bad))}.zero_()"
    return finding(
        "nonfinite-buffer",
        module=path,
        tensor=names[0],
        evidence={
            "nonfinite": sum(int((~each.isfinite()).sum()) for each in bad.values()),
            "elements": sum(each.numel() for each in bad.values()),
        },
        names=" and ".join(names),
        contain="contain" if len(names) > 1 else "contains",
        eval=" In training a norm layer does not read its statistics; in eval every output is NaN." if is_norm else "",
        code=f"{where}.{again}",
    )


def optimizers_of_another_model(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Finding]:
    """An optimizer with none of the model's parameters, although some of its own have the same shapes."""
    own = {id(parameter) for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    for number, optimizer in enumerate(optimizers):
        params = model_parameters(optimizer)
        alike = sum(tuple(parameter.shape) in shapes for parameter in params)
        if params and alike and not any(id(parameter) in own for parameter in params):
            yield finding(
                "optimizer-of-another-model",
                evidence={"parameters": len(params), "of_the_models_shapes": alike},
                optimizer=number,
                kind=type(optimizer).__name__,
            )


def adam_on_half(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Finding]:
    """Half parameters updated without masters by an optimizer whose eps is 0 in float16."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            halves = [each for each in group["params"] if each.dtype == torch.float16]
            eps = group.get("eps")
            if halves and "betas" in group and isinstance(eps, float) and eps <= HALF_UNDERFLOWS:
                name = names.get(id(halves[0]), "")
                yield finding(
                    "adam-on-half",
                    certainty="likely",
                    module=name.rpartition(".")[0],
                    tensor=name,
                    evidence={"eps": eps, "half_parameters": len(halves)},
                    kind=type(optimizer).__name__,
                )


def stale_masters(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Finding]:
    """Half weights that differ from their masters rounded to float16: the next step overwrites them.

    NaN rounds to NaN, so NaN in both is not a difference.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        differing = [pair for pair in half_and_master(optimizer) if _differs(*pair)]
        if differing:
            half, master = differing[0]
            name = names.get(id(half), "")
            difference = (half.detach().float() - master.detach()).abs().nan_to_num(math.inf).max().item()
            yield finding(
                "stale-masters",
                module=name.rpartition(".")[0],
                tensor=name,
                evidence={"parameters": len(differing), "largest_difference": difference},
            )


def _differs(half: Tensor, master: Tensor) -> bool:
    own, rounded = half.detach(), master.detach().to(half.dtype)
    return not bool(((own == rounded) | (own.isnan() & rounded.isnan())).all())
