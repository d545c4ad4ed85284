"""apex's compiled module ``amp_C``: its functions, in its argument order, over the kernels of `amplab.kernels`.

    op(chunk_size, noop_flag, tensor_lists, *numbers)

``import amp_C`` finds this module while amplab is in place of apex. What all functions share:

    chunk_size      ignored
    noop_flag       one integer; becomes 1 if a checked element is inf or NaN, never 0; if it is 1, no step writes
    tensor_lists    lists of equal length: float16, bfloat16, float32 or float64 on one device, CPU or CUDA
    arithmetic      float32; float64 for float64 parameters

Sync: none, but for the two kinds whose ``lr`` and ``step`` are tensors.

Differences from apex: steps that ignore a set ``noop_flag`` there (Adam, LAMB, NovoGrad, Adagrad) respect it here;
LAMB does not overwrite gradients; an output that overflows its dtype sets the flag, too.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from amplab.kernels import adagrad_, adam_, lamb_, novograd_, sgd_, unscale_, unscale_copy, unscaled_norm, update_scale_

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

_Lists = Sequence[Sequence[Tensor]]
_DECOUPLED = 1  # of the modes; 0 adds the decay to the gradient
_BOTH, _FIRST, _SECOND = -1, 0, 1  # which tensors axpby checks
_MAXIMUM_NORM = 0


# -- scale, add, measure -----------------------------------------------------------------------------


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, scale: float) -> None:
    """Write ``out = in * scale`` for ``[in, out]``, of any floating dtypes; the flag is set by inf or NaN.

    An ``out`` may be its own ``in``. Sync: none.

    >>> flag, half, master = torch.zeros(1, dtype=torch.int32), torch.tensor([3.0]).half(), torch.zeros(1)
    >>> multi_tensor_scale(65536, flag, [[half], [master]], 0.5)
    >>> master.item(), flag.item()
    (1.5, 0)
    """
    del chunk_size
    inputs, outputs = tensor_lists
    found, factor = _scalars(noop_flag, inputs, scale)
    unscale_copy(inputs, outputs, found, factor)
    _set_flag(noop_flag, found)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, a: float, b: float, arg_to_check: int = _BOTH
) -> None:
    """Write ``out = a x + b y`` for ``[x, y, out]``; ``arg_to_check``: -1 both, 0 ``x``, 1 ``y``. Sync: none."""
    del chunk_size
    xs, ys, outs = tensor_lists
    checked = {_BOTH: [*xs, *ys], _FIRST: xs, _SECOND: ys}[arg_to_check]
    found, one = _scalars(noop_flag, checked, 1.0)
    unscaled_norm(checked, found, one)
    for x, y, out in zip(xs, ys, outs, strict=True):
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        out.copy_(x.to(dtype) * a + y.to(dtype) * b)
    _set_flag(noop_flag, found)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of all tensors of ``[x]``, and with ``per_tensor`` that of each.

    Returns:
        ``(1,)`` float32, and ``(tensors,)`` float32, or ``(0,)`` without ``per_tensor``.

    Sync: none.

    >>> flag = torch.zeros(1, dtype=torch.int32)
    >>> multi_tensor_l2norm(65536, flag, [[torch.tensor([3.0]), torch.tensor([4.0])]], True)
    (tensor([5.]), tensor([3., 4.]))
    """
    del chunk_size
    (tensors,) = tensor_lists
    return _norms(noop_flag, tensors, 1.0, per_tensor)


multi_tensor_l2norm_mp = multi_tensor_l2norm


def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, scale: float, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Write ``out = in * scale`` for ``[in, out]``, and return the norms of ``out`` as `multi_tensor_l2norm` does."""
    del chunk_size
    inputs, outputs = tensor_lists
    found, factor = _scalars(noop_flag, inputs, scale)
    norm, norms = _receivers(noop_flag, inputs, per_tensor)
    unscale_copy(inputs, outputs, found, factor, norm=norm, norms=norms if per_tensor else None)
    _set_flag(noop_flag, found)
    return norm, norms


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, inv_scale: Tensor, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the norms of ``x * inv_scale`` as `multi_tensor_l2norm` does; no ``x`` is written."""
    del chunk_size
    (tensors,) = tensor_lists
    return _norms(noop_flag, tensors, inv_scale, per_tensor)


