"""Checks of the arguments of `initialize`. The properties of a level are checked in `opt_levels`."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp.apex.opt_levels import OptProperties
from amplab.amp.arguments import checked_flag
from amplab.amp.backward.optimizer_attributes import objects_with
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.optimizers import FusedOptimizer
from amplab.parallel.shards import is_fully_sharded
from amplab.policies import PrecisionPolicy
from amplab.scalers import ScaleRule

__all__ = [
    "Permissions",
    "checked_cast_model_outputs",
    "checked_combined",
    "checked_combined_ddp",
    "checked_models",
    "checked_optimizers",
    "checked_verbosity",
    "refuse_half",
    "refuse_older_than_shards",
    "refuse_scripted",
    "refuse_sharded",
    "settings_in_common",
    "warn_of_kept_halves",
    "warn_of_unused",
    "warn_of_vanishing_eps",
]


_DYNAMIC = {  # defaults of the arguments that a static scale does not use
    "dynamic_init_scale": 2.0**16,
    "scale_growth_factor": 2.0,
    "scale_backoff_factor": 0.5,
    "scale_window": 2000,
}


@dataclass
class Permissions:
    """What scripts permit through ``amp._amp_state``, for all later calls of `initialize`.

    Attributes:
        hard_override: print a warning instead of refusing an override that makes no sense, or a half model.
        allow_incoming_model_not_fp32: take models with half weights.
    """

    hard_override: bool = False
    allow_incoming_model_not_fp32: bool = False

    def warn_or_err(self, message: str, *, quiet: bool = False) -> None:
        """Raise RuntimeError; with ``hard_override`` print "Warning:  …" instead, unless ``quiet``."""
        if not self.hard_override:
            raise RuntimeError(message)
        if not quiet:
            print(f"Warning:  {message}")  # noqa: T201  as apex does

    def forget(self) -> None:
        """Permit nothing."""
        self.hard_override = self.allow_incoming_model_not_fp32 = False


def checked_models(models: Any) -> list[nn.Module]:
    """Return the models of a call as a list without duplicates.

    Raises:
        TypeError: neither a module nor a list of modules.
        RuntimeError: a model in a parallel wrapper.
    """
    chosen = _each_once(models)
    for model in chosen:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"models must be either a single model or a list of models. Found {_kind(model, models)}; "
                "pass torch.nn.Module."
            )
        _refuse_wrapped(model)
    return chosen


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse a parallel wrapper, which has planned its buckets for gradients of the dtypes before `initialize`."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            found = f"has the submodule {name!r}," if name else "is"
            raise RuntimeError(
                f"Incoming model {found} an instance of {type(module)}. Parallel wrappers should only be applied to "
                "the model(s) AFTER the model(s) have been returned from amp.initialize: pass the bare model, then "
                "wrap it."
            )


def checked_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return the optimizers of a call as a list without duplicates; None gives an empty list.

    Raises:
        TypeError: neither an optimizer nor a list of optimizers.
        RuntimeError: an ``FP16_Optimizer``, which scales losses itself.
    """
    if optimizers is None:
        return []
    chosen = _each_once(optimizers)
    for optimizer in chosen:
        if type(optimizer).__name__ == "FP16_Optimizer":  # of fp16_utils, or a copy of it
            raise RuntimeError(
                f"An incoming optimizer is an instance of {type(optimizer)}. The optimizer(s) passed to "
                "amp.initialize() must be bare instances of either ordinary Pytorch optimizers, or Apex fused "
                "optimizers."
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizers must be either a single optimizer or a list of optimizers. "
                f"Found {_kind(optimizer, optimizers)}; pass torch.optim.Optimizer."
            )
    return chosen


