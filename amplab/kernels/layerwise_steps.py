"""Step many parameters at once by LAMB or NovoGrad, which need norms of a whole tensor before they step it.

Operators under ``torch.ops.amplab``, with the common arguments of ``steps.py``:

    multi_tensor_lamb_        m <- beta1 m + beta3 g;   v <- beta2 v + (1 - beta2) g^2
                              u  = m / c1 / (sqrt(v / c2) + eps) + weight_decay p
                              p <- p - lr r u,     r = min(|p|, max_weight_norm) / |u|, or 1 if either norm is 0
    multi_tensor_novograd_    n <- sqrt(beta2 n^2 + (1 - beta2) |g|^2);   d = n / sqrt(c2) + eps
                              m <- beta1 m + beta3 g;   p <- p - lr (m / c1 / d + weight_decay p)

c = 1 - beta^step. Norms, and what is computed from them per tensor, are in float64. The kernels, in
``layerwise_steps.cpp`` and ``layerwise_steps.cu``, sum in another order: if that changes the last bit of a float64, a
result may differ in its own last bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amplab.kernels import builder
from amplab.kernels.operators import define_operator
from amplab.kernels.step_reference import StepLists, check_step, square_root, step_reference

__all__ = [
    "lamb_",
    "multi_tensor_lamb__reference",
    "multi_tensor_novograd__reference",
    "novograd_",
]

_REST = "Tensor(y!)[] steps, Tensor(z!)[] copies, Tensor? grad_factor, Tensor? found_inf, bool maximize, "
_MOMENTS = "float lr, float beta1, float beta2, float beta3, float eps, float weight_decay, "
_LAMB = (
    f"(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, {_REST}{_MOMENTS}"
    "float max_weight_norm, bool decoupled, bool bias_correction, bool adapt) -> ()"
)
_NOVOGRAD = (
    f"(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, {_REST}{_MOMENTS}"
    "bool decay_in_moment, bool maximum_norm, bool bias_correction, Tensor(c!)[] norms) -> ()"
)


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    beta3: float | None = None,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    max_weight_norm: float = float("inf"),
    decoupled: bool = True,
    bias_correction: bool = True,
    adapt: bool = True,
    maximize: bool = False,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step by LAMB.

    Args:
        params: as in `amplab.kernels.adam_`, as are grads, exp_avgs, exp_avg_sqs, steps, copies, maximize, grad_factor
            and found_inf.
        lr: learning rate.
        betas: decay rates of the two moments.
        beta3: weight of the new gradient in the first moment; None for 1 - beta1.
        eps: added to the root of the second moment.
        weight_decay: weight decay factor.
        max_weight_norm: upper bound of a weight's norm.
        decoupled: add the decay to the update, else to the gradient.
        bias_correction: divide the moments by ``1 - beta^step``.
        adapt: False: r is 1.

    Raises:
        RuntimeError: as `amplab.kernels.adam_`.

    Sync: none.

    Reference: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2019; apex
    ``multi_tensor_lamb``.
    """
    builder.settle()
    beta3 = 1.0 - betas[0] if beta3 is None else beta3
    numbers = (lr, *betas, beta3, eps, weight_decay, max_weight_norm, decoupled, bias_correction, adapt)
    _LAMB_OP(params, grads, exp_avgs, exp_avg_sqs, steps, copies, grad_factor, found_inf, maximize, *numbers)


