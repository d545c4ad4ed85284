"""The functions of ``from apex import amp``. They use one default session for each thread that initializes.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()

At O1 the thread that calls `initialize` casts until `reset`; other threads cast inside the forward of initialized
models. Each function calls the `Session` method of the same name, which documents it. Use a `Session` for each
experiment to share nothing.

    first thread to call initialize      the session of the program
    another thread that calls it         a session of its own
    a thread that never calls it         the session of the program

So a worker thread may train what the main thread has initialized. Two threads that each call `initialize` share only
the registered functions.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from amplab.amp.apex.initialize_arguments import Permissions
from amplab.amp.apex.registered_functions import RegisteredFunctions
from amplab.amp.apex.session import Session
from amplab.amp.arguments import as_list
from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.policies import CastPolicy
from amplab.policies.signals import DeferredSignals

__all__ = [
    "clip_grad_norm_",
    "combined_grads",
    "default_session",
    "initialize",
    "last_step",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "memory",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
    "reset_default_session",
    "scale_loss",
    "scaled_grad",
    "session_to_initialize",
    "state_dict",
    "subscribe",
]


def initialize(models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Prepare models and optimizers for an optimization level; at O1 also start casting in the calling thread.

    Arguments, results and exceptions are those of `Session.initialize`. At O1 the calling thread casts until `reset`
    or until another level is chosen.
    """
    session = session_to_initialize()
    before = session._settings()
    try:
        prepared = session.initialize(models, optimizers, *args, **kwargs)
        session.install()
        return prepared
    except BaseException as error:
        if session._settings() != before:  # an interrupt in `install`, or just before it
            session._take_back(before, as_list(models), as_list(optimizers))
        if isinstance(error, TypeError):
            _refuse_misfit("initialize", Session.initialize, session, models, optimizers, *args, **kwargs)
        raise


def reset() -> None:
    """Undo `initialize` in the calling thread, and clear the registered functions; see `Session.reset`."""
    reset_default_session()


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in half at O1; this overrides the built-in lists. Call it before `initialize`.

    A function of torch means the op: ``torch.sigmoid`` includes ``Tensor.sigmoid`` and ``F.sigmoid``. For any
    other function the attribute of ``module`` is replaced from `initialize` to `reset` by one that casts its arguments
    first. Names imported from the module before that are not replaced: use `half_function` on those.

    Args:
        module: a module, or a class.
        name: of a function in it.

    Raises:
        ValueError: no such function, or a function of torch that function modes cannot intercept.
        TypeError: not a function.

    Reference: ``apex.amp.register_half_function``.
    """
    default_session().register_function(CastPolicy.LOWER_PRECISION_FP, module, name)


def register_float_function(module: Any, name: str) -> None:
    """Run ``module.name`` in float32 at O1; otherwise as `register_half_function`.

    At O2 and O3 it has no effect, as in apex, and `initialize` warns: pass a policy with ``op_rules`` there.
    """
    default_session().register_function(CastPolicy.FP32, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Run ``module.name`` in the widest dtype of its arguments at O1; otherwise as `register_float_function`."""
    default_session().register_function(CastPolicy.PROMOTE, module, name)


def _of_the_default_session(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``method`` on the calling thread's session."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        session = default_session()
        try:
            return method(session, *args, **kwargs)
        except TypeError:
            _refuse_misfit(method.__name__, method, session, *args, **kwargs)
            raise

    function.__signature__ = _without_self(method)  # type: ignore[attr-defined]
    return function


def _refuse_misfit(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise TypeError if ``method`` does not accept these arguments, and suggest the argument that was meant."""
    signature = inspect.signature(method)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = next((each for each in kwargs if each not in signature.parameters), "")
        close = get_close_matches(unknown, signature.parameters, n=1, cutoff=0.7)
        meant = f"did you mean {close[0]}?" if close else f"see help(amp.{name}) for what it takes."
        raise TypeError(f"amp.{name}: {error}; {meant}") from None


def _without_self(method: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


initialize.__signature__ = _without_self(Session.initialize)  # type: ignore[attr-defined]

clip_grad_norm_ = _of_the_default_session(Session.clip_grad_norm_)
combined_grads = _of_the_default_session(Session.combined_grads)
last_step = _of_the_default_session(Session.last_step)
load_state_dict = _of_the_default_session(Session.load_state_dict)
loss_scale = _of_the_default_session(Session.loss_scale)
master_params = _of_the_default_session(Session.master_params)
memory = _of_the_default_session(Session.memory)
scale_loss = _of_the_default_session(Session.scale_loss)
scaled_grad = _of_the_default_session(Session.scaled_grad)
state_dict = _of_the_default_session(Session.state_dict)
subscribe = _of_the_default_session(Session.subscribe)


_REGISTERED, _PERMISSIONS = RegisteredFunctions(), Permissions()
_PROGRAM = Session(_REGISTERED, _PERMISSIONS)
_LOCK = threading.RLock()  # a signal's handler may reset while its thread has it
renew_lock_in_forks(sys.modules[__name__], "_LOCK")


class _Owner:
    """The thread that initialized the program's session, while it is alive and has not reset it."""

    thread: threading.Thread | None = None


class _OwnSession(threading.local):
    """The session of this thread alone."""

    session: Session | None = None


_OWN = _OwnSession()


def default_session() -> Session:
    """Return the session that the functions of this module use in the calling thread.

    It is the one that this thread has initialized, else the session of the program.
    """
    own = _OWN.session
    return _PROGRAM if own is None or not own.initialized else own


def session_to_initialize() -> Session:
    """Return the session that `initialize` uses in this thread."""
    if _OWN.session is not None:
        return _OWN.session
    with _LOCK:
        owner = _Owner.thread
        if owner is None or owner is threading.current_thread() or not owner.is_alive():
            _Owner.thread = threading.current_thread()
            return _PROGRAM
    _OWN.session = Session(_REGISTERED, _PERMISSIONS)
    return _OWN.session


def reset_default_session() -> None:
    """Reset the session of the calling thread, and clear the registered functions."""
    session = default_session()
    with DeferredSignals():
        session.reset()
        _OWN.session = None  # last, so that the next call finishes one that failed
        with _LOCK:
            if session is _PROGRAM:
                _Owner.thread = None