def checked_cast_model_outputs(dtype: Any) -> torch.dtype | None:
    """Return the dtype of the models' outputs.

    Raises:
        TypeError: neither a floating-point dtype nor None.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"cast_model_outputs={dtype!r}: expected a floating-point torch.dtype, or None for the default."
        )
    return dtype


def checked_verbosity(verbosity: Any) -> int:
    """Return how much to print.

    Raises:
        TypeError: not an integer.
    """
    if not isinstance(verbosity, int):
        raise TypeError(
            f"verbosity={verbosity!r}: expected 0 (print nothing), 1 (levels and skips) or 2 (also each cast)."
        )
    return verbosity


def checked_combined(combine_grad: Any, check_combined_tensors: Any) -> tuple[bool, bool]:
    """Return whether to combine gradients, and whether to print a line when they are combined again.

    Warns if only the second is True.

    Raises:
        TypeError: not True or False.
    """
    given = {"combine_grad": combine_grad, "check_combined_tensors": check_combined_tensors}
    combine, check = (value is not None and checked_flag(name, value) for name, value in given.items())
    if check and not combine:
        warnings.warn(
            f"check_combined_tensors=True has no effect, since combine_grad is {combine_grad}: pass combine_grad=True "
            "as well, or omit check_combined_tensors.",
            stacklevel=4,
        )
    return combine, check


def checked_combined_ddp(
    combine_ddp: Any, ddp_replica_count: Any, *, combine_grad: bool, optimizers: Any, refuse: Callable[[str], None]
) -> int | None:
    """Return the requested number of buckets, or None without ``combine_ddp``.

    Warns if only the number is given. Calls ``refuse`` with a message if gradients are not combined.

    Raises:
        TypeError: ``combine_ddp`` is not True or False, or ``ddp_replica_count`` not a whole number.
        ValueError: fewer than one bucket, or no optimizer.
    """
    if isinstance(ddp_replica_count, bool) or not isinstance(ddp_replica_count, int):
        raise TypeError(f"ddp_replica_count={ddp_replica_count!r}: expected a whole number of buckets, such as 4.")
    if ddp_replica_count < 1:
        raise ValueError(f"ddp_replica_count={ddp_replica_count}: expected at least 1, one bucket for all gradients.")
    if combine_ddp is None or not checked_flag("combine_ddp", combine_ddp):
        if ddp_replica_count != 4:
            warnings.warn(
                f"ddp_replica_count={ddp_replica_count} has no effect, since combine_ddp is {combine_ddp}: pass "
                "combine_ddp=True as well, or omit it.",
                stacklevel=4,
            )
        return None
    if not combine_grad:
        refuse(
            "Combine_grad should be True when combine_ddp using: combine_ddp=True averages the flat buffers of "
            "combine_grad. Pass combine_grad=True as well."
        )
    if optimizers is None:
        raise ValueError(
            "combine_ddp=True without an optimizer: expected the optimizers whose gradients are averaged; pass "
            "amp.initialize(model, optimizer, combine_grad=True, combine_ddp=True)."
        )
    return ddp_replica_count


def settings_in_common(
    properties: OptProperties,
    rule: ScaleRule,
    num_losses: int,
    optimizers: Sequence[Optimizer],
    policy: PrecisionPolicy | None,
    on_collapse: str,
) -> dict[str, str]:
    """Return what all ranks of ``combine_ddp`` must have in common, besides their models: values as text, by name.

    That is the level and its overrides, the policy, the rule of the loss scale, ``on_collapse``, and of each optimizer
    the class and the settings of each parameter group. Optimizer state is not compared. Sync: one for each setting on a
    device.
    """
    common = {field.name: _as_text(getattr(properties, field.name)) for field in dataclasses.fields(properties)}
    common |= {"policy": str(policy), "on_collapse": on_collapse}
    if properties.loss_scale == "dynamic":
        common["the rule of the loss scale"] = repr(rule)
    common["num_losses"] = str(num_losses)
    common["the number of optimizers"] = str(len(optimizers))
    for index, optimizer in enumerate(optimizers):
        which = "the optimizer" if len(optimizers) == 1 else f"optimizers[{index}]"
        common[which] = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        for number, group in enumerate(optimizer.param_groups):
            of_group = f"{which}'s param_groups[{number}]"
            common |= {f"{of_group}[{name!r}]": _as_text(value) for name, value in group.items() if name != "params"}
    return common


def _as_text(value: object) -> str:
    """Return a setting as text that is equal on two ranks if the setting is; of other objects their type."""
    if isinstance(value, Tensor):
        return _as_text(value.tolist()) if value.numel() <= 16 else str(tuple(value.shape))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_as_text, value))})"
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"{float(value):g}" if float(f"{value:g}") == value else repr(float(value))
    return repr(value) if value is None or isinstance(value, bool | str | torch.dtype) else type(value).__qualname__


def refuse_half(model: nn.Module, refuse: Callable[[str], None]) -> None:
    """Call ``refuse`` with a message if a parameter or buffer of ``model`` is float16 already."""
    for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.dtype == torch.float16:
                refuse(
                    f"Found {kind} {name} with type {tensor.type()}, expected torch.FloatTensor. When using "
                    "amp.initialize, you do not need to call .half() on your model before passing it, no matter "
                    "what optimization level you choose. If the half values are all there is, set "
                    "amp._amp_state.allow_incoming_model_not_fp32 = True before."
                )
                return


def refuse_scripted(model: nn.Module, dtype: torch.dtype | bool | None) -> None:
    """Refuse TorchScript modules that would need hooks: the model itself, or any submodule if the model is cast.

    Raises:
        RuntimeError: a module is scripted; the message names it.
    """
    half = dtype in LOW_PRECISION_DTYPES
    for name, module in model.named_modules():
        inside = half and isinstance(module, torch.jit._script.RecursiveScriptModule)
        if isinstance(module, torch.jit.ScriptModule) and (module is model or inside):
            where = f"Module {name} of the incoming model" if name else "The incoming model"
            raise RuntimeError(
                f"{where} is a {type(module).__name__}: expected Python modules, since amp.initialize cannot add hooks "
                "to TorchScript. Pass the module that it was compiled from. At O0 and O1 scripted functions and "
                "submodules are allowed; they run in the dtypes of their inputs."
            )


def refuse_sharded(model: nn.Module, opt_level: str, dtype: torch.dtype | bool | None, *, combine_ddp: bool) -> None:
    """Refuse to cast a model that is sharded, since FSDP2 holds its own references to the float32 shards.

    Raises:
        RuntimeError: such a model, and a 16-bit ``dtype`` or ``combine_ddp``.
    """
    if not any(map(is_fully_sharded, model.modules())):
        return
    if combine_ddp:
        raise RuntimeError(
            f"amp.initialize got {type(model).__name__}, which is sharded, and combine_ddp=True: fully_shard averages "
            "its gradients already; omit combine_ddp."
        )
    if dtype in LOW_PRECISION_DTYPES:
        raise RuntimeError(
            f"amp.initialize got {type(model).__name__}, which is sharded, and opt_level {opt_level}, which would cast "
            f"its weights to {dtype}: expected O0 or O1. For weights in {dtype} with float32 masters pass "
            f"mp_policy=MixedPrecisionPolicy(param_dtype={dtype}) to fully_shard: its float32 shards are the masters."
        )


def refuse_older_than_shards(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that was made before ``fully_shard``, which has replaced the parameters that it has.

    Raises:
        RuntimeError: a model is sharded, and the optimizer has no parameter of any model.
    """
    if not any(is_fully_sharded(module) for model in models for module in model.modules()):
        return
    trained = {param for model in models for param in model.parameters()}
    for optimizer in optimizers:
        if not any(param in trained for group in optimizer.param_groups for param in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__} has no parameter of the model, which is sharded: fully_shard replaced the "
                "parameters that it has. Call fully_shard first, then make the optimizer, then call amp.initialize."
            )


