"""What sessions have noted of an iteration, such as that the next step is skipped; kept while a tool tries a step."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["iterations_kept", "keep_of"]

_NAMES: weakref.WeakKeyDictionary[object, tuple[str, ...]] = weakref.WeakKeyDictionary()


def keep_of(owner: object, *names: str) -> None:
    """Let `iterations_kept` restore these attributes of ``owner``, which is held weakly.

    Its method ``pending_gradients``, if it has one, returns tensors outside of a model whose gradients wait for a step.
    """
    _NAMES[owner] = names


@contextmanager
def iterations_kept() -> Iterator[None]:
    """Restore what all sessions have noted, and set gradients aside that wait for a step outside of a model.

    Gradients of a model that are set aside look like cleared ones, for whose overflow no step is skipped. Sync: none.
    """
    noted = [(each, {name: getattr(each, name) for name in names}) for each, names in list(_NAMES.items())]
    waiting = [tensor for each, _ in noted for tensor in getattr(each, "pending_gradients", list)()]
    grads = [(tensor, tensor.grad) for tensor in waiting]
    try:
        for tensor in waiting:
            tensor.grad = None
        yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        for each, values in noted:
            vars(each).update(values)
