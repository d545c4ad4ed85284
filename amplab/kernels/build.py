"""Build the kernels beside their references, once per machine, and never in anybody's way.

The environment variable ``AMPLAB_KERNELS`` chooses:

``auto`` (the default)
    A build from the cache is loaded at the first use. Where there is none, one is made in the background; the
    reference, which has the same bits, serves until it is ready.
``require``
    The first use waits for the build, and raises where there can be none.
``reference``
    Pure torch, nothing is built.

A build that fails is said once, as a warning with its cause and its remedy, and the reference goes on serving.
Nothing happens on import. What is built is in ``recipe.py``, where it is kept in ``cache.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from amplab.kernels import cache
from amplab.kernels.recipe import Obstacle, Recipe, current_recipe, obstacle

__all__ = ["BuildReport", "KernelLibrary", "ensure", "report", "settle"]

_MODES = ("auto", "reference", "require")
_TIMEOUT = 900.0  # seconds; a compiler that takes longer is taken to hang

OnReport = Callable[["BuildReport"], None]


@dataclass(frozen=True)
class BuildReport:
    """How it stands with the kernels.

    Args:
        status: "reference" (pure torch serves and nothing is under way), "building", "built" or "failed".
        what: what is or was to be built, and where it is kept.
        seconds: how long the build, or the loading of a cached one, took.
        cause: why it failed or why the reference serves; empty otherwise.
        remedy: what to do about it; empty where there is nothing to do.
        libraries: the files that were built.

    >>> print(BuildReport("failed", "CPU kernels", cause="no C++ compiler", remedy="install g++"))
    amplab kernels: failed. CPU kernels: no C++ compiler. To have them: install g++. The pure-torch reference serves, \
