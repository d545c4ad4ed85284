"""Step many parameters at once by Adagrad, Adadelta or RMSprop, whose learning rates adapt element by element.

Operators under ``torch.ops.amplab``, with the common arguments of ``steps.py``:

    multi_tensor_adagrad_     h <- h + g^2;   p <- p - lr g / (sqrt(h) + eps)
    multi_tensor_adadelta_    v <- rho v + (1 - rho) g^2;   d = g sqrt(u + eps) / sqrt(v + eps)
                              u <- rho u + (1 - rho) d^2;   p <- p - lr d
    multi_tensor_rmsprop_     v <- alpha v + (1 - alpha) g^2;   p <- p - lr g / (sqrt(v) + eps)
        …_centered_           a <- a + (1 - alpha) (g - a);   sqrt(max(v - a^2, 0)) instead of sqrt(v)
        …_momentum_           b <- momentum b + g / (…);   p <- p - lr b
        …_centered_momentum_  both

with g + weight_decay p for g. The kernels, with the same bits, are in ``adaptive_steps.cpp`` and ``adaptive_steps.cu``
over the per-element code of ``adaptive_steps.h``.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amplab.kernels import builder
from amplab.kernels.operators import define_operator
from amplab.kernels.step_reference import StepLists, check_step, square_root, step_reference

__all__ = [
    "adadelta_",
    "adagrad_",
    "multi_tensor_adadelta__reference",
    "multi_tensor_adagrad__reference",
    "multi_tensor_rmsprop__reference",
    "rmsprop_",
]

_REST = "Tensor(y!)[] steps, Tensor(z!)[] copies, Tensor? grad_factor, Tensor? found_inf, bool maximize, float lr, "
_RMSPROP = (
    "float alpha, float eps, float weight_decay, float momentum, bool decoupled, bool eps_in_root, bool lr_in_momentum"
)


def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step by Adagrad.

    Args:
        params: as in `amplab.kernels.sgd_`, as are grads, copies, maximize, grad_factor and found_inf.
        sums: as many, the sums of squared gradients.
        steps: one float32 element each: the number of steps so far; incremented.
        lr: learning rate.
        eps: added to the root.
        weight_decay: weight decay factor.
        lr_decay: the learning rate of a step is ``lr / (1 + (step - 1) lr_decay)``.
        decoupled: add the decay to the update, ``p - lr (… + weight_decay p)``, not to the gradient.

    Raises:
        RuntimeError: as `amplab.kernels.sgd_`.

    Sync: none.

    Reference: J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods", 2011; apex ``multi_tensor_adagrad``.

    >>> import torch
    >>> weight = torch.tensor([1.0])
    >>> adagrad_([weight], [torch.tensor([5.0])], [torch.zeros(1)], [torch.zeros(())], lr=0.25)
    >>> weight.item()
    0.75
    """
    builder.settle()
    rest = (steps, copies, grad_factor, found_inf, maximize)
    _ADAGRAD_OP(params, grads, sums, *rest, lr, eps, weight_decay, lr_decay, decoupled)


def adadelta_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    square_avgs: Sequence[Tensor],
    acc_deltas: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    lr: float = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step by Adadelta.

    Args:
        params: as in `adagrad_`, as are grads, steps, copies, maximize, grad_factor and found_inf.
        square_avgs: as many, the running means of squared gradients.
        acc_deltas: as many, the running means of squared updates.
        lr: learning rate.
        rho: decay of both means.
        eps: added under both roots.
        weight_decay: weight decay factor; added to the gradient.

    Raises:
        RuntimeError: as `adagrad_`.

    Sync: none.

    Reference: M. D. Zeiler, "ADADELTA: an adaptive learning rate method", 2012; ``torch.optim.Adadelta``.
    """
    builder.settle()
    rest = (steps, copies, grad_factor, found_inf, maximize)
    _ADADELTA_OP(params, grads, square_avgs, acc_deltas, *rest, lr, rho, eps, weight_decay)


def rmsprop_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    square_avgs: Sequence[Tensor],
    grad_avgs: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    lr: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    decoupled: bool = False,
    eps_in_root: bool = False,
    lr_in_momentum: bool = False,
    maximize: bool = False,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step by RMSprop, in the form of torch or of TensorFlow.

    Args:
        params: as in `adagrad_`, as are grads, steps, copies, maximize, grad_factor and found_inf.
        square_avgs: as many, the running means of squared gradients.
        grad_avgs: as many, the running means of gradients; empty if the means of squares are not centered.
        momentum_buffers: as many; empty for no momentum.
        lr: learning rate.
        alpha: decay of the running means.
        eps: added to the root.
        weight_decay: weight decay factor; added to the gradient.
        momentum: decay of the buffers.
        decoupled: subtract ``weight_decay p`` from the weight, without lr, instead of adding it to the gradient.
        eps_in_root: add ``eps`` under the root.
        lr_in_momentum: apply the learning rate of each step to the buffer: ``b <- momentum b + lr …;  p <- p - b``.

    Raises:
        RuntimeError: as `adagrad_`.

    Sync: none.

    Reference: T. Tieleman, G. Hinton, Coursera lecture 6.5, 2012; ``torch.optim.RMSprop``; timm's ``RMSpropTF``. If
    rounding makes the variance negative, it is 0 here and NaN there.
    """
    builder.settle()
    states = [each for each in (square_avgs, grad_avgs, momentum_buffers) if len(each) > 0] or [square_avgs]
    numbers = (lr, alpha, eps, weight_decay, momentum, decoupled, eps_in_root, lr_in_momentum)
    operator = _RMSPROP_OPS[len(grad_avgs) > 0, len(momentum_buffers) > 0]
    operator(params, grads, *states, steps, copies, grad_factor, found_inf, maximize, *numbers)


