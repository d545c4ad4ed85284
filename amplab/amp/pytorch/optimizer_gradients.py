"""The gradients of an optimizer, unscaled and checked in one pass that accesses each parameter once.

    OptimizerGradients      the parameters of one optimizer, each once
    unscale_gradients_      grad <- round(grad * inv_scale);  found_inf of each device

Gradients are grouped by device and dtype only if they are not all strided and on one device. The kernel checks this:
it rejects a list before it writes anything. If the kernel is built, it also finds the gradients.
"""

import operator
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.pytorch.unscaled_gradients import UnscaledGradients
from amplab.kernels import ParameterList, is_refusal, refusal_naming, unscale_
from amplab.parallel.shards import RankGroup, agree_on_found_inf, rank_groups
from amplab.scalers import CombinedUnscaler, Unscaler, local_shard, strided_grad, to_device

__all__ = ["KnownOptimizers", "OptimizerGradients", "unscale_gradients_"]

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
        self._listed = []  # until all is read, so that the next call reads it after an interrupt
        self._names = _names(groups)
        self.params = tuple({id(param): param for param in listed}.values())
        self.parameter_list = ParameterList(self.params)
        self.plain, self.shared, self.momentum_of = True, None, None
        self.rank_groups = rank_groups(self.params)
        if self.rank_groups:  # a flat buffer has no DTensor as its part
            self.combined, self.unscaler = None, Unscaler()
        self._listed = list(listed)
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
            first.copy_(torch.maximum(first, to_device(each, first.device)))
        return {first.device: agree_on_found_inf(first, self.rank_groups)}

    @property
    def may_be_shared(self) -> Sequence[Tensor]:
        """The parameters that another optimizer may step in this iteration."""
        return self.params if self.shared is None else self.shared

    def name(self, param: Tensor) -> str:
        """Return the name of a gradient for a message: by parameter name if the optimizer has names, else by index."""
        place = next(index for index, each in enumerate(self.params) if each is param)
        return f"the gradient of {self._names.get(id(param), f'parameter {place}')}"

    def gradients(self) -> list[Tensor]:
        """Return the gradients that are not None, of sharded ones the shards of this rank. Sync: none."""
        return [local_shard(grad) for param in self.params if (grad := param.grad) is not None]


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
        lambda device: to_device(inv_scale, device),
        lambda device: to_device(found_inf, device, copy=True),
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
        here = to_device(found_inf, device, copy=True)
        try:
            unscale_(grads, here, to_device(inv_scale, device))
        except RuntimeError as error:
            if not is_refusal(error):  # sparse, or on several devices
                raise
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
        factor, key = done.factor_left(param, inv_scale)
        values = strided_grad(param)
        params, grads, _ = groups.setdefault((values.device, key), ([], [], factor))
        params.append(param)
        grads.append(values)
    verdicts: FoundInf = {}
    for (device, _), (params, grads, factor) in groups.items():
        if device not in verdicts:
            verdicts[device] = to_device(found_inf, device, copy=True)
        try:
            unscale_(grads, verdicts[device], to_device(factor, device))
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            raise refusal_naming(error, [known.name(param) for param in params]) from None
    return verdicts


def _names(groups: Sequence[dict[str, Any]]) -> dict[int, str]:
    """The names of parameters, if the optimizer was created from ``model.named_parameters()``."""
    return {
        id(param): name
        for group in groups
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }


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

    def is_only(self, optimizer: Optimizer) -> bool:
        """Whether no other optimizer is known, and ``optimizer`` has no parameters that are not. Sync: none."""
        known = self._known.get(optimizer)
        return len(self._known) == 1 and known is not None and known.shared is not None

    def find_shared(self) -> None:
        """Find the parameters that several optimizers step, if there is a new optimizer. Called between iterations."""
        everyone = list(self._known.values())
        if all(known.shared is not None for known in everyone):
            return
        steppers = Counter(id(param) for known in everyone for param in known.params)
        for known in everyone:
            known.shared = [param for param in known.params if steppers[id(param)] > 1]
