"""apex's oldest interface: ``amp.init`` casts ops without models, and optimizers are wrapped.

    handle = amp.init()                                   the calling thread casts, as at O1
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

    optimizer = handle.wrap_optimizer(optimizer)          the same, with a scaler for each loss of this optimizer
    with optimizer.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

The session of `functions` does the work, so ``amp.scale_loss`` and ``amp.reset`` work here, too.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor

from amplab.amp.apex.functions import default_session, session_to_initialize
from amplab.policies import casts_enabled, disable_casts

__all__ = ["AmpHandle", "NoOpHandle", "OptimWrapper", "init"]


class AmpHandle:
    """What ``amp.init`` returns, and ``_amp_state.handle``: the casts of the calling thread."""

    has_cache = True
    verbose = False

    def is_active(self) -> bool:
        """Return whether ops in the calling thread are cast: after `init` or O1, outside `disable_casts`."""
        engine = default_session().engine
        return engine is not None and engine.policy.table is not None and engine.installed and casts_enabled()

    def scale_loss(self, loss: Tensor, optimizer: Any) -> contextlib.AbstractContextManager[Tensor]:
        """Run a backward in the block, as ``amp.scale_loss`` does; yield the loss itself while casts are off.

        Args:
            loss: any shape.
            optimizer: the optimizer, or a list of all optimizers, whose parameters this backward reaches.

        Raises:
            RuntimeError: before `init` and `initialize`.

        Sync: one with a dynamic scale, else none.

        Reference: the handle of apex before ``amp.initialize``; later versions refuse this call.
        """
        session = default_session()
        if session.properties.patch_torch_functions and not self.is_active():
            return contextlib.nullcontext(loss)
        return session.scale_loss(loss, optimizer)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> "OptimWrapper":
        """Return ``optimizer`` with a ``scale_loss`` of its own, and a dynamic scaler for each loss of an iteration."""
        return OptimWrapper(optimizer, self, num_loss)

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return disable_casts()

    def _clear_cache(self) -> None:
        engine = default_session().engine
        if engine is not None:
            engine.clear_cache()

    def _deactivate(self) -> None:
        engine = default_session().engine
        if engine is not None:
            engine.uninstall()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"amp._amp_state.handle.{name} does not exist, since amplab replaces nothing in torch: expected "
            "is_active(), scale_loss(), wrap_optimizer(), _disable_casts(), _clear_cache() or _deactivate(). To undo "
            "amp.initialize call amp.reset()."
        )


class NoOpHandle(AmpHandle):
    """What ``amp.init(enabled=False)`` returns: nothing casts, and losses are not scaled."""

    has_cache = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    def scale_loss(
        self,
        loss: Tensor,
        optimizer: Any,  # noqa: ARG002  as the other handle
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Yield ``loss``."""
        return contextlib.nullcontext(loss)

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass


class OptimWrapper:
    """An optimizer with dynamic loss scalers of its own: one for each loss between two steps, in their order.

    All other attributes are those of the optimizer.

    Args:
        optimizer: any optimizer.
        amp_handle: of `init`; while it is not active, losses are not scaled.
        num_loss: how many backwards there are between two steps.

    Raises:
        TypeError: not an optimizer.
        ValueError: ``num_loss`` < 1.

    Reference: ``apex.amp.opt.OptimWrapper``.
    """

    def __init__(self, optimizer: Any, amp_handle: AmpHandle, num_loss: int = 1) -> None:
        self._optimizer, self._amp_handle, self._num_loss = optimizer, amp_handle, num_loss
        self._losses = 0  # since the last step
        self._scale_loss: Callable[[Tensor, int], contextlib.AbstractContextManager[Tensor]] | None = None
        if not isinstance(amp_handle, NoOpHandle):
            self._scale_loss = default_session().scale_loss_of(optimizer, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Run the backward of the next loss in the block; its gradients are added to those since the last step.

        Raises:
            RuntimeError: more than ``num_loss`` losses since the last step.

        Sync: one.
        """
        if self._scale_loss is None or not self._amp_handle.is_active():
            yield loss
            return
        if self._losses == self._num_loss:
            raise RuntimeError(
                f"OptimWrapper.scale_loss: {self._losses + 1} losses since the last step(): expected "
                f"num_loss={self._num_loss}; pass the number of losses to wrap_optimizer, or call zero_grad() to begin "
                "a step again."
            )
        with self._scale_loss(loss, self._losses) as scaled_loss:
            yield scaled_loss
        self._losses += 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless a gradient overflowed: then print a line, and return None.

        Raises:
            NotImplementedError: a closure while the handle is active.

        Sync: as the optimizer.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure)
        if closure is not None:
            raise NotImplementedError(
                "The `closure` argument is unsupported by the amp optimizer wrapper. Call step() without one."
            )
        self._losses = 0
        returned = self._optimizer.step()
        session = default_session()
        if session.last_step(self._optimizer).first_nonfinite is not None:
            if session.verbosity > 0:
                print("Gradient overflow, skipping update")  # noqa: T201  as apex does
            return None
        return returned

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop the gradients and begin the step again, as after an error between a backward and `step`. Sync: none.

        An overflow since the last step still skips the next one.
        """
        self._losses = 0
        self._optimizer.zero_grad(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_optimizer" not in vars(self):  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,  # noqa: ARG001  casts of weights are always kept, and checked
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Cast ops of the calling thread from now on, as ``initialize(opt_level="O1")`` does, but without models.

    Args:
        enabled: False changes nothing and returns a handle that does nothing.
        loss_scale: "dynamic", or a number > 0, for ``scale_loss`` of the handle.
        enable_caching: ignored.
        verbose: print each cast.
        allow_banned: run ``F.binary_cross_entropy`` on half in float32 instead of refusing it, also after a later
            `initialize`.

    Returns:
        The handle.

    Raises:
        ValueError: a ``loss_scale`` out of its range.

    Reference: ``apex.amp.init``.

    >>> import torch
    >>> from amplab import amp
    >>> handle = amp.init()
    >>> (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float16
    >>> amp.reset()
    """
    if not enabled:
        return NoOpHandle()
    session = session_to_initialize()
    if allow_banned:
        session.registered.allow_banned()
    handle, before = AmpHandle(), session._settings()
    try:
        session.start_casting(loss_scale, verbose=verbose)
        session.install()
        return handle
    except BaseException:
        session._take_back(before, [], [])
        raise
