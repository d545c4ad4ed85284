"""Combined gradients: one flat buffer per device and dtype, each ``param.grad`` a view of its part.

    buffer   [ grad of param 0 | padding | grad of param 1 | padding | … ]

Backward accumulates into the views, so that unscaling, clearing and the norm are one operation on each buffer. The
views last until somebody puts another tensor in their place; `check_combined_tensors` says where and how, and
`FlatGradients.rebuild` brings the gradients back without losing a bit. Which parameters have masters is decided in
``master_weights.py``; masters are combined like any other parameters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from amplab.kernels import unscale_
from amplab.scalers.parameters import tensors_of
from amplab.scalers.unscaler import inverse_scale

__all__ = ["BrokenView", "FlatGradients", "ViewBreak", "aligned_size", "check_combined_tensors"]

_ALIGN, _PADDING = 16, 32


class ViewBreak(Enum):
    """The five ways in which a gradient leaves its buffer; the value says what did it and what to do."""

    CLEARED = "the gradient is None: zero_grad() without set_to_none=False; clear with FlatGradients.zero_()"
    GRAPH_KEPT = "backward(create_graph=True) made a new gradient with a graph; take it with torch.autograd.grad"
    CONVERTED = "dtype, device or shape changed, as by .half() or .to(); convert before gradients are combined"
    PARAMETER_REPLACED = "another parameter took its place, as by load_state_dict(assign=True); combine anew"
    REASSIGNED = "another tensor was assigned to .grad or .grad.data; write into it with .grad.copy_()"


@dataclass(frozen=True)
class BrokenView:
    """A gradient that is not a view of its buffer any more: which of the combined parameters, and why."""

    index: int
    reason: ViewBreak

    def __str__(self) -> str:
        """Say it in a sentence."""
        return f"parameter {self.index}: {self.reason.value}."


@dataclass(frozen=True, eq=False)
class _Slot:
    """A parameter and its part of a buffer."""

    param: Tensor
    view: Tensor
    address: int
    kind: tuple[torch.dtype, torch.device, torch.Size]


def aligned_size(numel: int) -> int:
    """Return the elements that a gradient takes in a buffer: its own up to a multiple of 16, and 32 of padding.

    >>> aligned_size(1), aligned_size(17)
    (48, 64)

    Reference: ``get_aligned_storage_size`` of Ascend's apex.
    """
    return -(-numel // _ALIGN) * _ALIGN + _PADDING


class FlatGradients:
    """The gradients of some parameters in flat buffers.

    Parameters without a gradient stay out until `rebuild` finds them with one: an optimizer passes over them as
    before. A gradient of zeros is something else to it: weight decay and momentum go on.

    Args:
        params: floating-point, any devices and dtypes; one listed twice is taken once. Combine after the first
            backward, when it shows who has a gradient; what the gradients hold is kept.

    Raises:
        TypeError: a sparse gradient, or one that is not floating-point.

    Sync: none.

    Reference: ``combine_grad`` of Ascend's apex, ``apex.contrib.combine_tensors``.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([256.0, 512.0])
    >>> flat = FlatGradients([weight])
    >>> flat.unscale_(128.0).item(), weight.grad.tolist()
    (0.0, [2.0, 4.0])
    >>> weight.grad = None
    >>> [broken.reason.name for broken in flat.check()]
    ['CLEARED']
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list({id(param): param for param in tensors_of(params)}.values())
        self._combine()

    @property
    def params(self) -> tuple[Tensor, ...]:
        """All parameters, those without a gradient too."""
        return tuple(self._params)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers ``(elements,)``, one per device and dtype; their padding is zero."""
        return tuple(self._buffers)

    def check(self, params: Iterable[Tensor] | None = None) -> tuple[BrokenView, ...]:
        """Say which gradients are no views any more; see `check_combined_tensors`. Sync: none."""
        return check_combined_tensors(self, params)

    def rebuild(self, params: Iterable[Tensor] | None = None) -> tuple[BrokenView, ...]:
        """Bring every gradient back into its buffer, with the values that it has now.

        A cleared gradient stays None and its part of the buffer becomes zero; a converted one, a replaced parameter
        and a gradient that was not there before are given new buffers. A graph that a gradient carried is not kept:
        its values are.

        Args:
            params: what the parameters are now, after some were replaced; None: the ones known.

        Returns:
            What was broken.

        Raises:
            TypeError: as the constructor.

        Sync: none.
        """
        now = self._params if params is None else list({id(param): param for param in params}.values())
        broken = check_combined_tensors(self, now)
        late = any(param.grad is not None and id(param) not in self._slots for param in now)
        if late or any(each.reason in (ViewBreak.CONVERTED, ViewBreak.PARAMETER_REPLACED) for each in broken):
            self._params = now
            self._combine()
            return broken
        for each in broken:
            if (grad := self._params[each.index].grad) is not None:
                _require_dense(each.index, grad)
        with torch.no_grad():
            self._return_grads([self._slots[id(self._params[each.index])] for each in broken])
        return broken

    @torch.no_grad()
    def zero_(self) -> None:
        """Clear all gradients, one write per buffer, and keep the views: ``zero_grad(set_to_none=False)``.

        A gradient that was cleared to None before becomes zeros. Sync: none.
        """
        self.rebuild()
        for buffer in self._buffers:
            buffer.zero_()
        for slot in self._slots.values():
            slot.param.grad = slot.view.detach()

    def unscale_(self, scale: float | Tensor, *, found_inf: Tensor | None = None) -> Tensor:
        """Divide all gradients by ``scale``, one list of few buffers for the kernel; rebuild first where views broke.

        Args:
            scale: > 0, a number or a one-element tensor.
            found_inf: ``(1,)`` float32, to go on with the verdict of an earlier call; None for a fresh one.

        Returns:
            ``(1,)`` float32: 1.0 where a gradient was not finite or overflowed, else 0.0.

        Raises:
            ValueError: a scale that is not finite and > 0.

        Sync: none.
        """
        self.rebuild()
        by_device: dict[torch.device, list[Tensor]] = {}
        for buffer in self._buffers:
            by_device.setdefault(buffer.device, []).append(buffer)
        if found_inf is None:
            found_inf = torch.zeros(1, device=next(iter(by_device), None))
        for device, buffers in by_device.items():
            here = found_inf if found_inf.device == device else torch.zeros(1, device=device)
            unscale_(buffers, here, inverse_scale(scale, device))
            if here is not found_inf:
                found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device, non_blocking=True)))
        return found_inf

    def _combine(self) -> None:
        """Lay the buffers out anew and move every gradient in."""
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for index, param in enumerate(self._params):
            if param.grad is not None:
                _require_dense(index, param.grad)
                groups.setdefault((param.grad.device, param.grad.dtype), []).append(param)
        self._slots: dict[int, _Slot] = {}
        self._buffers: list[Tensor] = []
        for params in groups.values():
            self._fill_buffer(params)

    @torch.no_grad()
    def _fill_buffer(self, params: list[Tensor]) -> None:
        sizes = [aligned_size(param.numel()) for param in params]
        buffer = torch.zeros(sum(sizes), dtype=params[0].grad.dtype, device=params[0].grad.device)
        self._buffers.append(buffer)
        for param, part in zip(params, buffer.split(sizes), strict=True):
            view = _view_like(part[: param.numel()], param)
            self._slots[id(param)] = slot = _Slot(param, view, view.data_ptr(), _kind(param))
            self._return_grad(slot)

    def _return_grads(self, slots: list[_Slot]) -> None:
        """Copy gradients in; those that lie in a buffer already, in another place or order, are taken out first."""
        own = {buffer.untyped_storage().data_ptr() for buffer in self._buffers}
        for slot in slots:
            grad = slot.param.grad
            if grad is not None and grad.untyped_storage().data_ptr() in own:
                slot.param.grad = grad.clone()
        for slot in slots:
            self._return_grad(slot)

    def _return_grad(self, slot: _Slot) -> None:
        """Copy a gradient into its part of the buffer and point at it there; None leaves zeros behind."""
        if slot.param.grad is None:
            slot.view.zero_()
            return
        view = slot.view.detach()  # whoever still holds the old tensor does not reach the new gradient
        view.copy_(slot.param.grad)
        slot.param.grad = view

    def _how_broken(self, param: Tensor, slot: _Slot) -> ViewBreak | None:
        grad = param.grad
        if _kind(param) != slot.kind or (grad is not None and _kind(grad) != _kind(slot.view)):
            return ViewBreak.CONVERTED
        if grad is None:
            return ViewBreak.CLEARED
        dense = grad.layout is torch.strided
        if dense and grad.data_ptr() == slot.address and grad.stride() == slot.view.stride():
            return None
        return ViewBreak.GRAPH_KEPT if grad.requires_grad else ViewBreak.REASSIGNED


def check_combined_tensors(flat: FlatGradients, params: Iterable[Tensor] | None = None) -> tuple[BrokenView, ...]:
    """Say which combined gradients are not views of their buffers any more, and what broke each.

    Args:
        flat: the combined gradients.
        params: the parameters as the model has them now, ``model.parameters()``, in the order in which they were
            combined. Only with them a parameter that was replaced is seen.

    Returns:
        One `BrokenView` for each, by its place among ``flat.params``; empty when all is well.

    Sync: none.

    Reference: ``is_combined_tensor_valid`` of Ascend's apex.
    """
    now: Sequence[Tensor] = flat.params if params is None else list({id(param): param for param in params}.values())
    present = {id(param) for param in now}
    broken = []
    for index, param in enumerate(flat.params):
        slot = flat._slots.get(id(param))
        if id(param) not in present:
            broken.append(BrokenView(index, ViewBreak.PARAMETER_REPLACED))
        elif slot is not None and (reason := flat._how_broken(param, slot)) is not None:
            broken.append(BrokenView(index, reason))
    return tuple(broken)


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape


def _view_like(part: Tensor, param: Tensor) -> Tensor:
    """``part`` ``(elements,)`` in the shape of ``param`` and in its order in memory, such as channels-last."""
    dense = torch.empty_like(param)  # the strides that autograd gives a gradient
    return part.as_strided(param.shape, dense.stride(), part.storage_offset())


def _require_dense(index: int, grad: Tensor) -> None:
    if grad.layout is not torch.strided or not grad.is_floating_point():
        raise TypeError(
            f"parameter {index}: its gradient is {grad.layout}, {grad.dtype}; expected dense and floating-point. "
            "Leave this parameter out and unscale it with Unscaler."
        )