# -- steps -------------------------------------------------------------------------------------------


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Step ``[grads, params, momenta]`` by SGD, with gradients times ``scale``; `amplab.kernels.sgd_` has the rule.

    A fourth list receives the new parameters, too: the float16 weights of float32 masters. Sync: none.
    """
    del chunk_size
    grads, params, momenta, *copies = tensor_lists
    sgd_(
        params,
        grads,
        momenta if momentum != 0 else (),
        *copies,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=wd,
        nesterov=bool(nesterov),
        wd_after_momentum=bool(wd_after_momentum),
        first=bool(first_run),
        grad_factor=_scalars(noop_flag, params, scale)[1],
        found_inf=_skip(noop_flag, params),
    )


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Step ``[grads, params, exp_avgs, exp_avg_sqs]`` by Adam; `amplab.kernels.adam_` has the rule.

    ``step`` counts this step: 1 for the first. ``mode`` 1 is AdamW; 0 adds the decay to the gradient. Sync: none.
    """
    del chunk_size
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        _steps_before(step, params),
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == _DECOUPLED,
        bias_correction=bool(bias_correction),
        found_inf=_skip(noop_flag, params),
    )


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Step as `multi_tensor_adam`, with gradients times ``inv_scale``, which are written back. Sync: two."""
    del chunk_size
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    _adam_capturable(
        noop_flag, (grads, params, exp_avgs, exp_avg_sqs, ()),
        lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale,
    )  # fmt: skip


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Step ``[grads, params, exp_avgs, exp_avg_sqs, masters]`` as `multi_tensor_adam_capturable`. Sync: two.

    The masters are stepped, and written to the parameters.
    """
    del chunk_size
    grads, params, exp_avgs, exp_avg_sqs, masters = tensor_lists
    _adam_capturable(
        noop_flag, (grads, masters, exp_avgs, exp_avg_sqs, params),
        lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale,
    )  # fmt: skip


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Step ``[grads, params, sums]`` by Adagrad; `amplab.kernels.adagrad_` has the rule. Sync: none.

    ``mode`` 1 adds the decay to the update, 0 to the gradient.
    """
    del chunk_size
    grads, params, sums = tensor_lists
    adagrad_(
        params,
        grads,
        sums,
        _steps_before(1, params),
        lr=lr,
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == _DECOUPLED,
        found_inf=_skip(noop_flag, params),
    )


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """Step ``[grads, params, exp_avgs]`` by NovoGrad; `amplab.kernels.novograd_` has the rule. Sync: none.

    ``grad_norms``, ``(tensors,)`` float32, are the running norms, updated in place. ``moment_mode`` 0 averages the
    normalized gradient and the decay in the moment; 1 does not. ``norm_type`` is 2, or 0 for the maximum norm.
    """
    del chunk_size
    grads, params, exp_avgs = tensor_lists
    novograd_(
        params,
        grads,
        exp_avgs,
        grad_norms.unbind(),
        _steps_before(step, params),
        lr=lr,
        betas=(beta1, beta2),
        beta3=None if grad_averaging else 1.0,
        eps=epsilon,
        weight_decay=weight_decay,
        decay_in_moment=moment_mode != _DECOUPLED,
        maximum_norm=norm_type == _MAXIMUM_NORM,
        bias_correction=bool(bias_correction),
        found_inf=_skip(noop_flag, params),
    )


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """Step ``[grads, params, exp_avgs, exp_avg_sqs]`` by LAMB; `amplab.kernels.lamb_` has the rule. Sync: none.

    Gradients are divided by ``global_grad_norm / max_grad_norm`` if that is above 1. ``mode`` 1 adds the decay to the
    update, 0 to the gradient. Without ``use_nvlamb`` a call without decay adapts no rate.
    """
    del chunk_size
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    lamb_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        _steps_before(step, params),
        lr=lr,
        betas=(beta1, beta2),
        beta3=None if grad_averaging else 1.0,
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == _DECOUPLED,
        bias_correction=bool(bias_correction),
        adapt=bool(use_nvlamb) or weight_decay != 0,
        grad_factor=_clipping(global_grad_norm, max_grad_norm),
        found_inf=_skip(noop_flag, params),
    )


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """Step as `multi_tensor_lamb`, with gradients times ``inv_scale``, unless ``found_inf`` is 1. Sync: two.

    A fifth list receives the new parameters, too. ``max_grad_norm`` bounds the norm of the scaled gradients.
    """
    del chunk_size, noop_flag
    grads, params, exp_avgs, exp_avg_sqs, *copies = tensor_lists
    lamb_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        _steps_before(int(step), params),
        *copies,
        lr=float(lr),
        betas=(beta1, beta2),
        beta3=None if grad_averaging else 1.0,
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == _DECOUPLED,
        bias_correction=bool(bias_correction),
        adapt=bool(use_nvlamb) or weight_decay != 0,
        grad_factor=_clipping(global_grad_norm, max_grad_norm) * inv_scale.float().reshape(()),
        found_inf=_skip(found_inf, params),
    )


def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Move a loss scale in place, as `amplab.kernels.update_scale_` does, and return it. Sync: none."""
    numbers = (growth_factor, backoff_factor, growth_interval, hysteresis)
    update_scale_(current_scale, growth_tracker, hysteresis_tracker, found_inf, *numbers)
    return current_scale


