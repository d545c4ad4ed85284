"""The session behind the module functions: one for the program, and one for each further thread that initializes.

    first thread to call initialize     the program's session
    another thread that calls it        a session of its own
    a thread that never does            the program's session

So a worker may train what the main thread has initialized, and two threads that each initialize and train share nothing
but the registered functions.
"""

import threading

from amplab.amp.apex.registered_functions import RegisteredFunctions
from amplab.amp.apex.session import Session

__all__ = ["default_session", "reset_default_session", "session_to_initialize"]

_REGISTERED = RegisteredFunctions()
_PROGRAM = Session(_REGISTERED)
_LOCK = threading.Lock()


class _Owner:
    """The thread that the program's session belongs to, while it lives and has not reset it."""

    thread: threading.Thread | None = None


class _OwnSession(threading.local):
    """The session that this thread has for itself."""

    session: Session | None = None


_OWN = _OwnSession()


def default_session() -> Session:
    """Return the session behind the functions of this module, as seen from the calling thread.

    It is the one that this thread has initialized, else the program's: that of the first thread that did.
    """
    own = _OWN.session
    return _PROGRAM if own is None or not own.initialized else own


def session_to_initialize() -> Session:
    """Return the session that a call of `initialize` in this thread is meant for."""
    if _OWN.session is not None:
        return _OWN.session
    with _LOCK:
        owner = _Owner.thread
        if owner is None or owner is threading.current_thread() or not owner.is_alive():
            _Owner.thread = threading.current_thread()
            return _PROGRAM
    _OWN.session = Session(_REGISTERED)
    return _OWN.session


def reset_default_session() -> None:
    """Undo everything that the calling thread's session has done, and forget the registered functions."""
    session, _OWN.session = default_session(), None
    session.reset()
    with _LOCK:
        if session is _PROGRAM:
            _Owner.thread = None
