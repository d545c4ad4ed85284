"""Checks of the arguments that describe a step, before it runs.

model      a module, not scripted, with initialized parameters; not compiled if its ops are recorded, and not on the
           meta device if its values are measured
step       a function without arguments
loss       what the step returns: one floating-point number that depends on a parameter
gradients  enabled: backward is part of every step
"""

import copy
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.signals import is_interrupt
from amplab.scalers import is_sharded

__all__ = [
    "accepts",
    "check_gradients_on",
    "check_loss",
    "check_step_function",
    "check_loss_scale",
    "check_model",
    "check_step",
    "check_values",
    "copy_of",
]

Copied = TypeVar("Copied")

_FITS_NO_STEP = (
    "expected a function without arguments that runs the forward and returns the loss; wrap it, e.g. lambda: "
    "criterion(model(x), y)."
)


def check_step(model: Any, step: Any, loss_scale: Any = None, *, compiled: bool = False, values: bool = False) -> None:
    """Raise for the first reason why a step cannot run.

    Args:
        model, step, loss_scale: as `trace_step` takes them; None for no scale.
        compiled, values: as `check_model` takes them.

    Raises:
        TypeError, ValueError: the first check that fails.
    """
    check_model(model, compiled=compiled, values=values)
    check_step_function(step)
    if loss_scale is not None:
        check_loss_scale(loss_scale)
    check_gradients_on()


def check_model(model: Any, *, compiled: bool = False, values: bool = False) -> nn.Module:
    """Return `model`, a module whose step can run.

    Args:
        model: what was given.
        compiled: whether it may be compiled, because its ops are not recorded.
        values: whether its values are measured; a model on the meta device has none, one of shards not all.

    Raises:
        TypeError: it is not a module.
        ValueError: it or a part of it is compiled, scripted, lazy, has inference tensors, or is on the meta device. It
            is sharded and its values are measured.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"model={model.__name__} is a class: expected an instance; call it, {model.__name__}(...).")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={type(model).__name__}: expected a torch.nn.Module, whose submodules name the ops; pass several "
            "modules as a torch.nn.ModuleList."
        )
    for module in model.modules():
        fault = _fault_of(module, compiled)
        if fault:
            path = next(path for path, each in model.named_modules() if each is module)
            raise ValueError(f"{path or type(module).__name__} {fault}")
    if values:
        check_values(f"model={type(model).__name__}", [*model.parameters(), *model.buffers()])
        _refuse_shards(model)
    return model


def _refuse_shards(model: nn.Module) -> None:
    for name, each in model.named_parameters():
        if is_sharded(each):
            raise ValueError(
                f"{name} is sharded over several ranks, so this rank does not have its values: expected the model "
                "before fully_shard, in one process, with the weights of a checkpoint. amplab.xray without stats takes "
                "a sharded model; call it on every rank."
            )


def check_values(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise a ValueError if one of `tensors` is on the meta device, where tensors have no values."""
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            f"{name} has tensors on the meta device, which have no values: expected real ones; move it with "
            "model.to_empty(device='cpu'), and load or initialize its weights."
        )


def check_step_function(step: Any) -> None:
    """Raise a TypeError unless `step` can be called without arguments."""
    if isinstance(step, type) and issubclass(step, nn.Module):
        raise TypeError(f"step={step.__name__} is a class: {_FITS_NO_STEP}")
    if not callable(step):
        raise TypeError(f"step={type(step).__name__}: {_FITS_NO_STEP}")
    refused = accepts(step, 0)
    if refused is not None:
        raise TypeError(f"step is called without arguments, and {refused}: {_FITS_NO_STEP}")


def check_loss_scale(loss_scale: Any) -> None:
    """Raise unless `loss_scale` is a finite number > 0, of Python or NumPy."""
    if isinstance(loss_scale, Tensor) and loss_scale.numel() == 1:
        raise TypeError(f"loss_scale={loss_scale!r}: expected a number; take it out of the tensor with .item().")
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, Real):
        raise TypeError(f"loss_scale={loss_scale!r}: expected a number; take the scaler's current scale.")
    try:
        scale = float(loss_scale)
    except OverflowError:  # an int above 1.8e308
        scale = loss_scale = math.inf
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"loss_scale={loss_scale}: expected a finite number > 0; 1.0 leaves the loss as it is.")


def check_gradients_on() -> None:
    """Raise a ValueError inside `torch.no_grad` and `torch.inference_mode`."""
    if torch.is_grad_enabled():
        return
    inference = torch.is_inference_mode_enabled()
    raise ValueError(
        f"torch.{'inference_mode' if inference else 'no_grad'}() is active around the call: expected "
        "gradients to be enabled, since backward is part of the step; call it outside"
        f"{'' if inference else ' or in torch.enable_grad()'}."
    )


def check_loss(loss: Any, model: nn.Module, name: str = "step", *, whole: bool = True) -> Tensor:
    """Return `loss`, one floating-point number that backward can start from.

    Args:
        loss: what the function returned.
        model: whose parameters it depends on.
        name: of the function, for the message.
        whole: whether the message suggests `doctor`, which takes a whole iteration, for a step without a loss.

    Raises:
        TypeError, ValueError: it is something else.
    """
    with without_function_modes():  # without active casts
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{name} returned {type(loss).__name__}: expected the loss as a tensor with one element; "
                f"{_instead_of(loss, whole and name == 'step')}."
            )
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"{name} returned {loss.dtype} of shape {tuple(loss.shape)}: expected one floating-point number; "
                f"{'take its .abs() or .real, and ' if loss.is_complex() else ''}reduce it, e.g. with .mean()."
            )
        if loss.is_meta and not any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                f"{name} returned a tensor on the meta device, which has no value: expected one on the model's device; "
                "look for device='meta' in the step."
            )
        if not loss.requires_grad:
            raise ValueError(f"{name} returned a tensor without a gradient: {_why_no_gradient(model)}")
    return loss


