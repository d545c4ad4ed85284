"""What `initialize` accepts as models and optimizers, and the sentences that refuse the rest.

The properties of a level are checked in `opt_levels`.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amplab.amp.arguments import checked_flag
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.optimizers import FusedOptimizer

__all__ = [
    "checked_cast_model_outputs",
    "checked_combined",
    "checked_models",
    "checked_optimizers",
    "checked_verbosity",
    "refuse_combined_ddp",
    "refuse_half",
    "refuse_scripted",
    "warn_of_unused",
    "warn_of_vanishing_eps",
]


_DYNAMIC = {  # defaults of the arguments that a static scale has no use for
    "dynamic_init_scale": 2.0**16,
    "scale_growth_factor": 2.0,
    "scale_backoff_factor": 0.5,
    "scale_window": 2000,
}


def checked_models(models: Any) -> list[nn.Module]:
    """Return the models of a call as a list, each once.

    Raises:
        TypeError: neither a module nor a list of modules.
        RuntimeError: a model that a parallel wrapper has taken already.
    """
    chosen = _each_once(models)
    for model in chosen:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"models must be either a single model or a list of models. Found {_kind(model, models)}; "
                "pass torch.nn.Module."
            )
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise RuntimeError(
                f"Incoming model is an instance of {type(model)}. Parallel wrappers should only be applied to the "
                "model(s) AFTER the model(s) have been returned from amp.initialize."
            )
    return chosen


def checked_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return the optimizers of a call as a list, each once; None is an empty one.

    Raises:
        TypeError: neither an optimizer nor a list of optimizers.
        RuntimeError: an ``FP16_Optimizer``, which scales losses by itself.
    """
    if optimizers is None:
        return []
    chosen = _each_once(optimizers)
    for optimizer in chosen:
        if type(optimizer).__name__ == "FP16_Optimizer":  # of fp16_utils, or a copy of it in user code
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
    """Return the dtype that models are to return.

    Raises:
        TypeError: neither a floating dtype nor None.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"cast_model_outputs={dtype!r}: expected a floating torch.dtype, or None for the level's own.")
    return dtype


def checked_verbosity(verbosity: Any) -> int:
    """Return how much is to be printed.

    Raises:
        TypeError: no whole number.
    """
    if not isinstance(verbosity, int):
        raise TypeError(f"verbosity={verbosity!r}: expected 0 (nothing), 1 (levels and skips) or 2 (each cast too).")
    return verbosity


def checked_combined(combine_grad: Any, check_combined_tensors: Any) -> tuple[bool, bool]:
    """Return whether to combine gradients, and whether to print a message when they have to be combined again.

    Warns if the second is requested without the first.

    Raises:
        TypeError: not True or False.
    """
    asked = {"combine_grad": combine_grad, "check_combined_tensors": check_combined_tensors}
    combine, check = (value is not None and checked_flag(name, value) for name, value in asked.items())
    if check and not combine:
        warnings.warn(
            "check_combined_tensors=True: there are no combined gradients to look after, since combine_grad is "
            f"{combine_grad}; pass combine_grad=True, or leave it out.",
            stacklevel=4,
        )
    return combine, check


def refuse_combined_ddp(combine_ddp: Any, ddp_replica_count: Any) -> None:
    """Reject the arguments with which the Ascend version of apex replaces DistributedDataParallel.

    Raises:
        NotImplementedError: one of them is not the default.
    """
    for name, wanted in {"combine_ddp": combine_ddp, "ddp_replica_count": ddp_replica_count != 4}.items():
        if wanted:
            raise NotImplementedError(
                f"{name}: amp.initialize does not average gradients over ranks. Omit {name} "
                "and wrap the model in torch.nn.parallel.DistributedDataParallel, whose buckets (bucket_cap_mb) are "
                "flat buffers reduced during the backward; combine_grad=True works with it."
            )


def refuse_half(model: nn.Module) -> None:
    """Reject a model that is already cast to half.

    Raises:
        RuntimeError: a parameter or buffer is float16; the message names it.
    """
    for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.dtype == torch.float16:
                raise RuntimeError(
                    f"Found {kind} {name} with type {tensor.type()}, expected torch.FloatTensor. When using "
                    "amp.initialize, you do not need to call .half() on your model before passing it, no matter "
                    "what optimization level you choose."
                )


def refuse_scripted(model: nn.Module, dtype: torch.dtype | bool | None) -> None:
    """Refuse TorchScript where hooks would have to be hung on it: the model itself, or what is cast to half inside.

    Raises:
        RuntimeError: a scripted module, named.
    """
    half = dtype in LOW_PRECISION_DTYPES
    for name, module in model.named_modules():
        inside = half and isinstance(module, torch.jit._script.RecursiveScriptModule)
        if isinstance(module, torch.jit.ScriptModule) and (module is model or inside):
            where = f"Module {name} of the incoming model" if name else "The incoming model"
            raise RuntimeError(
                f"{where} is a {type(module).__name__}: expected Python modules, since TorchScript takes no hooks of "
                "amp.initialize. Pass the module that it was compiled from; at O0 and O1 scripted functions and "
                "submodules may stay, and run in the dtypes that they are given."
            )


def warn_of_unused(loss_scale: float | str | None, **dynamic: float) -> None:
    """Warn about arguments of a dynamic scale that have no effect with a static ``loss_scale``.

    No warning if only the level makes the scale static (loss_scale=None), so that one call works for every level.
    """
    given = [f"{name}={value!r}" for name, value in dynamic.items() if value != _DYNAMIC[name]]
    if given and loss_scale not in (None, "dynamic"):
        warnings.warn(
            f"{', '.join(given)}: not used, since loss_scale is {loss_scale} here and stays there; expected "
            'loss_scale="dynamic" beside it. Leave it out, or pass that.',
            stacklevel=4,
        )


def warn_of_vanishing_eps(optimizer: Optimizer) -> None:
    """Warn of an ``eps`` that is 0 in the dtype of the parameters that the optimizer steps (Adam's at O3)."""
    for group in () if isinstance(optimizer, FusedOptimizer) else optimizer.param_groups:  # theirs is a float32
        eps = group.get("eps")
        dtypes = {param.dtype for param in group["params"]}.intersection(LOW_PRECISION_DTYPES)
        for dtype in dtypes if isinstance(eps, float) and eps > 0 else ():
            if torch.tensor(eps, dtype=dtype) == 0:
                warnings.warn(
                    f"{type(optimizer).__name__} on half parameters: eps={eps} is 0 in {dtype}, so that a division by "
                    "it makes parameters non-finite within a few steps. Use eps=1e-4, or master_weights=True (O2).",
                    stacklevel=4,
                )


def _each_once(value: Any) -> list[Any]:
    """The items of a list, or the value itself; by identity, since lists and dicts, refused later, have no hash."""
    return list({id(item): item for item in (value if isinstance(value, list) else [value])}.values())


def _kind(value: Any, given: Any) -> str:
    inside = " inside the list" if isinstance(given, list) and isinstance(value, (list, tuple, dict)) else ""
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}{inside}"
    return f"an object of type {type(value).__name__}{inside}"