def multi_tensor_adagrad__reference(*arguments: Any) -> None:
    """PyTorch reference of `adagrad_`, with the operator's arguments. Sync: none."""
    step_reference(_lists(1, arguments), functools.partial(_adagrad_rule, *arguments[8:]))


def multi_tensor_adadelta__reference(*arguments: Any) -> None:
    """PyTorch reference of `adadelta_`, with the operator's arguments. Sync: none."""
    step_reference(_lists(2, arguments), functools.partial(_adadelta_rule, *arguments[9:]))


def multi_tensor_rmsprop__reference(centered: bool, has_momentum: bool, *arguments: Any) -> None:
    """PyTorch reference of `rmsprop_`, with the arguments of one of the four operators. Sync: none."""
    states = 1 + centered + has_momentum
    rule = functools.partial(_rmsprop_rule, centered, *arguments[states + 7 :])
    step_reference(_lists(states, arguments), rule)


def _lists(states: int, arguments: Sequence[Any]) -> StepLists:
    """Return the tensors among the arguments of an operator with so many states; the rule's constants follow them."""
    params, grads, *rest = arguments
    return StepLists(params, grads, rest[:states], *rest[states : states + 5])


def _adagrad_rule(
    lr: float,
    eps: float,
    weight_decay: float,
    lr_decay: float,
    decoupled: bool,
    grad: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
    step: Tensor,
) -> tuple[Tensor, Sequence[Tensor]]:
    if weight_decay != 0 and not decoupled:
        grad = grad + param * weight_decay
    total = states[0] + grad * grad
    update = grad / (square_root(total) + eps)
    if weight_decay != 0 and decoupled:
        update = update + param * weight_decay
    return param - update * (lr / (1.0 + (step - 1.0) * lr_decay)).to(param.dtype), [total]


def _adadelta_rule(
    lr: float,
    rho: float,
    eps: float,
    weight_decay: float,
    grad: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
    _step: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor]]:
    if weight_decay != 0:
        grad = grad + param * weight_decay
    square_avg = states[0] * rho + grad * grad * (1.0 - rho)
    delta = square_root(states[1] + eps) / square_root(square_avg + eps) * grad
    return param - delta * lr, [square_avg, states[1] * rho + delta * delta * (1.0 - rho)]


def _rmsprop_rule(
    centered: bool,
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    decoupled: bool,
    eps_in_root: bool,
    lr_in_momentum: bool,
    grad: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
    _step: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor]]:
    if weight_decay != 0:
        grad, param = (grad, param - param * weight_decay) if decoupled else (grad + param * weight_decay, param)
    variance = square_avg = states[0] * alpha + grad * grad * (1.0 - alpha)
    new = [square_avg]
    if centered:
        new.append(states[1] + (grad - states[1]) * (1.0 - alpha))
        variance = (square_avg - new[1] * new[1]).clamp_min(0.0)  # 0 for a constant gradient, apart from rounding
    update = grad / (square_root(variance + eps) if eps_in_root else square_root(variance) + eps)
    if len(states) == len(new):
        return param - update * lr, new
    buffer = states[-1] * momentum + (update * lr if lr_in_momentum else update)
    return param - (buffer if lr_in_momentum else buffer * lr), [*new, buffer]


def _register(name: str, states: Sequence[str], numbers: str, reference: Any) -> Any:
    lists = "".join(f"Tensor({chr(ord('b') + k)}!)[] {state}, " for k, state in enumerate(states))
    schema = f"(Tensor(a!)[] params, Tensor[] grads, {lists}{_REST}{numbers}) -> ()"
    return define_operator(name, schema, reference, lambda *arguments: check_step(_lists(len(states), arguments)))


_ADAGRAD_OP = _register(
    "multi_tensor_adagrad_",
    ["sums"],
    "float eps, float weight_decay, float lr_decay, bool decoupled",
    multi_tensor_adagrad__reference,
)
_ADADELTA_OP = _register(
    "multi_tensor_adadelta_",
    ["square_avgs", "acc_deltas"],
    "float rho, float eps, float weight_decay",
    multi_tensor_adadelta__reference,
)
_RMSPROP_OPS = {
    (centered, momentum): _register(
        f"multi_tensor_rmsprop_{'centered_' * centered}{'momentum_' * momentum}",
        ["square_avgs", *["grad_avgs"] * centered, *["momentum_buffers"] * momentum],
        _RMSPROP,
        functools.partial(multi_tensor_rmsprop__reference, centered, momentum),
    )
    for centered in (False, True)
    for momentum in (False, True)
}