def copy_of(value: Copied, name: str, since: str, memo: dict[int, Any] | None = None, *, instead: str = "") -> Copied:
    """Return a deep copy of an argument.

    Args:
        value: the argument, such as a model.
        name: of the argument.
        since: why a copy is needed.
        memo: as `copy.deepcopy` takes it.
        instead: what else can be passed.

    Raises:
        ValueError: the value cannot be copied, such as a model that keeps the result of a forward.
    """
    try:
        return copy.deepcopy(value, memo)
    except Exception as refusal:
        if is_interrupt(refusal):
            raise
        raise ValueError(
            f"{name}={type(value).__name__} cannot be copied ({type(refusal).__name__}: {refusal}), and {since}: "
            f"{instead and f'{instead}, or '}{_MAKES_COPIES}{_NEWER if _has_older_weight_norm(value) else ''}."
        ) from refusal


_MAKES_COPIES = "detach the tensors that it keeps, and remove locks, files and iterators"
_NEWER = "; use torch.nn.utils.parametrizations.weight_norm instead of torch.nn.utils.weight_norm"


def _has_older_weight_norm(value: Any) -> bool:
    """Whether a model keeps the weight of the last forward, which has a graph."""
    modules = value.modules() if isinstance(value, nn.Module) else ()
    return any(isinstance(hook, WeightNorm) for each in modules for hook in each._forward_pre_hooks.values())


def accepts(function: Callable[..., Any], given: int) -> str | None:
    """Return None if `function` takes `given` positional values, else a phrase that says what it takes.

    >>> accepts(lambda out, target: 0, 1)
    "lambda(out, target) is missing a required argument: 'target'"
    >>> accepts(max, 2) is None
    True
    """
    called = function.forward if isinstance(function, nn.Module) else function
    if _plainly_accepts(called, given):
        return None
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # written in C, without a signature
        return None
    try:
        signature.bind(*[None] * given)
    except TypeError as refusal:
        named = function if hasattr(function, "__qualname__") else type(function)
        name = named.__qualname__.split(".")[-1].replace("<lambda>", "lambda")
        why = str(refusal)
        return f"{name}{_taken(signature)} {f'is {why}' if why.startswith('missing') else 'takes fewer'}"
    return None


def _plainly_accepts(function: Callable[..., Any], given: int) -> bool:
    """Whether a Python function certainly takes `given` values; making a signature takes 5 to 15 µs."""
    bound = getattr(function, "__self__", None) is not None
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or code.co_kwonlyargcount > len(function.__kwdefaults__ or ()):
        return False
    most: int = code.co_argcount - bound
    least: int = most - len(function.__defaults__ or ())
    return least <= given <= most


def _taken(signature: inspect.Signature) -> str:
    """Return the names of a signature's arguments."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(stars.get(each.kind, '') + each.name for each in signature.parameters.values())})"


def _fault_of(module: nn.Module, compiled: bool) -> str | None:
    """Return why a module's step cannot run, None if it can."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    is_wrapped = bool(dynamo and isinstance(module, dynamo.OptimizedModule))
    if not compiled and (is_wrapped or module._compiled_call_impl is not None):
        instead = (
            "pass the original module, from before torch.compile."
            if is_wrapped
            else "it was compiled in place; create the model again without .compile()."
        )
        return f"is compiled: its ops are fused and do not reach the dispatcher one by one; {instead}"
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted and takes no hooks; pass the original module, from before torch.jit."
    for owned in (module._parameters, module._buffers):
        for tensor in owned.values():
            if tensor is None:
                continue
            if nn.parameter.is_lazy(tensor):
                return "has uninitialized parameters: expected a model that has run on a batch; run it once."
            if tensor.is_inference():
                return (
                    "was created in torch.inference_mode(), so its tensors take no gradient: expected a model created "
                    "outside; create it again there and load its state_dict."
                )
    return None


def _instead_of(value: Any, whole: bool) -> str:
    """Return a phrase that says what to return instead of `value`, or which tool takes a whole iteration."""
    if value is None:
        goes_to = "; pass a whole iteration with backward and optimizer.step() to amplab.doctor(model, train_step=fn)"
        return f"the function has no return statement{goes_to if whole else ''}"
    if isinstance(value, Mapping):
        return "return the one value that is the loss, such as out['loss']"
    if isinstance(value, tuple | list):
        return "return the one of them that is the loss"
    if isinstance(value, Real):
        return "a Python number has no gradient, so remove .item()"
    if isinstance(value, nn.Module):
        kind = type(value).__name__
        return f"the function created a {kind}; call it as well, {kind}()(output, target)"
    return "return the result of the criterion"


def _why_no_gradient(model: nn.Module) -> str:
    if any(parameter.requires_grad for parameter in model.parameters()):
        return (
            "expected a loss that depends on the model's parameters; look for detach(), .item() or torch.no_grad() in "
            "the step."
        )
    frozen = "parameters, all frozen" if next(model.parameters(), None) is not None else "no parameters"
    return (
        f"{type(model).__name__} has {frozen}: expected at least one that requires a gradient, "
        "parameter.requires_grad_(True), or an input that does."
    )
