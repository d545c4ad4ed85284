"""A process that is forked while another thread has a lock of amplab, or builds kernels, waits for neither."""

import gc
import os
import signal
import sys
import threading
import weakref

import pytest

from amplab.amp.apex import functions, registered_functions
from amplab.kernels import dispatch_casts
from amplab.kernels.builder import BuildReport, KernelLibrary
from amplab.kernels.builder import library as build
from amplab.kernels.fork_renewal import renew_in_forks, renew_lock_in_forks
from amplab.lab import checkpoints, drawing_turns
from amplab.lab.kept_runs import KeptRuns
from amplab.trace import engines, optimizer_hooks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
SECONDS = 20  # after which a child that waits is killed


def in_a_fork(work):
    """Return what `work` returns in a forked process: a small number, or -14 if it waits."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Elsewhere:
    """A thread that is inside `work` for the length of the block."""

    def __init__(self, work):
        self.reached, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=work, args=(self.stay,), daemon=True)

    def stay(self):
        self.reached.set()
        self._leave.wait()

    def __enter__(self):
        self._thread.start()
        assert self.reached.wait(SECONDS)

    def __exit__(self, *_):
        self._leave.set()
        self._thread.join()


def kept_runs():
    return KeptRuns(lambda *_: None)


LOCKS = {
    "a kernel library": lambda: (KernelLibrary(), "_lock"),
    "the casts in the dispatcher": lambda: (dispatch_casts.DispatchCasts, "_lock"),
    "hooks of optimizers": lambda: (optimizer_hooks, "_lock"),
    "the stance of compiled functions": lambda: (engines._EAGER, "_lock"),
    "the owner of the session": lambda: (functions, "_LOCK"),
    "registered functions": lambda: (registered_functions._REPLACEMENTS, "_lock"),
    "random numbers": lambda: (drawing_turns, "_turn"),
    "checkpoints": lambda: (checkpoints, "_guard"),
    "the experiment of a kernel": lambda: (sys.modules["amplab.lab.open"]._kernel, "_lock"),
    "kept runs": lambda: (kept_runs(), "_lock"),
}


@pytest.mark.parametrize("made", LOCKS.values(), ids=LOCKS)
def test_a_lock_of_another_thread_is_free_in_a_forked_process(made):
    owner, name = made()

    def hold(stay):
        with getattr(owner, name):
            stay()

    def take():
        with getattr(owner, name):
            return 7

    with Elsewhere(hold):
        assert in_a_fork(take) == 7


def test_the_thread_that_forks_leaves_its_block_in_both_processes():
    owner = kept_runs()
    renew_lock_in_forks(owner, "_lock")
    before = owner._lock

    def leave():
        return 7 if owner._lock is not before and owner._lock.acquire(blocking=False) else 1

    with before:
        pid = in_a_fork(leave)
    assert pid == 7
    assert owner._lock is before


def test_an_owner_that_is_gone_is_forgotten():
    owner = kept_runs()
    reference = weakref.ref(owner)
    renew_in_forks(owner, lambda _: os._exit(1))
    del owner
    gc.collect()
    assert reference() is None
    assert in_a_fork(lambda: 7) == 7


@pytest.fixture
def library(monkeypatch):
    """Kernels whose build takes as long as a test says, and leads to nothing."""
    made = KernelLibrary()
    monkeypatch.setattr(build, "_load_cached", lambda recipe: None)
    monkeypatch.setattr(build, "obstacle", lambda: None)
    monkeypatch.delenv("AMPLAB_KERNELS", raising=False)
    return made


FAILED = BuildReport("failed", "kernels", cause="a test", remedy="none")


def test_a_process_forked_while_another_thread_waits_for_a_build_begins_its_own(library, monkeypatch):
    monkeypatch.setenv("AMPLAB_KERNELS", "require")

    def attend(stay):
        monkeypatch.setattr(build, "_build", lambda recipe: stay() or FAILED)
        with pytest.raises(RuntimeError, match="a test"):
            library.attend()

    def begin():
        monkeypatch.setattr(build, "_build", lambda recipe: FAILED)
        with pytest.raises(RuntimeError, match="a test"):
            library.attend()
        return 7

    with Elsewhere(attend):
        assert in_a_fork(begin) == 7


def test_a_process_forked_while_kernels_are_built_in_the_background_has_them_too(library, monkeypatch):
    class Builder:
        """One that ends when it is told to."""

        def __init__(self, recipe, *, own_session):
            self.end = threading.Event()
            builders.append(self)

        def report(self):
            self.end.wait()
            return BuildReport("built", "kernels")

    def settle():
        assert library.needs_attention
        library.attend()
        builders[-1].end.set()
        assert library.ensure(wait=True).status == "built"
        return len(builders)

    builders = []
    monkeypatch.setattr(build, "_Builder", Builder)
    library.attend()
    assert library.report.status == "building"
    assert in_a_fork(settle) == 2
    builders[0].end.set()
    assert library.ensure(wait=True).status == "built"
