"""Configuration of all tests: one compute thread, fast tests first, a time limit per test, the built kernels."""

import os

# Set before the first import of torch. The kernels of the notebooks and of the browser tests inherit it, so that two
# cores are enough for the whole run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import gc
import importlib.util
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

SECONDS_PER_TEST = 300


def pytest_configure(config: pytest.Config) -> None:
    """Keep run logs out of the user's folder; run hypothesis without a deadline, and deterministically in CI."""
    if "AMPLAB_RUNS" not in os.environ:
        runs = tempfile.TemporaryDirectory(prefix="amplab-runs-")
        config.add_cleanup(runs.cleanup)
        os.environ["AMPLAB_RUNS"] = runs.name
    os.environ.pop("AMPLAB_PROGRESS", None)  # set in a terminal of the lab; the tests solve no exercises for a person
    # A shell starts background processes with SIGINT ignored, and every process of the tests would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "amplab",
        deadline=None,
        derandomize=in_ci(),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("amplab")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled_yet() -> None:
    """A watch looks at no ops in a process that has compiled something, such as the tests of another file."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def stage(item: pytest.Item) -> int:
    """Return 0 for unit tests and doctests, 1 for notebook cells, 2 for tests that drive a browser."""
    if item.get_closest_marker("browser") or "tests/browser/" in item.nodeid:
        return 2
    return 1 if item.path.suffix == ".ipynb" else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by stage, fast tests first; the order within a stage is kept. Leave out long tests without ``-m long``."""
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    items.sort(key=stage)


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later collection of garbage: some millions of objects, a second each."""
    gc.collect()
    gc.freeze()


@contextmanager
def time_limit(what: str, seconds: float = SECONDS_PER_TEST) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `seconds`, on systems with interval timers."""
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} ran longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the time of the fixtures."""
    with time_limit(f"the set-up of {item.nodeid}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the time of the test."""
    with time_limit(item.nodeid):
        return (yield)


@pytest.fixture(autouse=True)
def nothing_stays_on():
    """Fail the test that leaves a mode or a hook on, and take it off: it would fail others."""
    yield
    if "torch.optim.optimizer" in sys.modules:
        left = _taken_off()
        assert left == {}


def _taken_off():
    """Take off what is on, and return it by name."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

    optimizers = sys.modules["torch.optim.optimizer"]
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    own = sys.modules.get("amplab.trace.optimizer_hooks")
    observes = own and (own._OBSERVERS.before or own._OBSERVERS.after)
    # Where there are other threads these two stay, and do nothing.
    inert = (own.before_step, own.after_step) if own and not observes else ()
    found = {
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "hooks of all optimizers": [hook for each in hooks for hook in each.values() if hook not in inert],
        "grad mode": [] if torch.is_grad_enabled() else ["off"],
    }
    while _get_current_dispatch_mode_stack():
        _pop_mode()
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for each in hooks:
        each.clear()
    torch.set_grad_enabled(True)
    return {name: on for name, on in found.items() if on}


def in_ci():
    """Return whether the tests run in CI: CI=1, CI=true."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


@pytest.fixture(scope="session")
def built():
    """The kernels, built and loaded in this process.

    Skips if AMPLAB_KERNELS=reference or a build tool is missing. In CI, a missing tool fails instead of skipping.
    """
    from amplab import kernels
    from amplab.kernels.builder.recipe import obstacle

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the report contains the warning
        report = kernels.ensure(wait=True)
    if report.status == "reference":
        pytest.skip(str(report))
    if report.status == "failed" and obstacle() is not None and not in_ci():
        pytest.skip(str(report))
    assert report.status == "built", report
    return report
