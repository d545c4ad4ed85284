"""The gradients of an optimizer, unscaled and checked in one pass that accesses each parameter once.

    OptimizerGradients      the parameters of one optimizer, each once
    UnscaledGradients       the gradients unscaled since the last update, which are not unscaled again
    unscale_gradients_      grad <- round(grad * inv_scale);  found_inf of each device

Gradients are grouped by device and dtype only if they are not all strided and on one device. The kernel checks this:
it rejects a list before it writes anything. If the kernel is built, it also finds the gradients.
"""

import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.kernels import ParameterList, refusal_naming, unscale_
from amplab.parallel.shards import RankGroup, agree_on_found_inf, rank_groups
from amplab.scalers import CombinedUnscaler, Unscaler, local_shard, strided_grad

__all__ = ["KnownOptimizers", "OptimizerGradients", "UnscaledGradients", "unscale_gradients_"]

FoundInf = dict[torch.device, Tensor]


class OptimizerGradients:
    """The parameters of one optimizer, each once, as long as its groups list the same ones.

    Attributes:
        params: every parameter once, in the order of the groups.
        plain: whether the last gradients were strided and on one device, so that one kernel call takes them.
        shared: the parameters that another optimizer of the same scaler also steps; None if not known yet.
        parameter_list: the same parameters in the form that the kernels take.
        unscaler: for the gradients of one backward among several, and for those in flat buffers.
        combined: the same unscaler if gradients are kept in flat buffers, else None.
        rank_groups: the ranks that hold the shards of the parameters; empty if this rank holds all elements.
        momentum_of: the state of a fused SGD in which every parameter was found to have its momentum.
    """

    def __init__(self, *, combine: bool = False) -> None:
        self.params: tuple[Tensor, ...] = ()
        self.parameter_list = ParameterList([])
        self.plain = True
        self.shared: Sequence[Tensor] | None = None
        self.combined = CombinedUnscaler() if combine else None
        self.unscaler = self.combined or Unscaler()
        self.rank_groups: tuple[RankGroup, ...] = ()
        self.momentum_of: object = None
        self._names: dict[int, str] = {}
        self._listed: list[Tensor] = []

    def refresh(self, optimizer: Optimizer) -> bool:
        """Read the parameters again if the groups list other ones; return whether they do.

        Raises:
            AssertionError: a parameter that is not a tensor.

        Sync: none.
        """
        groups = optimizer.param_groups
        listed = groups[0]["params"] if len(groups) == 1 else list(chain(*(group["params"] for group in groups)))
        if len(listed) == len(self._listed) and all(map(operator.is_, listed, self._listed)):
            return False
        for param in listed:
            if not isinstance(param, Tensor):
                raise AssertionError(
                    f"expected param to be torch.Tensor, got {type(param).__name__}: give the optimizer parameters."
                )
        self._listed = list(listed)
        self._names = _names(groups)
        self.params = tuple({id(param): param for param in listed}.values())
        self.parameter_list = ParameterList(self.params)
        self.plain, self.shared, self.momentum_of = True, None, None
        self.rank_groups = rank_groups(self.params)
        if self.rank_groups:  # a flat buffer has no DTensor as its part
            self.combined, self.unscaler = None, Unscaler()
        return True

    def agreed(self, verdicts: FoundInf, none_here: Tensor) -> FoundInf:
        """Return found_inf after all ranks with shards have agreed; ``verdicts`` itself if nothing is sharded.

        Args:
            verdicts: found_inf of each device of this rank.
            none_here: ``()`` float32, 0.0; what a rank without gradients contributes. It is not modified.

        Sync: none; one on the CPU.
        """
        if not self.rank_groups:
            return verdicts
        first, *others = list(verdicts.values()) or [none_here.clone()]
        for each in others:
            first.copy_(torch.maximum(first, each.to(first.device, non_blocking=True)))
        return {first.device: agree_on_found_inf(first, self.rank_groups)}

    @property
    def may_be_shared(self) -> Sequence[Tensor]:
        """The parameters whose gradients another optimizer may use again in this iteration."""
        return self.params if self.shared is None else self.shared

    def name(self, param: Tensor) -> str:
        """Return the name of a gradient for a message: by parameter name if the optimizer has names, else by index."""
        place = next(index for index, each in enumerate(self.params) if each is param)
        return f"the gradient of {self._names.get(id(param), f'parameter {place}')}"

    def gradients(self) -> list[Tensor]:
        """Return the gradients that are not None, of sharded ones the shards of this rank. Sync: none."""
        return [local_shard(grad) for param in self.params if (grad := param.grad) is not None]


