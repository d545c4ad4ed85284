"""Step many parameters at once; unscaling, clipping, skipping and the copy to the model are part of the same pass.

Two operators under ``torch.ops.amplab``. They multiply gradients by ``grad_factor`` (1 / loss scale × the clipping
coefficient) when they use them, and do not write gradients. If ``found_inf`` is not 0, nothing changes:

    multi_tensor_sgd_     g <- g + weight_decay p;  b <- first ? g : momentum b + (1 - dampening) g
                          p <- p - lr (nesterov ? g + momentum b : b)
    multi_tensor_adam_    m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
                          p <- p (1 - lr weight_decay) - lr / c1 m / (sqrt(v / c2) + eps),   c = 1 - beta^step

in float32 (float64 for float64 parameters), each operation rounded. Parameters, states and copies are rounded once from
that. The schemas and references are here; the kernels, with the same bits, in ``steps.cpp`` and
``steps.cu`` over the per-element code of ``steps.h``. How a rule is added is in ``step_driver.h``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amplab.kernels import builder
from amplab.kernels.operators import define_operator
from amplab.kernels.step_reference import StepLists, check_step, square_root, step_reference

__all__ = ["adam_", "multi_tensor_adam__reference", "multi_tensor_sgd__reference", "sgd_"]

_SGD = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] copies, Tensor? grad_factor, "
    "Tensor? found_inf, bool maximize, float lr, float momentum, float dampening, float weight_decay, bool nesterov, "
    "bool wd_after_momentum, bool first) -> ()"
)
_ADAM = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, "
    "Tensor(e!)[] copies, Tensor? grad_factor, Tensor? found_inf, bool maximize, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, bool decoupled, bool bias_correction, bool eps_inside_sqrt) -> ()"
)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    copies: Sequence[Tensor] = (),
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    first: bool = False,
    maximize: bool = False,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step by SGD.

    Args:
        params: float16, bfloat16, float32 or float64, any shape and strides, on one device; each listed once.
        grads: as many, of the same shapes, of any of the four dtypes; not modified.
        momentum_buffers: as many; empty for no momentum.
        copies: as many, which also receive the new parameters, such as the float16 weights of float32 masters; or none.
        lr: learning rate.
        momentum: momentum factor.
        dampening: dampening of the momentum.
        weight_decay: weight decay factor.
        nesterov: use Nesterov momentum.
        wd_after_momentum: add the weight decay after the momentum instead of to the gradient.
        first: this is the first step: the buffers are not initialized and become the gradients.
        maximize: ascend instead of descend.
        grad_factor: one float32 element on the same device that multiplies the gradients; None for 1.
        found_inf: one float32 element: if it is not 0, nothing is written; None for 0.

    Raises:
        RuntimeError: lists of different lengths or shapes, a tensor of another device, dtype or layout, or two that
            overlap in memory if one is written (named by index); a momentum without buffers.

    Sync: none.

    Reference: ``torch.optim.SGD``, apex ``FusedSGD``.

    >>> weight = torch.tensor([1.0, 2.0])
    >>> sgd_([weight], [torch.tensor([128.0, 256.0])], lr=0.5, grad_factor=torch.tensor(1 / 128))
    >>> weight.tolist()
    [0.5, 1.0]
    """
    if momentum != 0 and len(params) > 0 and len(momentum_buffers) == 0:
        raise RuntimeError(
            f"momentum={momentum} without momentum_buffers: expected one for each of the {len(params)} params; pass "
            "torch.zeros_like of each, or momentum=0."
        )
    builder.settle()
    _SGD_OP(
        params,
        grads,
        momentum_buffers,
        copies,
        grad_factor,
        found_inf,
        maximize,
        lr,
        momentum,
        dampening,
        weight_decay,
        nesterov,
        wd_after_momentum,
        first,
    )


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    bias_correction: bool = True,
    eps_inside_sqrt: bool = False,
    maximize: bool = False,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step by Adam or AdamW.

    Args:
        params: as in `sgd_`.
        grads: as in `sgd_`.
        exp_avgs: as many, the first moments.
        exp_avg_sqs: as many, the second moments.
        steps: one float32 element each, on the same device: the number of steps so far; incremented.
        copies: as in `sgd_`.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: weight decay factor.
        decoupled: decay the weights directly (AdamW), else through the gradient (Adam).
        bias_correction: divide the moments by ``1 - beta^step``.
        eps_inside_sqrt: add ``eps`` under the root: ``sqrt(v + eps) / sqrt(c2)``.
        maximize: as in `sgd_`.
        grad_factor: as in `sgd_`.
        found_inf: as in `sgd_`.

    Raises:
        RuntimeError: as `sgd_`.

    Sync: none.

    Reference: D. P. Kingma, J. Ba, 2015; I. Loshchilov, F. Hutter, 2019; ``torch.optim.AdamW``, apex ``FusedAdam``.
    """
    builder.settle()
    _ADAM_OP(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        steps,
        copies,
        grad_factor,
        found_inf,
        maximize,
        lr,
        *betas,
        eps,
        weight_decay,
        decoupled,
        bias_correction,
        eps_inside_sqrt,
    )


def multi_tensor_sgd__reference(*arguments: Any) -> None:
    """PyTorch reference of `sgd_`, with the operator's arguments. Sync: none."""
    lists, numbers = _sgd_lists(*arguments)
    step_reference(lists, functools.partial(_sgd_rule, *numbers))


