"""Combined gradients: one flat buffer per device and dtype, each ``param.grad`` a view of its part.

    buffer   [ grad of param 0 | padding | grad of param 1 | padding | … ]

Backward accumulates into the views, so that unscaling, clearing and the norm are one operation on each buffer. The
views last until somebody puts another tensor in their place; `check_combined_tensors` says where and how, and
`FlatGradients.rebuild` brings the gradients back without losing a bit. Which parameters have masters is decided in
``master_weights.py``; masters are combined like any other parameters.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from amplab.scalers.flat_buffer import FlatBuffer
from amplab.scalers.parameters import tensors_of
from amplab.scalers.unscaler import inverse_scale

__all__ = ["BrokenView", "FlatGradients", "ViewBreak", "check_combined_tensors"]


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
    """A parameter and its part of a buffer, which is the one of number ``index`` there."""

    buffer: FlatBuffer
    index: int
    param: Tensor
    view: Tensor
    address: int
    kind: tuple[torch.dtype, torch.device, torch.Size]


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
        return self._all

    @property
    def combined(self) -> frozenset[int]:
        """The parameters that have a part in a buffer, by their ``id``."""
        return frozenset(self._slots)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers ``(elements,)``, one per device and dtype; their padding is zero."""
        return tuple(buffer.tensor for buffer in self._buffers)

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
            buffer.tensor.zero_()
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
        inverse = functools.partial(inverse_scale, scale)
        found = self.bring_in_(inverse, _zero_on)
        if found is None:
            self.rebuild()
            found = self.bring_in_(inverse, _zero_on) or {}
        self.settle(again=False)
        if found_inf is None:
            found_inf = torch.zeros(1, device=next(iter(found), None))
        for here in found.values():
            found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device, non_blocking=True)))
        return found_inf

    def bring_in_(
        self,
        inverse: Callable[[torch.device], Tensor],
        found_inf: Callable[[torch.device], Tensor],
        params: Iterable[Tensor] | None = None,
    ) -> dict[torch.device, Tensor] | None:
        """Multiply gradients by ``inverse`` where they lie in their buffers, the others on their way in.

        Nothing is rebuilt: a gradient that is None stays None, and what its part holds is left to `settle`.

        Args:
            inverse: gives ``(1,)`` or ``()`` float32 for a device.
            found_inf: as ``inverse``; written where something is not finite.
            params: whose gradients, each of them among ``params`` of this object; None for all.

        Returns:
            ``found_inf`` of each device with gradients; None where a gradient does not fit, and nothing was written.

        Sync: none.
        """
        self._settled = False
        only = None if params is None else {id(param) for param in params}
        if any(param.grad is not None and (only is None or id(param) in only) for param in self._outside):
            return None
        arrived = [(buffer, buffer.arrivals(only)) for buffer in self._buffers]
        if any(arrivals is None for _, arrivals in arrived):
            return None
        found: dict[torch.device, Tensor] = {}
        self._settled = only is None and all(
            arrivals.whole or len(arrivals.kept) + len(arrivals.new) == len(buffer.params)
            for buffer, arrivals in arrived
        )
        for buffer, arrivals in arrived:
            if arrivals:
                device = buffer.tensor.device
                here = found[device] = found[device] if device in found else found_inf(device)
                buffer.unscale_(arrivals, here, inverse(device))
        return found

    def place(self, param: Tensor) -> Tensor:
        """Return where a new gradient of ``param`` is to be written: its part, or new memory where it has none.

        Sync: none.
        """
        slot = self._slots.get(id(param))
        if slot is None or (param.dtype, param.device, param.shape) != slot.kind:
            return torch.empty_like(param)
        return slot.buffer.lent(slot.index)

    def parts(self) -> list[Tensor]:
        """The gradients that lie in their places, each by itself, after `settle`. Sync: none."""
        return [slot.view for slot in self._slots.values() if slot.param.grad is not None]

    def settle(self, *, again: bool = True) -> bool:
        """Clear the parts of gradients that are None; return whether all others lie in their places.

        Right after `bring_in_` has seen every gradient there is nothing to look at.

        Args:
            again: look all the same.

        Sync: none.
        """
        if self._settled and not again:
            self._settled = False
            return True
        settled = [buffer.settle() for buffer in self._buffers]
        return all(settled) and all(param.grad is None for param in self._outside)

    def _combine(self) -> None:
        """Lay the buffers out anew and move every gradient in."""
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for index, param in enumerate(self._params):
            if param.grad is not None:
                _require_dense(index, param.grad)
                groups.setdefault((param.grad.device, param.grad.dtype), []).append(param)
        self._slots: dict[int, _Slot] = {}
        self._buffers: list[FlatBuffer] = []
        for params in groups.values():
            self._fill_buffer(params)
        self._all, self._settled = tuple(self._params), False
        self._outside = [param for param in self._params if id(param) not in self._slots]

    @torch.no_grad()
    def _fill_buffer(self, params: list[Tensor]) -> None:
        buffer = FlatBuffer(params)
        self._buffers.append(buffer)
        for index, (param, view) in enumerate(zip(params, buffer.views, strict=True)):
            self._slots[id(param)] = slot = _Slot(buffer, index, param, view, view.data_ptr(), _kind(param))
            self._return_grad(slot)

    def _return_grads(self, slots: list[_Slot]) -> None:
        """Copy gradients in; those that lie in a buffer already, in another place or order, are taken out first."""
        own = {buffer.tensor.untyped_storage().data_ptr() for buffer in self._buffers}
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


def _zero_on(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape


def _require_dense(index: int, grad: Tensor) -> None:
    if grad.layout is not torch.strided or not grad.is_floating_point():
        raise TypeError(
            f"parameter {index}: its gradient is {grad.layout}, {grad.dtype}; expected dense and floating-point. "
            "Leave this parameter out and unscale it with Unscaler."
        )
