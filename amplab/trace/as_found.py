"""`leaves_as_found`: a tool whose call is interrupted leaves this thread, and the hooks of the model, as it found them.

KeyboardInterrupt can come where the code at the end of a `with` statement has not begun: at the beginning of an
`__exit__`, in contextlib, whose generator then stays suspended while the traceback exists, and in torch's own blocks
such as `torch.no_grad`. It can also come between the registration of a hook and the line that stores its handle. So the
state is read once where the call of a tool begins, and restored where this call ends by an exception. What a tool
changes besides is undone by the functions of an `Undo`.
"""

import contextlib
import functools
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from operator import is_
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch.optim import Optimizer
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from amplab.amp.apex.before_initialize import hooks_of
from amplab.policies.casting.function_modes import OwnMode, function_modes, set_function_modes
from amplab.policies.casting.plan import torch_nesting
from amplab.policies.casting.thread_scopes import AUTOCAST_FLAG, THREAD
from amplab.policies.signals import DeferredSignals
from amplab.trace.dispatch_mode import DispatchMode, drop_ended

__all__ = ["Undo", "end_blocks_of", "leaves_as_found", "rebind", "remove_hook", "remove_hooks_since"]

P = ParamSpec("P")
R = TypeVar("R")


class Undo:
    """Functions that undo what a `with` block changes. They run at its end, the last one first.

        with Undo() as undo:
            undo.add(restore)
            change()

    After an error they run without the dispatch modes of the block, which an interrupt may have left on.
    Add a function before the change, since an interrupt may follow it at once. A function may run twice: what an
    interrupt leaves undone runs again, at the latest where the call of the tool around the block ends.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[], object]] = []
        self._handled = sys.exception()
        self._dispatch = _Dispatch()
        self._others = _THREAD.undos  # another thread may end this

    def __enter__(self) -> "Undo":
        """Return itself."""
        return self

    def add(self, function: Callable[[], object]) -> None:
        """Call `function` at the end."""
        self._functions.append(function)
        if self not in self._others:
            self._others.append(self)

    def register(
        self, register: Callable[[Callable[..., Any]], object], hook: Callable[..., Any], hooks: dict[int, Any]
    ) -> None:
        """Register `hook` with a function of torch that keeps it in `hooks`, and remove it at the end."""
        self.add(functools.partial(remove_hook, hook, hooks))
        register(hook)

    def enter(self, mode: DispatchMode) -> None:
        """Put `mode` on the stack of this thread, and take it off at the end."""
        self.add(mode.__exit__)
        mode.__enter__()

    def enter_block(self, block: Callable[[], "contextlib._GeneratorContextManager[Any]"]) -> Any:
        """Enter a block that `contextlib.contextmanager` has made, until the end."""
        entered = block()
        self.add(entered.gen.close)
        return entered.__enter__()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Undo everything; does nothing if that is done already."""
        signals = DeferredSignals()
        try:
            if error is not None and not isinstance(error, GeneratorExit):  # which comes at any time
                end_blocks_of(error, self._handled)
                self._dispatch.restore()
                self._run_inner()
            self.run()
        finally:
            signals.end()

    def end(self) -> None:
        """As the end of the `with` block, for what begins and ends in different calls."""
        self.__exit__(None, None, None)

    def _run_inner(self) -> None:
        """Undo what blocks inside this one have left: an interrupt came where their own end began."""
        if self in self._others:
            for undo in reversed(self._others[self._others.index(self) + 1 :]):
                undo.run()

    def run(self) -> None:
        """Undo everything. An exception of one function propagates after the others have run."""
        failure = None
        while self._functions:
            try:
                self._functions[-1]()
            except Exception as error:  # noqa: BLE001  raised below
                failure = error
            self._functions.pop()
        if self in self._others:
            self._others.remove(self)
        if failure is not None:
            raise failure


class _Thread(threading.local):
    """The `Undo`s of a thread that have functions to call, in the order in which they got them."""

    def __init__(self) -> None:
        self.undos: list[Undo] = []


_THREAD = _Thread()


def remove_hook(hook: Callable[..., Any], hooks: dict[int, Any]) -> None:
    """Remove `hook` from the hooks that torch keeps by number, for which an interrupt may have lost the handle."""
    for number in [number for number, each in list(hooks.items()) if each is hook]:  # other threads change it, too
        del hooks[number]