def multi_tensor_adam__reference(*arguments: Any) -> None:
    """PyTorch reference of `adam_`, with the operator's arguments. Sync: none."""
    lists, numbers = _adam_lists(*arguments)
    step_reference(lists, functools.partial(_adam_rule, *numbers))


def _sgd_lists(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    copies: Sequence[Tensor],
    *rest: Any,
) -> tuple[StepLists, tuple[Any, ...]]:
    states = [momentum_buffers] if len(momentum_buffers) > 0 else []
    return StepLists(params, grads, states, (), copies, *rest[:3]), rest[3:]


def _adam_lists(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *rest: Any,
) -> tuple[StepLists, tuple[Any, ...]]:
    return StepLists(params, grads, [exp_avgs, exp_avg_sqs], *rest[:5]), rest[5:]


def _sgd_rule(
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
    first: bool,
    grad: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
    _step: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor]]:
    decays_after = wd_after_momentum and len(states) > 0
    if weight_decay != 0 and not decays_after:
        grad = grad + param * weight_decay
    if states:
        buffer = grad if first else states[0] * momentum + grad * (1.0 - dampening)
        states = [buffer]
        grad = grad + buffer * momentum if nesterov else buffer
    if weight_decay != 0 and decays_after:
        grad = grad + param * weight_decay
    return param - grad * lr, states


def _adam_rule(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    eps_inside_sqrt: bool,
    grad: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
    step: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor]]:
    step_size: float | Tensor = lr
    root_factor: float | Tensor = 1.0
    if bias_correction and step is not None:
        step_size, root_factor = _corrections(lr, beta1, beta2, step, grad.dtype)
    if weight_decay != 0 and not decoupled:
        grad = grad + param * weight_decay
    exp_avg = states[0] * beta1 + grad * (1.0 - beta1)
    exp_avg_sq = states[1] * beta2 + grad * (1.0 - beta2) * grad
    if eps_inside_sqrt:
        denominator = square_root(exp_avg_sq + eps) * root_factor
    else:
        denominator = square_root(exp_avg_sq) * root_factor + eps
    shrink = 1.0 - lr * weight_decay if decoupled else 1.0
    return param * shrink - exp_avg * step_size / denominator, [exp_avg, exp_avg_sq]


def _corrections(lr: float, beta1: float, beta2: float, step: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``lr / c1`` and ``1 / sqrt(c2)``, computed in float64. Sync: none."""
    step_size = lr / (1.0 - beta1**step)
    return step_size.to(dtype), (1.0 - beta2**step).sqrt().reciprocal().to(dtype)


_SGD_OP = define_operator(
    "multi_tensor_sgd_", _SGD, multi_tensor_sgd__reference, lambda *arguments: check_step(_sgd_lists(*arguments)[0])
)
_ADAM_OP = define_operator(
    "multi_tensor_adam_", _ADAM, multi_tensor_adam__reference, lambda *arguments: check_step(_adam_lists(*arguments)[0])
)
