"""An unscaler that keeps gradients in flat buffers, and moves them back if other code replaced them.

    backward          makes new gradients, as after zero_grad(), or adds to those in the buffers
    unscale_          part <- round(gradient / scale)    in one pass, which also moves new gradients in
    settle            called after it: combines gradients that are new, were converted or were replaced

A copy costs more than unscaling in place. So new gradients stay where backward made them, and the buffers are dropped,
until `take` or `flat_grads` is called; from then on every new gradient moves in.

A parameter without a gradient keeps None, so that an optimizer skips it as it does without buffers. The values are
bitwise those of `Unscaler`. Sparse gradients and those of tensor subclasses stay outside of the buffers.
"""

import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from amplab.scalers.flat_gradients import FlatGradients, ViewBreak
from amplab.scalers.unscaler import FlatGrads, Unscaler, gathered_found_inf, inverse_scale

__all__ = ["CombinedUnscaler"]


class CombinedUnscaler(Unscaler):
    """Unscale gradients and keep them combined.

    Args:
        announce: called with a sentence each time that gradients have left their buffers other than by
            ``zero_grad()``; None: they are combined again without a message.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.zeros(2)
    >>> unscaler = CombinedUnscaler()
    >>> for _ in range(2):
    ...     _ = weight.grad.copy_(torch.tensor([256.0, 512.0]))  # as a backward adds to a gradient of zeros
    ...     found_inf = unscaler.unscale_([weight], 128.0)
    ...     unscaler.settle([weight])
    >>> weight.grad.tolist(), [buffer.sum().item() for buffer in unscaler.buffers]
    ([2.0, 4.0], [6.0])
    """

    def __init__(self, announce: Callable[[str], object] | None = None) -> None:
        super().__init__()
        self._announce = announce
        self._flat: FlatGradients | None = None
        self._listed: tuple[Tensor, ...] = ()
        self._all_combined = False  # every parameter listed is one of the flat gradients
        self._left_new = False  # new gradients of the last backward are not in the buffers
        self._taken = announce is not None  # the buffers are in use, so that new gradients move in
        self._stays_new = False  # gradients are new in each backward, and nobody takes the buffers

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers ``(elements,)``, one per device and dtype; none before the first gradients."""
        return () if self._flat is None else self._flat.buffers

    def unscale_(self, params: Iterable[Tensor], scale: float | Tensor, *, found_inf: Tensor | None = None) -> Tensor:
        """Divide every ``param.grad`` by ``scale``; see `Unscaler.unscale_`."""
        params = tuple(params)
        found = self.bring_in_(params, lambda device: inverse_scale(scale, device))
        if found is None:
            self._left_new = self._flat is not None and bool(params)
            return super().unscale_(params, scale, found_inf=found_inf)
        return gathered_found_inf(found, found_inf)

    def bring_in_(
        self,
        params: Sequence[Tensor],
        inverse: Callable[[torch.device], Tensor],
        found_inf: Callable[[torch.device], Tensor] = lambda device: torch.zeros(1, dtype=torch.float32, device=device),
    ) -> dict[torch.device, Tensor] | None:
        """Multiply the gradients of ``params`` by ``inverse`` into the buffers; see `FlatGradients.bring_in_`.

        Returns:
            ``found_inf`` of each device with gradients; None, with nothing written, if there are no buffers yet or a
            gradient does not fit into its part.

        Sync: none.
        """
        if self._flat is None or not params:
            return None
        if (params is self._listed and self._all_combined) or _same(params, self._flat.params):
            found = self._flat.bring_in_(inverse, found_inf, moves=self._taken)
            if found is None and not self._taken:
                self._flat, self._stays_new = None, True
            return found
        known = {id(param) for param in self._flat.params}
        inside = all(id(param) in known or param.grad is None for param in params)
        return self._flat.bring_in_(inverse, found_inf, params) if inside else None

    def take(self) -> None:
        """Move new gradients into the buffers in every `unscale_` from now on. Sync: none."""
        self._taken, self._stays_new = True, False

    def clip_(self, norm: Tensor, max_norm: float) -> bool:
        """Clip float32 gradients that are all in one buffer as one tensor; see `GradientPlaces.clip_`. Sync: none."""
        return self._flat is not None and self._all_combined and self._flat.clip_(norm, max_norm)

    def adopt(self, params: Iterable[Tensor], flat: FlatGradients) -> None:
        """Use the buffers of ``flat``, into which other code has moved the gradients of ``params``. Sync: none.

        Args:
            params: every parameter whose gradients are combined here, as for `settle`.
            flat: the combined gradients of the same parameters.
        """
        self._flat, self._listed, self._left_new, self._all_combined = flat, tuple(params), True, True
        self.take()

    def place(self, param: Tensor) -> Tensor:
        """Return the memory for a new gradient of ``param``. Sync: none."""
        return torch.empty_like(param) if self._flat is None else self._flat.place(param)

    def settle(self, params: Iterable[Tensor], *, again: bool = False) -> None:
        """Ensure that the gradients of ``params`` are in buffers whose other parts are zero.

        Args:
            params: every parameter whose gradients are combined here, as they are listed now.
            again: check each, even if `unscale_` has just seen them all.

        Sync: none.
        """
        params = tuple(params)
        if self._stays_new:
            return
        if self._flat is not None and _same(params, self._listed) and self._flat.settle(again=again):
            return
        combined = tuple(param for param in params if param.grad is None or _can_be_combined(param.grad))
        if self._flat is None:
            if any(param.grad is not None for param in combined):
                self._flat = FlatGradients(combined)
        elif _same(combined, self._flat.params):
            self._report(combined, self._flat)
            self._flat.rebuild()
        else:
            self._report(combined, self._flat)
            self._flat = FlatGradients(combined)
        self._listed, self._left_new = params, False
        self._all_combined = self._flat is not None and _same(params, self._flat.params)

    def flat_grads(self, params: Iterable[Tensor]) -> FlatGrads:
        """The gradients of ``params``, after `settle`; see `Unscaler.flat_grads`."""
        params = tuple(params)
        self.take()
        self.settle(params, again=True)
        inside = set() if self._flat is None else {id(param) for param in self._flat.params}
        outside = super().flat_grads(param for param in params if id(param) not in inside)
        parts = [] if self._flat is None else self._flat.parts()
        buffers = self.buffers
        return FlatGrads([*buffers, *outside.tensors], [*parts, *outside.parts], [*buffers, *outside.summed])

    def _report(self, params: Sequence[Tensor], flat: FlatGradients) -> None:
        """Announce which gradients have left their buffers, and how."""
        if self._announce is None:
            return
        usual = {ViewBreak.CLEARED, ViewBreak.REASSIGNED} if self._left_new else {ViewBreak.CLEARED}
        broken = [each for each in flat.check(params) if each.reason not in usual]
        known = flat.combined
        late = [index for index, param in enumerate(params) if param.grad is not None and id(param) not in known]
        reasons = [str(each) for each in broken]
        reasons += [f"parameter {index}: it has a gradient for the first time." for index in late]
        if reasons:
            more = f" The same holds for {len(reasons) - 1} more." if len(reasons) > 1 else ""
            self._announce(f"Combined grad has been destroyed and will be recombined afterwards, {reasons[0]}{more}")


def _can_be_combined(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided and grad.is_floating_point()


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return left is right or (len(left) == len(right) and all(map(operator.is_, left, right)))