def remove_hooks_since(owner: nn.Module | torch.Tensor | Optimizer, number: int) -> None:
    """Remove the hooks of `owner` from `number` on; torch numbers all hooks of a process in one sequence."""
    for hooks in hooks_of(owner):
        for each in [each for each in list(hooks) if isinstance(each, int) and each >= number]:
            del hooks[each]


def leaves_as_found(tool: Callable[P, R]) -> Callable[P, R]:
    """Decorate a tool: after an exception, an interrupt included, its thread is as it was when the call began.

    Grad mode and the settings of autocast are restored after every call. After an exception so are modes, hooks for
    saved tensors, the scopes of engines, and the hooks of modules, of their parameters and of optimizers among the
    arguments; then what the `Undo`s of the call undo.

    Sync: none.

    >>> @leaves_as_found
    ... def interrupted():
    ...     torch.set_grad_enabled(False)
    ...     raise KeyboardInterrupt
    >>> try:
    ...     interrupted()
    ... except KeyboardInterrupt:
    ...     print(torch.is_grad_enabled())
    True
    """

    @functools.wraps(tool)
    def undone(*args: P.args, **kwargs: P.kwargs) -> R:
        signals = DeferredSignals()
        try:
            signals.admit()
            found = _Found((*args, *kwargs.values()))
            try:
                result = tool(*args, **kwargs)
            except BaseException as error:
                signals.waits = True
                found.restore(error)
                raise
            signals.waits = True
            found.restore_settings()
            return result
        finally:
            signals.waits = True
            signals.end()

    return undone


_DEVICE_TYPES = "cpu", "cuda", "mps", "xpu", AUTOCAST_FLAG

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch._C._get_torch_function_state, torch._C._set_torch_function_state),  # type: ignore[attr-defined]
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        (functools.partial(read, device), functools.partial(write, device))
        for device in _DEVICE_TYPES
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
)
"""Functions that read a setting of this thread, and set it."""