def novograd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    norms: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    beta3: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_in_moment: bool = False,
    maximum_norm: bool = False,
    bias_correction: bool = True,
    maximize: bool = False,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step by NovoGrad.

    Args:
        params: as in `lamb_`, as are grads, exp_avgs, steps, copies, maximize, grad_factor and found_inf.
        norms: one float32 element each, the running norms of the gradients; < 0: start with the first gradient's.
        lr: learning rate.
        betas: decay rates of the moment and of the norm.
        beta3: weight of the new gradient in the moment; None for 1 - beta1.
        eps: added to the norm.
        weight_decay: weight decay factor.
        decay_in_moment: average ``g / d + weight_decay p`` in the moment, and step by ``lr m / c1``.
        maximum_norm: ``n <- beta2 n + (1 - beta2) max |g|``.
        bias_correction: False: c1 and c2 are 1.

    Raises:
        RuntimeError: as `lamb_`.

    Sync: none.

    Reference: B. Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments", 2019; apex
    ``multi_tensor_novograd``.
    """
    builder.settle()
    beta3 = 1.0 - betas[0] if beta3 is None else beta3
    numbers = (lr, *betas, beta3, eps, weight_decay, decay_in_moment, maximum_norm, bias_correction)
    _NOVOGRAD_OP(params, grads, exp_avgs, steps, copies, grad_factor, found_inf, maximize, *numbers, norms)


class _Moments(NamedTuple):
    """The constants that both rules share."""

    lr: float
    beta1: float
    beta2: float
    beta3: float
    eps: float
    weight_decay: float

    def corrections(self, step: Tensor | None, switch: bool) -> tuple[Tensor, Tensor]:
        """Return ``1 - beta1^step`` and ``sqrt(1 - beta2^step)`` in float64, or 1. Sync: none."""
        if step is None:
            raise RuntimeError("steps is empty: expected one float32 element for each parameter.")
        if not switch:
            return torch.ones_like(step), torch.ones_like(step)
        return 1.0 - self.beta1**step, (1.0 - self.beta2**step).sqrt()


def multi_tensor_lamb__reference(*arguments: Any) -> None:
    """PyTorch reference of `lamb_`, with the operator's arguments. Sync: none."""
    moments = _Moments(*arguments[9:15])
    max_weight_norm, decoupled, bias_correction, adapt = arguments[15:]

    def rule(
        grad: Tensor, param: Tensor, states: Sequence[Tensor], step: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        return _lamb_rule(moments, max_weight_norm, decoupled, bias_correction, adapt, grad, param, states, step)

    step_reference(_lamb_lists(*arguments), rule)


def multi_tensor_novograd__reference(*arguments: Any) -> None:
    """PyTorch reference of `novograd_`, with the operator's arguments. Sync: none."""
    lists, norms = _novograd_lists(*arguments)
    _check_novograd(*arguments)
    moments, (inside, maximum, switch) = _Moments(*arguments[8:14]), arguments[14:17]
    news = [_next_norm(moments, maximum, lists, *each) for each in zip(lists.grads, lists.params, norms, strict=True)]
    remaining = iter(news)

    def rule(
        grad: Tensor, param: Tensor, states: Sequence[Tensor], step: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        first, second = moments.corrections(step, switch)
        denominator = next(remaining).double() / second + moments.eps
        return _novograd_rule(moments, inside, first, denominator, grad, param, states)

    step_reference(lists, rule)
    for norm, new in zip(norms, news, strict=True):
        norm.copy_(new if lists.found_inf is None else torch.where(lists.found_inf.reshape(()) != 0, norm, new))


def _lamb_lists(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *rest: Any,
) -> StepLists:
    return StepLists(params, grads, [exp_avgs, exp_avg_sqs], *rest[:5])


def _novograd_lists(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], *rest: Any
) -> tuple[StepLists, Sequence[Tensor]]:
    return StepLists(params, grads, [exp_avgs], *rest[:5]), rest[-1]


def _check_novograd(*arguments: Any) -> None:
    lists, norms = _novograd_lists(*arguments)
    check_step(lists)
    if len(norms) != len(lists.params):
        raise RuntimeError(f"{len(lists.params)} params, {len(norms)} norms: expected lists of equal length.")
    for index, norm in enumerate(norms):
        if norm.numel() != 1 or norm.dtype != torch.float32:
            raise RuntimeError(f"norm {index}: expected one float32 element.")


def _lamb_rule(
    moments: _Moments,
    max_weight_norm: float,
    decoupled: bool,
    bias_correction: bool,
    adapt: bool,
    grad: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
    step: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor]]:
    dtype, decay = param.dtype, moments.weight_decay
    first, second = (each.reciprocal().to(dtype) for each in moments.corrections(step, bias_correction))
    if decay != 0 and not decoupled:
        grad = grad + param * decay
    exp_avg = states[0] * moments.beta1 + grad * moments.beta3
    exp_avg_sq = states[1] * moments.beta2 + grad * (1.0 - moments.beta2) * grad
    update = exp_avg * first / (square_root(exp_avg_sq) * second + moments.eps)
    if decay != 0 and decoupled:
        update = update + param * decay
    rate: float | Tensor = moments.lr
    if adapt:
        rate = (_trust_ratio(param, update, max_weight_norm) * moments.lr).to(dtype)
    return param - update * rate, [exp_avg, exp_avg_sq]


def _trust_ratio(param: Tensor, update: Tensor, max_weight_norm: float) -> Tensor:
    """Return ``min(|p|, max_weight_norm) / |u|``, or 1 if either norm is 0; ``()`` float64."""
    weight, length = (torch.linalg.vector_norm(each, dtype=torch.float64) for each in (param, update))
    return torch.where((weight != 0) & (length != 0), weight.clamp(max=max_weight_norm) / length, 1.0)


def _next_norm(
    moments: _Moments, maximum: bool, lists: StepLists, grad: Tensor, param: Tensor, before: Tensor
) -> Tensor:
    """Return the running norm including this gradient, in the shape of the one before."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    grad = grad.to(dtype) if lists.grad_factor is None else grad.to(dtype) * lists.grad_factor.to(dtype).reshape(())
    if maximum:
        new = grad.abs().amax().double() if grad.numel() else torch.zeros((), dtype=torch.float64, device=grad.device)
    else:
        new = torch.linalg.vector_norm(grad, dtype=torch.float64)
    past = torch.where(before < 0, new, before.double())
    if maximum:
        return (past * moments.beta2 + new * (1.0 - moments.beta2)).to(before.dtype)
    return (past * past * moments.beta2 + new * new * (1.0 - moments.beta2)).sqrt().to(before.dtype)


def _novograd_rule(
    moments: _Moments,
    decay_in_moment: bool,
    first: Tensor,
    denominator: Tensor,
    grad: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
) -> tuple[Tensor, Sequence[Tensor]]:
    dtype, decay = param.dtype, moments.weight_decay
    if decay_in_moment:
        share = grad / denominator.reshape(()).to(dtype) + param * decay
        exp_avg = states[0] * moments.beta1 + share * moments.beta3
        return param - exp_avg * (moments.lr / first).to(dtype), [exp_avg]
    exp_avg = states[0] * moments.beta1 + grad * moments.beta3
    update = exp_avg / (denominator.reshape(()) * first).to(dtype) + param * decay
    return param - update * moments.lr, [exp_avg]


_LAMB_OP = define_operator(
    "multi_tensor_lamb_", _LAMB, multi_tensor_lamb__reference, lambda *arguments: check_step(_lamb_lists(*arguments))
)
_NOVOGRAD_OP = define_operator("multi_tensor_novograd_", _NOVOGRAD, multi_tensor_novograd__reference, _check_novograd)
