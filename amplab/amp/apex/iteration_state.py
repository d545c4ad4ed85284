"""What sessions have noted of an iteration, such as that the next step is skipped; kept while a tool tries a step."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

__all__ = ["iterations_kept", "keep_of", "use"]


class _Noted(NamedTuple):
    names: tuple[str, ...]
    outside: dict[str, Any]
    user: weakref.ref[Any]


_NOTED: weakref.WeakKeyDictionary[object, _Noted] = weakref.WeakKeyDictionary()
_THREADS: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def keep_of(owner: object, *names: str, user: object = None, **outside: Any) -> None:
    """Let `iterations_kept` restore attributes of ``owner``, which is held weakly.

    Its method ``pending_gradients``, if it has one, returns tensors outside of a model whose gradients wait for a step;
    its ``buffers`` are memory of gradients, also of those of a model.

    Args:
        owner: has the attributes.
        names: of attributes that are restored.
        user: what `use` is called with; None for ``owner``.
        outside: others, and what each is outside of an iteration, which is what it is in the block.
    """
    user = owner if user is None else user
    _NOTED[owner] = _Noted((*names, *outside), outside, weakref.ref(user))
    use(user)


def use(user: object) -> None:
    """Note that this thread is in an iteration of ``user``. Sync: none."""
    _THREADS[user] = get_ident()


@contextmanager
def iterations_kept() -> Iterator[None]:
    """Run a block outside of this thread's iterations, and restore what all sessions have noted of them.

    Gradients of a model that are set aside look like cleared ones, for whose overflow no step is skipped. Those of
    tensors outside of a model are set aside here. Sync: none.
    """
    owners = [
        (owner, noted, {name: _copied(getattr(owner, name)) for name in noted.names})
        for reference in _NOTED.keyrefs()  # a list: other threads make sessions meanwhile
        if (owner := reference()) is not None and _is_own(noted := _NOTED[owner])
    ]
    waiting = [tensor for owner, _, _ in owners for tensor in getattr(owner, "pending_gradients", list)()]
    grads = [(tensor, tensor.grad) for tensor in waiting]
    buffers = [(each, each.clone()) for owner, _, _ in owners for each in getattr(owner, "buffers", ())]
    try:
        for tensor in waiting:
            tensor.grad = None
        for owner, noted, _ in owners:
            vars(owner).update(noted.outside)
        yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        for buffer, values in buffers:
            buffer.copy_(values)
        for owner, noted, values in owners:
            if _is_own(noted):  # not if another thread has begun with it
                vars(owner).update(values)


def _is_own(noted: _Noted) -> bool:
    user = noted.user()
    return user is not None and _THREADS.get(user) == get_ident()


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value
