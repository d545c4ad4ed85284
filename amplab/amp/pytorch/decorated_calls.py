"""Run functions of every kind inside a context: plain ones, generators, coroutines and asynchronous generators.

The bodies of generators and coroutines run in slices. Each slice runs inside the context, which is left between
slices, so that the caller does not see it. (A decorator that wraps only the call would cover the creation of the
generator, not its body.)
"""

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["run_inside"]

Context = Callable[[], AbstractContextManager[Any]]


def run_inside(context: Context, func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``func`` with its body inside ``context()``; name, docstring and signature are kept.

    Args:
        context: creates a context manager, one for each call or slice.
        func: a callable of any kind. `inspect` reports the same kind for the result, such as a generator function.

    >>> import contextlib
    >>> @functools.partial(run_inside, lambda: contextlib.nullcontext())
    ... def count():
    ...     yield from range(3)
    >>> list(count())
    [0, 1, 2]
    """
    if inspect.isasyncgenfunction(func):
        return _async_generator(context, func)
    if inspect.iscoroutinefunction(func):
        return _coroutine(context, func)
    if inspect.isgeneratorfunction(func):
        return _generator(context, func)

    @functools.wraps(func)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return func(*args, **kwargs)

    return inside


def _generator(context: Context, func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def inside(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _sliced(context, func(*args, **kwargs)))

    return inside


def _coroutine(context: Context, func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def inside(*args: Any, **kwargs: Any) -> Any:
        return await _Sliced(context, func(*args, **kwargs))

    return inside


def _async_generator(context: Context, func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def inside(*args: Any, **kwargs: Any) -> Any:
        generator = func(*args, **kwargs)
        step = generator.asend(None)
        try:
            while True:
                try:
                    value = await _Sliced(context, step)
                except StopAsyncIteration:
                    return
                try:
                    step = generator.asend((yield value))
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001  the generator handles it
                    step = generator.athrow(error)
        finally:
            await _Sliced(context, generator.aclose())

    return inside


class _Sliced:
    """An awaitable, each slice of which runs inside a context."""

    def __init__(self, context: Context, awaitable: Any) -> None:
        self._context = context
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        return _sliced(self._context, self._awaitable.__await__())


def _sliced(context: Context, generator: Any) -> Generator[Any, Any, Any]:
    """Yield from ``generator``, with each slice inside ``context()``."""
    resume: Callable[[], Any] = functools.partial(next, generator)
    while True:
        try:
            with context():
                value = resume()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield value
        except GeneratorExit:
            with context():
                generator.close()
            raise
        except BaseException as error:  # noqa: BLE001  the generator handles it
            resume = functools.partial(generator.throw, error)
        else:
            resume = functools.partial(next, generator) if sent is None else functools.partial(generator.send, sent)
