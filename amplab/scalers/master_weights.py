"""Float32 master weights for 16-bit model parameters: the pairs, and what is copied between them.

gradients   model -> master    master.grad <- model.grad / scale        (`MasterWeights.unscale_grads`)
values      master -> model    model <- round(master)                   (`MasterWeights.copy_to_model`)
edits       model -> master    master <- model, if the model's weight was edited    (`MasterWeights.follow_edits`)
"""

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.kernels import unscale_add, unscale_copy
from amplab.kernels.operators import without_gradients
from amplab.scalers.to_device import to_device
from amplab.scalers.unscaler import inverse_scale, tensors_of

__all__ = ["MasterPair", "MasterWeights"]


class MasterPair(NamedTuple):
    """A 16-bit model parameter and its float32 master of the same shape."""

    model: Tensor
    master: Parameter


class MasterWeights:
    """The master weights of a model: a float32 copy of every 16-bit parameter, which the optimizer steps.

    A float32 or float64 parameter needs no master; the optimizer steps it directly.

    Args:
        params: model parameters, as for `add_pairs`.

    >>> model_weight = Parameter(torch.ones(2, dtype=torch.float16))
    >>> masters = MasterWeights([model_weight])
    >>> model_weight.grad = torch.tensor([128.0, 0.5], dtype=torch.float16)
    >>> masters.unscale_grads(128.0).item()
    0.0
    >>> masters.of(model_weight).grad
    tensor([1.0000, 0.0039])
    """

    def __init__(self, params: Iterable[Tensor] = ()) -> None:
        self._pairs: dict[int, MasterPair] = {}
        self._watched: dict[int, Tensor] = {}
        self._are_ahead = False
        self._step: Callable[[], bool] | None = None  # whether it runs still
        self._thread = 0  # of the step
        self.add_pairs(params)

    @property
    def are_ahead(self) -> bool:
        """Whether they have stepped, and the model has not got the copy of that yet."""
        return self._are_ahead

    @property
    def pairs(self) -> tuple[MasterPair, ...]:
        """Every pair, in the order of the parameters."""
        return tuple(self._pairs.values())

    def add_pairs(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Make a master for each 16-bit parameter that has none yet.

        Args:
            params: model parameters of one or more groups; a parameter listed twice has one master.

        Returns:
            For each parameter what the optimizer should step: its master, or itself if it needs none.

        Sync: none.
        """
        return [self._master(param) for param in tensors_of(params)]

    def of(self, param: Tensor) -> Tensor:
        """Return the master of a model parameter, or the parameter itself if it needs none."""
        pair = self._pairs.get(id(param))
        return param if pair is None else pair.master

    def unscale_grads(
        self,
        scale: float | Tensor,
        *,
        accumulate: bool = False,
        found_inf: Tensor | None = None,
        place: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> Tensor:
        """Write the model's gradients, divided by ``scale``, to the masters in float32.

        The model's gradients do not change. If a model parameter has no gradient, its master's becomes None, or is
        kept with ``accumulate=True``.

        Args:
            scale: > 0, a number or a one-element tensor.
            accumulate: add to the masters' gradients instead of replacing them.
            found_inf: ``(1,)`` float32 of an earlier call, to be updated; None for a new one.
            place: returns the memory for the gradient of a master that has none; it is overwritten.

        Returns:
            ``(1,)`` float32: 1.0 if a model gradient was not finite or its quotient overflowed, else 0.0.

        Raises:
            ValueError: a scale that is not finite and > 0.

        Sync: none.
        """
        by_device: dict[torch.device, list[tuple[Tensor, Parameter]]] = {}
        for model, master in self._pairs.values():
            if model.grad is not None:
                by_device.setdefault(model.device, []).append((model.grad, master))
            elif not accumulate:
                master.grad = None
        if found_inf is None:
            found_inf = torch.zeros(1, dtype=torch.float32, device=next(iter(by_device), None))
        for device, grads in by_device.items():
            here = found_inf if found_inf.device == device else torch.zeros(1, dtype=torch.float32, device=device)
            _unscale_into(grads, here, inverse_scale(scale, device), place, accumulate=accumulate)
            if here is not found_inf:
                found_inf.copy_(torch.maximum(found_inf, to_device(here, found_inf.device)))
        return found_inf

    @without_gradients
    def copy_to_model(self) -> None:
        """Round every master into its model parameter, after the optimizer has stepped the masters.

        Sync: none.
        """
        self._copy()
        self._are_ahead, self._step = False, None

    def _copy(self) -> None:
        if self._pairs:
            torch._foreach_copy_([pair.model for pair in self.pairs], [pair.master for pair in self.pairs])

    def begin_step(self, runs: Callable[[], bool] | None = None) -> None:
        """Note that the masters are stepped from now on, so the model needs a copy. Sync: none.

        Args:
            runs: returns whether the call of the optimizer runs still, if its hooks may run the model.
        """
        self._are_ahead, self._step, self._thread = True, runs, get_ident()

    def end_step(self) -> None:
        """As `copy_to_model`, unless it has been called since `begin_step`. Sync: none."""
        if self._are_ahead:
            self.copy_to_model()

    def catch_up(self) -> None:
        """As `end_step`, for a step that an exception has ended. Sync: none.

        While the step runs, as for a forward in a hook of the optimizer, the model needs another copy at its end. A
        forward in another thread meanwhile has the weights before the step.
        """
        if not self._are_ahead:
            return
        if torch.compiler.is_compiling():  # a graph knows neither frames nor threads
            self.copy_to_model()
            return
        step = self._step
        runs = step is not None and step()
        if self._thread != get_ident():
            if not runs:
                with torch.no_grad():
                    self._copy()
            return
        self.copy_to_model()
        if runs:
            self.begin_step(step)

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Set every master to its model parameter's value, after weights were loaded into the model.

        Sync: none.
        """
        if self._pairs:
            torch._foreach_copy_([pair.master for pair in self.pairs], [pair.model for pair in self.pairs])

    def watch_model(self, params: Iterable[Tensor] | None = None) -> None:
        """Copy the model's weights, so that `follow_edits` can detect later edits.

        The 16-bit copies are kept until `stop_watching`.

        Args:
            params: model parameters; None for all that have a master.

        Sync: none.
        """
        for pair in self._pairs_of(params):
            self._watched[id(pair.model)] = pair.model.detach().clone()

    def follow_edits(self, params: Iterable[Tensor] | None = None) -> None:
        """Copy the elements that were edited in the model since `watch_model` to the masters.

            master <- model    where model != watched and round(master) != model

        A master that was edited directly, or whose value was rounded to the model, therefore keeps all its bits.

        Args:
            params: as in `watch_model`; those that are not watched are skipped.

        Sync: none.
        """
        for pair in self._pairs_of(params) if self._watched else ():
            watched = self._watched.get(id(pair.model))
            if watched is not None and watched.shape == pair.model.shape == pair.master.shape:
                self._watched[id(pair.model)] = _take_edits(pair, watched)

    def stop_watching(self) -> None:
        """Drop the copies of `watch_model`; `follow_edits` does nothing until the next call of `watch_model`."""
        self._watched.clear()

    def _pairs_of(self, params: Iterable[Tensor] | None) -> list[MasterPair]:
        if params is None:
            return list(self._pairs.values())
        return [self._pairs[id(param)] for param in params if id(param) in self._pairs]

    def _master(self, param: Tensor) -> Tensor:
        if param.dtype not in LOW_PRECISION_DTYPES:
            return param
        if id(param) not in self._pairs:
            master = Parameter(param.detach().to(torch.float32, copy=True), requires_grad=param.requires_grad)
            self._pairs[id(param)] = MasterPair(param, master)
        return self._pairs[id(param)].master


def _take_edits(pair: MasterPair, watched: Tensor) -> Tensor:
    """Copy the edited elements of the model's weight to the master; return a copy of the weight."""
    model = pair.model.detach()
    master = pair.master.detach().to(model.device)  # model.cuda() moves the model alone
    edited = (model != watched.to(model.device)) & (model != master.to(model.dtype))
    pair.master.detach().copy_(torch.where(edited, model.to(master.dtype), master))
    return model.clone()


def _unscale_into(
    grads: list[tuple[Tensor, Parameter]],
    found_inf: Tensor,
    inverse: Tensor,
    place: Callable[[Tensor], Tensor],
    *,
    accumulate: bool,
) -> None:
    """Unscale each gradient into that of its master: one call copies new ones, one adds the rest, sparse ones apart."""
    copied: tuple[list[Tensor], list[Tensor]] = ([], [])
    summed: tuple[list[Tensor], list[Tensor]] = ([], [])
    for grad, master in grads:
        old = master.grad if accumulate else None
        if grad.is_sparse or (old is not None and old.is_sparse):
            master.grad = _with_sparse(grad, old, found_inf, inverse)
            continue
        inputs, outputs = copied if old is None else summed
        if master.grad is None:
            master.grad = place(master)
        inputs.append(grad)
        outputs.append(master.grad)
    for write, (inputs, outputs) in ((unscale_copy, copied), (unscale_add, summed)):
        if inputs:
            write(inputs, outputs, found_inf, inverse)


@torch.no_grad()
def _with_sparse(grad: Tensor, old: Tensor | None, found_inf: Tensor, inverse: Tensor) -> Tensor:
    """Return the unscaled gradient plus ``old``, one of which is sparse; duplicates are summed in float32."""
    scaled = grad._values() if grad.is_sparse else grad
    new = torch.empty_like(scaled, dtype=torch.float32)
    unscale_copy([scaled], [new], found_inf, inverse)
    if grad.is_sparse:
        new = torch.sparse_coo_tensor(grad._indices(), new, grad.shape, check_invariants=False).coalesce()
    if old is None:
        return new
    return new + old if old.is_sparse else old + new  # torch adds sparse to dense, not dense to sparse