class _Unscaled(NamedTuple):
    """A gradient that was unscaled, except if ``unless`` is not 0, and its version counter at that time."""

    grad: Tensor
    version: int
    unless: Tensor | None


class UnscaledGradients:
    """The gradients that are already unscaled. A parameter that two optimizers share would be unscaled twice.

    A gradient that was written to since then counts as new: it may have been zeroed and filled by another backward.
    Therefore unscale for every optimizer before clipping.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Unscaled] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def add(self, params: Iterable[Tensor], *, unless: Tensor | None = None) -> None:
        """Record the gradients of ``params``; with ``unless``, found_inf of a fused step, only if it stays 0."""
        for param in params:
            grad = param.grad
            if grad is not None:
                self._seen[id(grad)] = _Unscaled(grad, local_shard(grad)._version, unless)

    def find(self, grad: Tensor) -> _Unscaled | None:
        """Return the record of ``grad``; None if it is still scaled."""
        seen = self._seen.get(id(grad))
        return seen if seen is not None and seen.version == local_shard(grad)._version else None

    def holds_any(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` is unscaled already."""
        return bool(self._seen) and any(
            (grad := param.grad) is not None and self.find(grad) is not None for param in params
        )

    def clear(self) -> None:
        """Begin another iteration."""
        self._seen = {}


def unscale_gradients_(
    known: OptimizerGradients,
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    allow_half: bool,
    done: UnscaledGradients | None = None,
) -> FoundInf:
    """Multiply the gradients of an optimizer by ``inv_scale`` in place, each once.

    Args:
        known: the optimizer's current parameters.
        inv_scale: ``()`` float32, on any device.
        found_inf: ``()`` float32, 0.0; the initial value of the results.
        allow_half: take float16 gradients.
        done: gradients that are unscaled already; these are only checked for inf and NaN.

    Returns:
        For every device with gradients a ``()`` float32: > 0 if one of them, or its unscaled value, is not finite.

    Raises:
        ValueError: a float16 gradient without ``allow_half``.
        RuntimeError: a gradient that the kernel cannot take: integer, complex, expanded.

    Sync: none.
    """
    if done:
        return _unscale_where_they_lie(known, inv_scale, found_inf, allow_half, done)
    verdicts = None if known.combined is None else _bring_in(known.combined, known, inv_scale, found_inf, allow_half)
    if verdicts is None:
        verdicts = _unscale_where_they_lie(known, inv_scale, found_inf, allow_half, None)
    known.unscaler.settle(known.params)
    return verdicts


def _bring_in(
    combined: CombinedUnscaler, known: OptimizerGradients, inv_scale: Tensor, found_inf: Tensor, allow_half: bool
) -> FoundInf | None:
    """Unscale gradients in flat buffers. Return None, with nothing written, if a gradient does not fit."""
    if not allow_half and torch.float16 in {buffer.dtype for buffer in combined.buffers}:
        return None
    return combined.bring_in_(
        known.params,
        lambda device: inv_scale.to(device, non_blocking=True),
        lambda device: found_inf.to(device, non_blocking=True, copy=True),
    )