class _Found:
    """What a thread has when a tool begins.

    Args:
        given: the arguments of the tool, among them the owners of hooks.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = given
        self._handled = sys.exception()
        self._undos = tuple(_THREAD.undos)
        self._next_hook = RemovableHandle.next_id
        THREAD.own.drop_ended()
        self._scopes, self._torch_regions = tuple(THREAD.own.scopes), len(THREAD.own.torch_regions)
        self._function_modes = function_modes()
        self._dispatch = _Dispatch()
        self._saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._nesting = int(torch_nesting())
        self._settings = [read() for read, _ in _SETTINGS]

    def restore(self, error: BaseException | None) -> None:
        """Restore it after `error`; a second call finishes what an interrupt has left."""
        end_blocks_of(error, self._handled)
        self._restore_torch()
        thread = THREAD.own
        for scope in [scope for scope in reversed(thread.scopes) if scope not in self._scopes]:
            scope.leave()
        del thread.torch_regions[self._torch_regions :]
        with contextlib.ExitStack() as last_first:  # each is called, also after an exception of another one
            last_first.callback(self._remove_hooks)
            last_first.callback(self._restore_function_modes)
            for undo in _THREAD.undos:
                if undo not in self._undos:
                    last_first.callback(undo.run)

    def _restore_function_modes(self) -> None:
        modes = [mode for mode in self._function_modes if not (isinstance(mode, OwnMode) and mode.withdrawn)]
        if function_modes() != modes:
            set_function_modes(modes)

    def _restore_torch(self) -> None:
        self._dispatch.restore()
        while torch._C._autograd._top_saved_tensors_default_hooks(True) not in (None, self._saved_tensors):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if int(torch_nesting()) > self._nesting:
            torch.clear_autocast_cache()
            while int(torch_nesting()) > self._nesting:
                torch.autocast_decrement_nesting()
        self.restore_settings()

    def restore_settings(self) -> None:
        """Restore what code of the user, such as a forward that a tool has run, may have set."""
        for (read, write), before in zip(_SETTINGS, self._settings, strict=True):
            if read() != before:
                write(before)

    def _remove_hooks(self) -> None:
        """Remove the hooks that were registered since."""
        for owner in _owners_of_hooks(self._given):
            remove_hooks_since(owner, self._next_hook)


def end_blocks_of(error: BaseException | None, handled: BaseException | None) -> None:
    """End the blocks whose own code was stopped by `error`, or by what came before it since `handled` was raised.

    Else a block that is suspended in contextlib, and one of `torch.inference_mode`, end when `error` is freed, and
    change the thread then; the latter restores all dispatch keys. One of `warnings.catch_warnings` does not end at all.
    """
    seen: list[BaseException] = []  # the contexts of errors may make a ring
    while error is not None and error is not handled and all(error is not each for each in seen):
        seen.append(error)
        for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
            with contextlib.suppress(Exception):  # of code that the tool has called, or of a block that has not begun
                _end_block(frame)
        error = error.__context__


def _end_block(frame: FrameType) -> None:
    """End the block whose own code `frame` runs. Of other frames no variable is read: `f_locals` would keep it."""
    code = frame.f_code
    if code.co_filename == contextlib.__file__:
        generator = getattr(frame.f_locals.get("self"), "gen", None)
        if generator is not None:
            generator.close()
    elif code.co_name in ("__enter__", "__exit__") and isinstance(block := frame.f_locals.get("self"), _ENDED_LATE):
        block.__exit__(None, None, None)


_ENDED_LATE = torch.inference_mode, warnings.catch_warnings


class _Dispatch:
    """The dispatch modes of this thread, what torch stores about them, and the keys that the thread sets."""

    def __init__(self) -> None:
        drop_ended()
        self._thread = threading.get_ident()
        self._modes = _get_current_dispatch_mode_stack()
        self._flags = _dispatch_flags()
        self._keys = _dispatch_keys()

    def restore(self) -> None:
        """Restore them, in their own thread. The keys of dispatch modes without a mode would let every op fail."""
        if threading.get_ident() != self._thread:
            return
        modes = [mode for mode in self._modes if not _has_ended(mode)]  # as that of a look that the tool has ended
        _restore_dispatch_modes(modes)
        flags = self._flags if len(modes) == len(self._modes) else _flags_of(modes)
        if _dispatch_flags() != flags:
            vars(_python_dispatch).update(flags)
            set_is_in_mode_without_ignore_compile_internals(
                _python_dispatch._is_in_any_mode_without_ignore_compile_internals
            )
        now, without_modes = _dispatch_keys(), len(modes) < len(self._modes) and not modes
        if now != self._keys:
            for key in DispatchKey.__members__.values():
                for place, write in enumerate(_SET_KEY):
                    is_wanted = self._keys[place].has(key) and not (without_modes and key in _KEYS_OF_MODES)
                    if now[place].has(key) != is_wanted:
                        write(key, is_wanted)


_SET_KEY = torch._C._dispatch_tls_set_dispatch_key_included, torch._C._dispatch_tls_set_dispatch_key_excluded


_KEYS_OF_MODES = DispatchKey.Python, DispatchKey.PythonTLSSnapshot


def _has_ended(mode: Any) -> bool:
    return isinstance(mode, DispatchMode) and not mode.is_entered


def _flags_of(modes: list[Any]) -> dict[str, bool]:
    """What torch stores of the modes besides the stack, if there are these."""
    return {
        "_is_in_torch_dispatch_mode": bool(modes),
        "_is_in_non_infra_torch_dispatch_mode": any(not mode.is_infra_mode() for mode in modes),
        "_is_in_any_mode_without_ignore_compile_internals": any(not mode.ignore_compile_internals() for mode in modes),
    }


def _restore_dispatch_modes(modes: list[Any]) -> None:
    now = _get_current_dispatch_mode_stack()
    same = sum(1 for _ in takewhile(lambda pair: is_(*pair), zip(now, modes, strict=False)))
    for mode in reversed(now[same:]):
        _pop_mode(getattr(mode, "_mode_key", None))
    for mode in modes[same:]:
        _push_mode(mode)


def _dispatch_flags() -> dict[str, bool]:
    """What torch stores of the modes besides the stack: whether there is one of some kind."""
    return {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


def _dispatch_keys() -> tuple[DispatchKeySet, DispatchKeySet]:
    """The dispatch keys that this thread adds to those of the tensors of each op, and those that it removes."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _owners_of_hooks(values: Iterable[Any]) -> Iterator[nn.Module | torch.Tensor | Optimizer]:
    """Yield the modules, parameters and optimizers among values, also in lists and dicts."""
    for value in values:
        if isinstance(value, nn.Module):
            yield from value.modules()
            yield from value.parameters()
        elif isinstance(value, Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from _owners_of_hooks(value)
        elif isinstance(value, Mapping):
            yield from _owners_of_hooks(value.values())


def rebind(owned: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Let a dict hold what it held before, in the same order."""
    for name in owned.keys() - before.keys():
        del owned[name]
    owned.update(before)
    if any(key is not other for key, other in zip(owned, before, strict=True)):  # as of the parts of a Sequential
        for name in before:
            owned[name] = owned.pop(name)