# -- what is absent ----------------------------------------------------------------------------------


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"amp_C.{name}: amplab, which is in place of apex here, does not have it: expected "
        f"{', '.join(__all__[:-1])} or {__all__[-1]}; use torch._foreach_* or amplab.kernels for others."
    )


# -- arguments ---------------------------------------------------------------------------------------


def _device(flag: Tensor, tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if len(tensors) > 0 else flag.device


def _scalars(flag: Tensor, tensors: Sequence[Tensor], factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return found_inf, 0, and the factor, as the kernels take them; ``()`` float32 each."""
    device = _device(flag, tensors)
    if isinstance(factor, Tensor):
        return torch.zeros((), dtype=torch.float32, device=device), factor.to(device, torch.float32).reshape(())
    return torch.zeros((), dtype=torch.float32, device=device), torch.full(
        (), factor, device=device, dtype=torch.float32
    )


def _set_flag(flag: Tensor, found: Tensor) -> None:
    flag.masked_fill_(found.to(flag.device) != 0, 1)


def _skip(flag: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the flag as found_inf."""
    return flag.to(_device(flag, params), torch.float32).reshape(())


def _receivers(flag: Tensor, tensors: Sequence[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    device = _device(flag, tensors)
    return torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(
        len(tensors) if per_tensor else 0, dtype=torch.float32, device=device
    )


def _norms(
    flag: Tensor, tensors: Sequence[Tensor], factor: float | Tensor, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    found, factor = _scalars(flag, tensors, factor)
    norm, norms = _receivers(flag, tensors, per_tensor)
    unscaled_norm(tensors, found, factor, norm=norm, norms=norms if per_tensor else None)
    _set_flag(flag, found)
    return norm, norms


def _steps_before(step: int, params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the number of earlier steps for each parameter; the kernels increment these tensors."""
    return (
        torch.full((len(params),), step - 1.0, dtype=torch.float32, device=params[0].device).unbind()
        if len(params) > 0
        else ()
    )


def _clipping(norm: Tensor, most: float | Tensor) -> Tensor:
    """Return the factor that brings ``norm`` down to ``most``, ``()`` float32; 1 if ``most`` is 0."""
    norm = norm.float().reshape(())
    limit = torch.as_tensor(most, dtype=torch.float32, device=norm.device).reshape(())
    return torch.where((norm > limit) & (limit > 0), limit / norm, 1.0)


def _adam_capturable(
    flag: Tensor,
    lists: tuple[Sequence[Tensor], ...],
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    grads, params, exp_avgs, exp_avg_sqs, copies = lists
    skip = _skip(flag, params)
    found, factor = _scalars(flag, params, inv_scale)
    adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        _steps_before(int(step), params),
        copies,
        lr=float(lr),
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == _DECOUPLED,
        bias_correction=bool(bias_correction),
        grad_factor=factor,
        found_inf=skip,
    )
    unscale_(grads, found, torch.where(skip != 0, torch.ones_like(factor), factor))