def warn_of_unused(loss_scale: float | str | None, **dynamic: float) -> None:
    """Warn of arguments of a dynamic scale that a static ``loss_scale`` does not use.

    No warning if the level sets the static scale (None), so that one call works with every level.
    """
    given = [f"{name}={value!r}" for name, value in dynamic.items() if value != _DYNAMIC[name]]
    if given and loss_scale not in (None, "dynamic"):
        warnings.warn(
            f"{', '.join(given)}: not used, since the loss scale is static, loss_scale={loss_scale}. Omit it, or pass "
            'loss_scale="dynamic".',
            stacklevel=4,
        )


def warn_of_vanishing_eps(optimizer: Optimizer) -> None:
    """Warn of an ``eps`` that is 0 in the dtype of the optimizer's parameters (Adam at O3)."""
    for group in () if isinstance(optimizer, FusedOptimizer) else optimizer.param_groups:  # they keep eps in float32
        eps = group.get("eps")
        dtypes = {param.dtype for param in group["params"]}.intersection(LOW_PRECISION_DTYPES)
        for dtype in dtypes if isinstance(eps, float) and eps > 0 else ():
            if torch.tensor(eps, dtype=dtype) == 0:
                warnings.warn(
                    f"{type(optimizer).__name__} on half parameters: eps={eps} is 0 in {dtype}, and dividing by it "
                    "makes parameters inf or NaN within a few steps. Use eps=1e-4, or master_weights=True (O2).",
                    stacklevel=4,
                )


def warn_of_kept_halves(optimizer: Optimizer, halves: Sequence[Tensor]) -> None:
    """Warn of objects of an optimizer that keep half parameters, whose masters it steps."""
    for name, value in objects_with(optimizer, halves):
        warnings.warn(
            f"{name}, an object of type {type(value).__name__}, keeps half parameters of the model. amp.initialize has "
            f"replaced them by float32 masters in the groups of {type(optimizer).__name__} and in its lists, tuples, "
            "dicts and sets, but not in objects of other classes: a step that reads parameters there trains nothing. "
            "Read them from optimizer.param_groups, or use opt_level='O1'.",
            stacklevel=4,
        )


def _each_once(value: Any) -> list[Any]:
    """Return the items of a list, or the value itself. Compares identities, since some values are unhashable."""
    return list({id(item): item for item in (value if isinstance(value, list) else [value])}.values())


def _kind(value: Any, given: Any) -> str:
    inside = " inside the list" if isinstance(given, list) and isinstance(value, (list, tuple, dict)) else ""
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}{inside}"
    return f"an object of type {type(value).__name__}{inside}"
