"""What sessions have noted of an iteration, such as that the next step is skipped; kept while a tool tries a step."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

__all__ = ["iterations_kept", "keep_of", "use"]


class _Noted(NamedTuple):
    owner: weakref.ref[Any]  # without a callback, in which Python would discard a Ctrl-C
    names: tuple[str, ...]
    outside: dict[str, Any]
    user: int


_NOTED: dict[int, _Noted] = {}  # by the id of the owner; those of dead owners are dropped when another one comes
_THREADS: dict[int, int] = {}  # by the id of a user, which a new user takes over


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
    for number, noted in list(_NOTED.items()):
        if noted.owner() is None:
            _NOTED.pop(number, None)
            _THREADS.pop(number, None)
    user = owner if user is None else user
    _NOTED[id(owner)] = _Noted(weakref.ref(owner), (*names, *outside), outside, id(user))
    use(user)


def use(user: object) -> None:
    """Note that this thread is in an iteration of ``user``. Sync: none."""
    _THREADS[id(user)] = get_ident()


@contextmanager
def iterations_kept() -> Iterator[None]:
    """Run a block outside of this thread's iterations, and restore what all sessions have noted of them.

    Gradients of a model that are set aside look like cleared ones, for whose overflow no step is skipped. Those of
    tensors outside of a model are set aside here. Sync: none.
    """
    owners = [
        (owner, noted, {name: _copied(getattr(owner, name)) for name in noted.names})
        for noted in list(_NOTED.values())
        if (owner := noted.owner()) is not None and _is_own(noted)
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
    return _THREADS.get(noted.user) == get_ident()


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value
