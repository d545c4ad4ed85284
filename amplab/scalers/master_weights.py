"""Float32 master weights for 16-bit model parameters: the pairs, and the two ways between them.

gradients   model -> master    master.grad <- model.grad / scale        (`MasterWeights.unscale_grads`)
values      master -> model    model <- round(master)                   (`MasterWeights.copy_to_model`)
edits       model -> master    master <- model, where the model's weight was edited    (`MasterWeights.follow_edits`)
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.kernels import unscale_add, unscale_copy
from amplab.scalers.parameters import tensors_of
from amplab.scalers.unscaler import inverse_scale

__all__ = ["MasterPair", "MasterWeights"]


class MasterPair(NamedTuple):
    """A 16-bit model parameter and its float32 master of the same shape."""

    model: Tensor
    master: Parameter


class MasterWeights:
    """The master weights of a model: a float32 copy of every 16-bit parameter, which the optimizer steps.

    Float32 (and float64) parameters need no master and stand for themselves.

    Args:
        params: model parameters, as `add_pairs` takes them.

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
        self.add_pairs(params)

    @property
    def pairs(self) -> tuple[MasterPair, ...]:
        """Every pair, in the order in which the parameters came."""
        return tuple(self._pairs.values())

    def add_pairs(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Make a master for each 16-bit parameter that has none yet.

        Args:
            params: model parameters of one or more groups; a parameter listed twice keeps its one master.

        Returns:
            For each parameter in turn what the optimizer should own: its master, or itself if it needs none.

        Sync: none.
        """
        return [self._master(param) for param in tensors_of(params)]

    def of(self, param: Tensor) -> Tensor:
        """The master of a model parameter; the parameter itself where it needs none."""
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
        """Bring the model's gradients, divided by ``scale``, to the masters in float32.

        The model's gradients are left as they are. A master whose model parameter has no gradient loses its own,
        or keeps it with ``accumulate=True``.

        Args:
            scale: > 0, a number or a one-element tensor.
            accumulate: add to the masters' gradients instead of replacing them.
            found_inf: ``(1,)`` float32, to go on with the verdict of an earlier call; None for a fresh one.
            place: returns the tensor that becomes the gradient of a master without one, overwritten.

        Returns:
            ``(1,)`` float32: 1.0 where a model gradient was not finite or its quotient overflowed, else 0.0.

        Raises:
            ValueError: a scale that is not finite and > 0.

        Sync: none.
        """
        by_device: dict[torch.device, list[MasterPair]] = {}
        for pair in self._pairs.values():
            if pair.model.grad is not None:
                by_device.setdefault(pair.model.device, []).append(pair)
            elif not accumulate:
                pair.master.grad = None
        if found_inf is None:
            found_inf = torch.zeros(1, device=next(iter(by_device), None))
        for device, pairs in by_device.items():
            here = found_inf if found_inf.device == device else torch.zeros(1, device=device)
            _bring_grads(pairs, here, inverse_scale(scale, device), place, accumulate=accumulate)
            if here is not found_inf:
                found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device, non_blocking=True)))
        return found_inf

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round every master into its model parameter, after the optimizer has stepped the masters.

        Sync: none.
        """
        if self._pairs:
            torch._foreach_copy_([pair.model for pair in self.pairs], [pair.master for pair in self.pairs])

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Set every master to its model parameter's value, after weights were loaded into the model.

        Sync: none.
        """
        if self._pairs:
            torch._foreach_copy_([pair.master for pair in self.pairs], [pair.model for pair in self.pairs])

    def watch_model(self, params: Iterable[Tensor] | None = None) -> None:
        """Remember the model's weights as they are, for `follow_edits` to tell what was edited since.

        This takes a 16-bit copy of each, until `stop_watching`.

        Args:
            params: model parameters; all that have a master where None.

        Sync: none.
        """
        for pair in self._pairs_of(params):
            self._watched[id(pair.model)] = pair.model.detach().clone()

    @torch.no_grad()
    def follow_edits(self, params: Iterable[Tensor] | None = None) -> None:
        """Let masters take the weights that were edited in the model since `watch_model`, element by element.

            master <- model    where model != watched and round(master) != model

        So a master that was edited itself, or got a value that the model has rounded since, keeps all its bits.

        Args:
            params: as in `watch_model`; those that are not watched are left alone.

        Sync: none.
        """
        for pair in self._pairs_of(params) if self._watched else ():
            watched = self._watched.get(id(pair.model))
            if watched is not None and watched.shape == pair.model.shape == pair.master.shape:
                _take_edits(pair, watched)

    def stop_watching(self) -> None:
        """Forget what `watch_model` has remembered: `follow_edits` has nothing to do until it is called again."""
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


def _take_edits(pair: MasterPair, watched: Tensor) -> None:
    """Bring the edited elements of the model's weight to the master; ``watched`` goes along."""
    model = pair.model.detach()
    master = pair.master.detach().to(model.device)  # model.cuda() moves the model alone
    edited = (model != watched.to(model.device)) & (model != master.to(model.dtype))
    pair.master.copy_(torch.where(edited, model.to(master.dtype), master))
    watched.copy_(model)


def _bring_grads(
    pairs: list[MasterPair],
    found_inf: Tensor,
    inverse: Tensor,
    place: Callable[[Tensor], Tensor],
    *,
    accumulate: bool,
) -> None:
    """One copy for the masters without a gradient to add to, one sum for the rest; sparse ones by themselves."""
    fresh: list[MasterPair] = []
    summed: list[MasterPair] = []
    for pair in pairs:
        adds = accumulate and pair.master.grad is not None
        if pair.model.grad.is_sparse or (adds and pair.master.grad.is_sparse):
            _bring_sparse_grad(pair, found_inf, inverse, adds=adds)
            continue
        (summed if adds else fresh).append(pair)
        if pair.master.grad is None:
            pair.master.grad = place(pair.master)
    for write, chosen in ((unscale_copy, fresh), (unscale_add, summed)):
        if chosen:
            write([pair.model.grad for pair in chosen], [pair.master.grad for pair in chosen], found_inf, inverse)


@torch.no_grad()
def _bring_sparse_grad(pair: MasterPair, found_inf: Tensor, inverse: Tensor, *, adds: bool) -> None:
    """Bring one gradient where it, or what it is added to, is sparse; duplicates are summed in float32."""
    grad = pair.model.grad
    scaled = grad._values() if grad.is_sparse else grad
    numbers = torch.empty_like(scaled, dtype=torch.float32)
    unscale_copy([scaled], [numbers], found_inf, inverse)
    new = numbers
    if grad.is_sparse:
        new = torch.sparse_coo_tensor(grad._indices(), numbers, grad.shape, check_invariants=False).coalesce()
    old = pair.master.grad if adds else None
    if old is not None:
        new = new + old if old.is_sparse else old + new  # torch adds sparse to dense, not dense to sparse
    pair.master.grad = new
