"""Combined gradients: one flat buffer per device and dtype, each ``param.grad`` a view of its part.

    buffer   [ grad of param 0 | padding | grad of param 1 | padding | … ]

Backward accumulates into the views, so that unscaling, clearing and the norm are one operation on each buffer. A view
lasts until another tensor takes its place in ``.grad``; `check_combined_tensors` reports which and why, and
`FlatGradients.rebuild` moves the gradients back, bit for bit. Which parameters have masters is decided in
``master_weights.py``; masters are combined like any other parameters.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from amplab.kernels import Whereabouts
from amplab.scalers.flat_buffer import Arrivals, FlatBuffer
from amplab.scalers.unscaler import gathered_found_inf, inverse_scale, tensors_of

__all__ = ["BrokenView", "FlatGradients", "ViewBreak", "check_combined_tensors"]


class ViewBreak(Enum):
    """Why a gradient is no longer in its buffer; the value is the cause and the remedy."""

    CLEARED = "the gradient is None: zero_grad() without set_to_none=False; clear with FlatGradients.zero_()"
    GRAPH_KEPT = "backward(create_graph=True) made a new gradient with a graph; take it with torch.autograd.grad"
    CONVERTED = "dtype, device or shape changed, as by .half() or .to(); convert the model before you combine gradients"
    PARAMETER_REPLACED = "another parameter replaced it, as by load_state_dict(assign=True); combine again"
    REASSIGNED = "another tensor was assigned to .grad or .grad.data; write into it with .grad.copy_()"


@dataclass(frozen=True)
class BrokenView:
    """A gradient that is no longer a view of its buffer: the index of its parameter, and the reason."""

    index: int
    reason: ViewBreak

    def __str__(self) -> str:
        """Return the index, the cause and the remedy as a sentence."""
        return f"parameter {self.index}: {self.reason.value}."


@dataclass(frozen=True, eq=False)
class _Slot:
    """A parameter and its part of a buffer, the one with that ``index`` in the buffer."""

    buffer: FlatBuffer
    index: int
    param: Tensor
    view: Tensor
    address: int
    kind: tuple[torch.dtype, torch.device, torch.Size]


class FlatGradients:
    """The gradients of some parameters in flat buffers.

    Parameters without a gradient stay outside until `rebuild` finds one: an optimizer skips them as before. A gradient
    of zeros would not be the same, since weight decay and momentum would apply.

    Args:
        params: floating-point, any devices and dtypes; one listed twice is taken once. Combine after the first
            backward, when it is known which parameters have gradients; the values of the gradients are kept.
        reserve: give a part to every parameter that requires a gradient, in the dtype of the parameter, too.

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

    def __init__(self, params: Iterable[Tensor], *, reserve: bool = False) -> None:
        self._params = list({id(param): param for param in tensors_of(params)}.values())
        self._reserve = reserve
        self._combine()

    @property
    def params(self) -> tuple[Tensor, ...]:
        """All parameters, including those without a gradient."""
        return self._all

    @property
    def combined(self) -> frozenset[int]:
        """The ``id`` of each parameter that has a part in a buffer."""
        return frozenset(self._slots)

    @property
    def outside(self) -> tuple[Tensor, ...]:
        """The parameters without a part in a buffer."""
        return tuple(self._outside)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers ``(elements,)``, one per device and dtype; their padding is zero."""
        return tuple(buffer.tensor for buffer in self._buffers)

    @property
    def flat_buffers(self) -> tuple[FlatBuffer, ...]:
        """The buffers with the parts of each parameter; `rebuild` may replace them."""
        return tuple(self._buffers)

    def check(self, params: Iterable[Tensor] | None = None) -> tuple[BrokenView, ...]:
        """Return the gradients that are no longer views; see `check_combined_tensors`. Sync: none."""
        return check_combined_tensors(self, params)

    def rebuild(self, params: Iterable[Tensor] | None = None) -> tuple[BrokenView, ...]:
        """Move every gradient back into its buffer, with its current values.

        A cleared gradient stays None and its part of the buffer becomes zero. If a gradient was converted or is new,
        or a parameter was replaced, all buffers are made again. The graph of a gradient is dropped, its values are
        kept.

        Args:
            params: the current parameters, if some were replaced; None: the same as before.

        Returns:
            What was broken.

        Raises:
            TypeError: as for the constructor.

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
        """Clear all gradients with one write per buffer and keep the views: ``zero_grad(set_to_none=False)``.

        A gradient that was None becomes zeros. Sync: none.
        """
        self.rebuild()
        for buffer in self._buffers:
            buffer.tensor.zero_()
        for slot in self._slots.values():
            slot.param.grad = slot.view.detach()

    def unscale_(self, scale: float | Tensor, *, found_inf: Tensor | None = None) -> Tensor:
        """Divide all gradients by ``scale`` with one kernel for the few buffers; rebuild first if a view is broken.

        Args:
            scale: > 0, a number or a one-element tensor.
            found_inf: ``(1,)`` float32 of an earlier call, to be updated; None for a new one.

        Returns:
            ``(1,)`` float32: 1.0 if a gradient was not finite or its quotient overflowed, else 0.0.

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
        return gathered_found_inf(found, found_inf)

    def bring_in_(
        self,
        inverse: Callable[[torch.device], Tensor],
        found_inf: Callable[[torch.device], Tensor],
        params: Iterable[Tensor] | None = None,
        *,
        moves: bool = True,
    ) -> dict[torch.device, Tensor] | None:
        """Multiply gradients by ``inverse``: in place in their buffers, the others while they are copied in.

        Nothing is rebuilt: a gradient that is None stays None, and `settle` clears its part.

        Args:
            inverse: returns ``(1,)`` or ``()`` float32 for a device.
            found_inf: as ``inverse``; set to 1.0 if anything is not finite.
            params: the parameters of these gradients, each of them in ``params`` of this object; None for all.
            moves: False: new gradients do not move in.

        Returns:
            ``found_inf`` of each device with gradients; None, with nothing written, if a gradient does not fit, or is
            new and does not move.

        Sync: none.
        """
        self._settled = False
        only = None if params is None else {id(param) for param in params}
        if any(param.grad is not None and (only is None or id(param) in only) for param in self._outside):
            return None
        if only is None and (brought := self._bring_in_by_kernels(inverse, found_inf, moves=moves)) is not None:
            return brought
        arrived: list[tuple[FlatBuffer, Arrivals]] = []
        for buffer in self._buffers:
            arrivals = buffer.arrivals(only)
            if arrivals is None or (arrivals.new and not moves):
                return None
            arrived.append((buffer, arrivals))
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

    def clip_(self, norm: Tensor, max_norm: float) -> bool:
        """Clip float32 gradients in one buffer as one tensor; see `GradientPlaces.clip_`. Sync: none."""
        return len(self._buffers) == 1 and not self._outside and self._buffers[0].clip_(norm, max_norm)

    def _bring_in_by_kernels(
        self, inverse: Callable[[torch.device], Tensor], found_inf: Callable[[torch.device], Tensor], *, moves: bool
    ) -> dict[torch.device, Tensor] | None:
        """Do `bring_in_` by the kernels; None, with nothing written, if a gradient does not fit."""
        if len(self._buffers) > 1:
            found_now = [buffer.find() for buffer in self._buffers]
            if any(each is None or (Whereabouts.NEW in each and not moves) for each in found_now):
                return None
        found: dict[torch.device, Tensor] = {}
        complete = True
        for buffer in self._buffers:
            device = buffer.tensor.device
            here = found[device] if device in found else found_inf(device)
            whereabouts = buffer.bring_in_(here, inverse(device), moves=moves)
            if whereabouts is None or (Whereabouts.NEW in whereabouts and not moves):
                return None
            if whereabouts != Whereabouts.MISSING:
                found[device] = here
            complete = complete and Whereabouts.MISSING not in whereabouts
        self._settled = complete
        return found

    def place(self, param: Tensor) -> Tensor:
        """Return the memory for a new gradient of ``param``: its part, or new memory if it has none.

        Sync: none.
        """
        slot = self._slots.get(id(param))
        if slot is None or (param.dtype, param.device, param.shape) != slot.kind:
            return torch.empty_like(param)
        return slot.buffer.lent(slot.index)

    def parts(self) -> list[Tensor]:
        """Return the gradients in the buffers one by one, after `settle`. Sync: none."""
        return [slot.view for slot in self._slots.values() if slot.param.grad is not None]

    def settle(self, *, again: bool = True) -> bool:
        """Clear the parts of gradients that are None; return whether all others are in their places.

        Right after `bring_in_` has seen every gradient there is nothing to check.

        Args:
            again: check in any case.

        Sync: none.
        """
        if self._settled and not again:
            self._settled = False
            return True
        settled = [buffer.settle() for buffer in self._buffers]
        return all(settled) and all(param.grad is None for param in self._outside)

    def _combine(self) -> None:
        """Make the buffers and move every gradient in."""
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for index, param in enumerate(self._params):
            if param.grad is not None:
                _require_dense(index, param.grad)
                groups.setdefault((param.grad.device, param.grad.dtype), []).append(param)
            elif self._reserve and param.requires_grad:
                groups.setdefault((param.device, param.dtype), []).append(param)
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
        """Copy gradients in; those already in a buffer, in another place or order, are copied out first."""
        own = {buffer.tensor.untyped_storage().data_ptr() for buffer in self._buffers}
        for slot in slots:
            grad = slot.param.grad
            if grad is not None and grad.untyped_storage().data_ptr() in own:
                slot.param.grad = grad.clone()
        for slot in slots:
            self._return_grad(slot)

    def _return_grad(self, slot: _Slot) -> None:
        """Copy a gradient into its part of the buffer and make the part the gradient; for None, clear the part."""
        if slot.param.grad is None:
            slot.view.zero_()
            return
        view = slot.view.detach()  # a reference to the old tensor must not reach the new gradient
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
    """Return the combined gradients that are no longer views of their buffers, with the reason for each.

    Args:
        flat: the combined gradients.
        params: the current parameters of the model, ``model.parameters()``, in the order in which they were combined.
            A parameter that was replaced is detected only with them.

    Returns:
        One `BrokenView` for each, by its index in ``flat.params``; empty if nothing is broken.

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
    return torch.zeros(1, dtype=torch.float32, device=device)


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape


def _require_dense(index: int, grad: Tensor) -> None:
    if grad.layout is not torch.strided or not grad.is_floating_point():
        raise TypeError(
            f"parameter {index}: its gradient is {grad.layout}, {grad.dtype}; expected dense and floating-point. "
            "Leave this parameter out and unscale it with Unscaler."
        )