with the same results.
    """

    status: Literal["reference", "building", "built", "failed"]
    what: str
    seconds: float = 0.0
    cause: str = ""
    remedy: str = ""
    libraries: tuple[Path, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        match self.status:
            case "built":
                sentences = f"{self.what}, in {self.seconds:.1f} s."
            case "building":
                sentences = f"{self.what}, in the background. The pure-torch reference serves meanwhile."
            case _:
                cause = f": {self.cause.rstrip('.')}" if self.cause else ""
                remedy = f" To have them: {self.remedy}." if self.remedy else ""
                sentences = f"{self.what}{cause}.{remedy} The pure-torch reference serves, with the same results."
        return f"amplab kernels: {self.status}. {sentences}"


def ensure(*, on_report: OnReport | None = None, wait: bool = False) -> BuildReport:
    """Load the kernels or set their build going, as ``AMPLAB_KERNELS`` says; return at once unless told to wait.

    Args:
        on_report: called with the report whenever the status changes from now on, and instead of the warning when
            the build fails; in the background thread when that is where it happens.
        wait: stay until a build in the background is over.

    Raises:
        RuntimeError: ``AMPLAB_KERNELS=require`` and there is no way to build.
        ValueError: ``AMPLAB_KERNELS`` is something else.

    Sync: none.
    """
    return _KERNELS.ensure(on_report, wait)


def report() -> BuildReport:
    """How it stands now; starts nothing. Sync: none."""
    return _KERNELS.report


def settle() -> None:
    """What every operator calls first: start at the first use, take up a finished build, say once that it failed.

    Loading happens here, in the thread that is about to call, and not in the background under a call that runs.

    Sync: none.
    """
    if _KERNELS.needs_attention:
        _KERNELS.attend()


class KernelLibrary:
    """The kernels as a process sees them: not asked for, building, loaded, failed. There is one; tests make more."""

    def __init__(self, make_recipe: Callable[[], Recipe] = current_recipe) -> None:
        self.report = BuildReport("reference", "CPU and CUDA kernels", cause="not asked for yet")
        self._make_recipe = make_recipe
        self.needs_attention = True  # read without the lock, at every call of an operator
        self._lock = threading.RLock()
        self._recipe: Recipe | None = None
        self._in_use = False  # what was built is loaded, or its failure was said
        self._thread: threading.Thread | None = None
        self._on_report: OnReport | None = None

    def ensure(self, on_report: OnReport | None = None, wait: bool = False) -> BuildReport:
        """The function `ensure` of this module, of this library."""
        self._on_report = on_report or self._on_report
        self.attend()
        if wait and self._thread is not None:
            self._thread.join()
            self.attend()
        return self.report

    def require(self) -> BuildReport:
        """Build in the call where nothing is built yet, whatever the mode; "reference" forbids it.

        Raises:
            RuntimeError: There is no way to build, or AMPLAB_KERNELS=reference.
        """
        with self._lock:
            if self.report.status != "built":
                if _mode() == "reference":
                    raise RuntimeError(
                        "AMPLAB_KERNELS=reference: nothing is to be built, and this has no reference; unset it."
                    )
                self._begin("require", self._make_recipe())
            return self.report

    def attend(self) -> None:
        """Do what is due: begin, load what has been built, or say that it failed."""
        with self._lock:
            if self._recipe is None:
                self._begin(_mode(), self._make_recipe())
            elif self.report.status in ("built", "failed") and not self._in_use:
                self._take_up()
            self.needs_attention = False

    def _begin(self, mode: str, recipe: Recipe) -> None:
        if mode == "reference":
            self._tell(BuildReport("reference", recipe.what, cause="AMPLAB_KERNELS=reference"))
        elif (cached := _load_cached(recipe)) is not None:
            self._in_use = True
            self._tell(cached)
        elif mode == "require":
            self._tell(_build(recipe))
            self._take_up(required=True)
        else:
            self._build_in_background(recipe)
        self._recipe = recipe

    def _build_in_background(self, recipe: Recipe) -> None:
        missing = obstacle()
        if missing is not None:  # known at once, so said at once
            self._tell(BuildReport("failed", recipe.what, 0.0, missing.cause, missing.remedy))
            self._take_up()
            return
        self._tell(BuildReport("building", recipe.what))
        # A notebook's cell keeps its outputs to itself: they are compared when the notebook is tested.
        if self._on_report is None and "ipykernel" not in sys.modules:
            print(self.report, file=sys.stderr)  # noqa: T201 (the one line that a build is worth)
        # Begun here and not in the thread: a script that ends at once still leaves a builder behind.
        compiler = _Compiler(recipe, own_session=True)
        self._thread = threading.Thread(target=self._build, args=(compiler,), name="amplab-build", daemon=True)
        self._thread.start()

    def _build(self, compiler: _Compiler) -> None:
        """The background thread. It loads nothing: an operator may be running."""
        news = compiler.report()
        with self._lock:
            self._tell(news)
            self.needs_attention = True

    def _take_up(self, *, required: bool = False) -> None:
        if self.report.status == "built" and (failure := _load(self.report)) is not None:
            self._tell(failure)
        self._in_use = not required or self.report.status == "built"
        if self.report.status == "built":
            return
        if required:
            raise RuntimeError(
                f"AMPLAB_KERNELS=require: {self.report.cause}. To have the kernels: {self.report.remedy}."
            )
        if self._on_report is None:
            warnings.warn(str(self.report), RuntimeWarning, stacklevel=_frames_to_caller())

    def _tell(self, news: BuildReport) -> None:
        self.report = news
        if self._on_report is not None:
            self._on_report(news)


_KERNELS = KernelLibrary()


def _mode() -> str:
    mode = os.environ.get("AMPLAB_KERNELS") or "auto"
    if mode not in _MODES:
        raise ValueError(f"AMPLAB_KERNELS={mode!r}: expected one of {', '.join(_MODES)}; unset it for auto.")
    return mode


def _load_cached(recipe: Recipe) -> BuildReport | None:
    """Load the libraries of an earlier build; None where there are none, or a broken one."""
    began = time.perf_counter()
    libraries = cache.find(recipe.key)
    if not libraries:
        return None
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except OSError:
        cache.discard(libraries)
        return None
    what = f"{recipe.what}, from {libraries[0].parent}"
    return BuildReport("built", what, time.perf_counter() - began, libraries=libraries)


def _load(built: BuildReport) -> BuildReport | None:
    """Load what was just built; the report of the failure, or None."""
    for library in built.libraries:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            cause = f"{library} does not load: {error}"
            return BuildReport("failed", built.what, built.seconds, cause, "remove its folder and start again")
    return None


def _build(recipe: Recipe) -> BuildReport:
    """Compile in another process and wait for it."""
    missing = obstacle()
    if missing is not None:
        return BuildReport("failed", recipe.what, 0.0, missing.cause, missing.remedy)
    return _Compiler(recipe, own_session=False).report()


class _Compiler:
    """A process that runs ``compilation.py``. In a session of its own it survives an interrupt of this process."""

    def __init__(self, recipe: Recipe, *, own_session: bool) -> None:
        self._recipe, self._began = recipe, time.perf_counter()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the report is made)
        self._process: subprocess.Popen | None = None
        self._failure: Obstacle | None = None
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "amplab.kernels.compilation", recipe.key],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=own_session,
            )
        except OSError as error:
            self._failure = _did_not_run(error)

    def report(self) -> BuildReport:
        """Wait for the end, and say what came of it."""
        with self._log:
            failure = self._failure or self._wait()
        libraries = cache.find(self._recipe.key)
        seconds = time.perf_counter() - self._began
        if libraries:
            what = f"{self._recipe.what}, kept in {libraries[0].parent}"
            return BuildReport("built", what, seconds, libraries=libraries)
        if failure is None:
            failure = Obstacle("the build left no library", "set XDG_CACHE_HOME to a folder that can be written")
        return BuildReport("failed", self._recipe.what, seconds, failure.cause, failure.remedy)

    def _wait(self) -> Obstacle | None:
        try:
            status = self._process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            return _did_not_run(error)
        if status == 0:
            return None
        self._log.seek(0)
        return _explain(self._recipe, self._log.read())


def _did_not_run(error: Exception) -> Obstacle:
    return Obstacle(f"the build did not run: {error}", "AMPLAB_KERNELS=reference, if that is to stay so")


def _explain(recipe: Recipe, log: bytes) -> Obstacle:
    """The first error of a failed build, and where to read the rest."""
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror( \w+)?:", line)]  # a compiler's, not Python's "Error:"
    cause = (errors[:1] or lines[-1:] or ["the build said nothing"])[0]
    folder = cache.writable_folder(recipe.key)
    if folder is None:
        return Obstacle(cause, "set XDG_CACHE_HOME to a folder that can be written")
    (folder / "build.log").write_bytes(log)
    return Obstacle(cause, f"read {folder / 'build.log'}")


def _frames_to_caller() -> int:
    """The stacklevel at which a warning points at the first line outside this package."""
    package = str(Path(__file__).parents[1]) + os.sep
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level
