"""What sessions have noted of an iteration, such as that the next step is skipped; kept while a tool tries a step."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["iterations_kept", "keep_of"]

_NOTED: weakref.WeakKeyDictionary[object, tuple[tuple[str, ...], dict[str, Any]]] = weakref.WeakKeyDictionary()


def keep_of(owner: object, *names: str, **outside: Any) -> None:
    """Let `iterations_kept` restore attributes of ``owner``, which is held weakly.

    Its method ``pending_gradients``, if it has one, returns tensors outside of a model whose gradients wait for a step.

    Args:
        owner: has the attributes.
        names: of attributes that are restored.
        outside: others, and what each is outside of an iteration, which is what it is in the block.
    """
    _NOTED[owner] = (*names, *outside), outside


@contextmanager
def iterations_kept() -> Iterator[None]:
    """Run a block outside of the iteration of all sessions, and restore what they have noted of it.

    Gradients of a model that are set aside look like cleared ones, for whose overflow no step is skipped. Those of
    tensors outside of a model are set aside here. Sync: none.
    """
    owners = [(each, {name: _copied(getattr(each, name)) for name in names}, out) for each, (names, out) in _listed()]
    waiting = [tensor for each, _, _ in owners for tensor in getattr(each, "pending_gradients", list)()]
    grads = [(tensor, tensor.grad) for tensor in waiting]
    try:
        for tensor in waiting:
            tensor.grad = None
        for each, _, outside in owners:
            vars(each).update(outside)
        yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        for each, noted, _ in owners:
            vars(each).update(noted)


def _listed() -> list[tuple[object, tuple[tuple[str, ...], dict[str, Any]]]]:
    return list(_NOTED.items())


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value