def _unscale_where_they_lie(
    known: OptimizerGradients,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_half: bool,
    done: UnscaledGradients | None,
) -> FoundInf:
    if not done and found_inf.device == known.parameter_list.device:
        here = found_inf.clone()
        count = known.parameter_list.unscale_grads_(here, inv_scale, allow_half=allow_half)
        if count is not None:
            return {found_inf.device: here} if count else {}
    grads = known.gradients()
    if not allow_half and torch.float16 in {grad.dtype for grad in grads}:
        raise ValueError(
            "Attempting to unscale FP16 gradients. Keep the parameters in float32 and run the forward pass under "
            "autocast, or step float16 parameters with an optimizer made with fused=True."
        )
    if not grads:
        return {}
    if known.plain and not done:
        device = grads[0].device
        here = found_inf.to(device, non_blocking=True, copy=True)
        try:
            unscale_(grads, here, inv_scale.to(device, non_blocking=True))
        except RuntimeError:  # sparse, or on several devices; nothing was written
            known.plain = False
        else:
            return {device: here}
    return _unscale_one_by_one(known, inv_scale, found_inf, done or UnscaledGradients())


def _unscale_one_by_one(
    known: OptimizerGradients, inv_scale: Tensor, found_inf: Tensor, done: UnscaledGradients
) -> FoundInf:
    """Unscale gradients of any layout, grouped by device and by the factor that each still needs."""
    groups: dict[tuple[torch.device, int | None], tuple[list[Tensor], list[Tensor], Tensor]] = {}
    for param in known.params:
        if param.grad is None:
            continue
        seen = done.find(param.grad)
        factor, key = (inv_scale, None) if seen is None else _factor_left(seen, inv_scale)
        values = strided_grad(param)
        params, grads, _ = groups.setdefault((values.device, key), ([], [], factor))
        params.append(param)
        grads.append(values)
    verdicts: FoundInf = {}
    for (device, _), (params, grads, factor) in groups.items():
        if device not in verdicts:
            verdicts[device] = found_inf.to(device, non_blocking=True, copy=True)
        try:
            unscale_(grads, verdicts[device], factor.to(device, non_blocking=True))
        except RuntimeError as error:
            raise refusal_naming(error, [known.name(param) for param in params]) from None
    return verdicts


def _names(groups: Sequence[dict[str, Any]]) -> dict[int, str]:
    """The names of parameters, if the optimizer was created from ``model.named_parameters()``."""
    return {
        id(param): name
        for group in groups
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }


def _factor_left(seen: _Unscaled, inv_scale: Tensor) -> tuple[Tensor, int]:
    """Return the factor that a gradient still needs: 1, or the inverse scale if a fused step has skipped it."""
    one = torch.ones_like(inv_scale)
    if seen.unless is None:
        return one, 0
    return torch.where(seen.unless.to(inv_scale.device, non_blocking=True) > 0, inv_scale, one), id(seen.unless)


class KnownOptimizers:
    """The `OptimizerGradients` of each optimizer of a scaler, held weakly.

    Args:
        combine: keep the gradients of each in flat buffers.
    """

    def __init__(self, *, combine: bool = False) -> None:
        self._combine = combine
        self._known: weakref.WeakKeyDictionary[Optimizer, OptimizerGradients] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> OptimizerGradients:
        """Return the entry of ``optimizer`` with the parameters that its groups list now. Sync: none."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = OptimizerGradients(combine=self._combine)
        known.refresh(optimizer)
        return known

    def kept(self, optimizer: Optimizer) -> OptimizerGradients:
        """Return what `of` returned last, without reading the groups. Sync: none."""
        return self._known[optimizer]

    def find_shared(self) -> None:
        """Find the parameters that several optimizers step, if there is a new optimizer. Called between iterations."""
        everyone = list(self._known.values())
        if all(known.shared is not None for known in everyone):
            return
        steppers = Counter(id(param) for known in everyone for param in known.params)
        for known in everyone:
            known.shared = [param for param in known.params if steppers[id(param)] > 1]
