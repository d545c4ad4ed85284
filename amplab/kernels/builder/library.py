"""Build the kernels, once per machine, without delaying the caller.

The environment variable ``AMPLAB_KERNELS`` chooses:

``auto`` (the default)
    The first use loads a build from the cache. If there is none, one is made in the background; until it is ready,
    operators use the PyTorch reference, which gives the same bits. The build goes on for its minute if the program ends
    before it, so that the next one has the kernels.
``require``
    The first use waits for the build, and raises if it is not possible.
``reference``
    Pure PyTorch; nothing is built.

A failed build is reported once, as a warning with its cause and its remedy, and operators keep using the reference.
Nothing happens on import. What is built is in ``recipe.py``, where it is kept and what is trusted in ``cache.py``.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Literal

import torch

from amplab.kernels.builder import cache
from amplab.kernels.builder.recipe import Obstacle, Recipe, current_recipe, obstacle
from amplab.kernels.fork_renewal import renew_in_forks, renew_lock_in_forks

__all__ = ["BuildReport", "KernelLibrary", "checked_mode", "ensure", "report", "settle"]

_MODES = ("auto", "reference", "require")
_TIMEOUT = 900.0  # seconds; a compiler that takes longer is considered to hang
_SET_CACHE = "set XDG_CACHE_HOME to a folder that only you can write"

OnReport = Callable[["BuildReport"], object]


@dataclass(frozen=True)
class BuildReport:
    """Build status of the kernels.

    Args:
        status: "reference" (the PyTorch reference is in use and no build runs), "building", "built" or "failed".
        what: what is or was to be built, and where it is kept.
        seconds: duration of the build, or of loading a cached one.
        cause: why the build failed or why the reference is in use; empty otherwise.
        remedy: what to do to get the kernels; empty if there is nothing to do.
        libraries: the files that were built.

    >>> print(BuildReport("failed", "CPU kernels", cause="no C++ compiler", remedy="install g++"))
    amplab kernels: failed. CPU kernels: no C++ compiler. To enable them: install g++. Falling back to the PyTorch \
reference, which gives the same results.
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
                sentences = f"{self.what}, in the background. Using the PyTorch reference until they are built."
            case _:
                cause = f": {self.cause.rstrip('.')}" if self.cause else ""
                remedy = f" To enable them: {self.remedy}." if self.remedy else ""
                fallback = "Falling back to the PyTorch reference, which gives the same results."
                sentences = f"{self.what}{cause}.{remedy} {fallback}"
        return f"amplab kernels: {self.status}. {sentences}"


_NOT_REQUESTED = BuildReport("reference", "CPU and CUDA kernels", cause="not requested yet")


def ensure(*, on_report: OnReport | None = None, wait: bool = False) -> BuildReport:
    """Load the kernels, or start their build, as ``AMPLAB_KERNELS`` says.

    Args:
        on_report: called with the report at each later change of status, possibly in the background thread. A failed
            build is then passed to it instead of being a warning.
        wait: return only when a build in the background has ended.

    Raises:
        RuntimeError: ``AMPLAB_KERNELS=require`` and the kernels cannot be built.
        ValueError: ``AMPLAB_KERNELS`` has another value.

    Sync: none.
    """
    return _KERNELS.ensure(on_report, wait)


def report() -> BuildReport:
    """Return the current status; start nothing. Sync: none."""
    return _KERNELS.report


def settle() -> None:
    """Start at the first use, load a finished build, warn once of a failed one. Every operator calls this first.

    Libraries are loaded here, in the thread that is about to call an operator, and not while another call runs.

    Sync: none.
    """
    if _KERNELS.needs_attention:
        _KERNELS.attend()


class KernelLibrary:
    """The kernels of one process and their status: not requested, building, loaded or failed.

    Args:
        make_recipe: returns what to build.
    """

    def __init__(self, make_recipe: Callable[[], Recipe] = current_recipe) -> None:
        self.report = _NOT_REQUESTED
        self._make_recipe = make_recipe
        self.needs_attention = True  # read without the lock, at every call of an operator
        self._lock = threading.RLock()
        self._recipe: Recipe | None = None
        self._settled = False  # the build is loaded, or its failure was reported
        self._ended: threading.Event | None = None  # of the build in the background
        self._on_report: OnReport | None = None
        renew_lock_in_forks(self, "_lock")
        renew_in_forks(self, KernelLibrary._begin_anew)

    def _begin_anew(self) -> None:
        """In a forked process: the thread that builds, loads or waits for a builder is not there."""
        self._ended = None
        if self.report.status == "building":
            self.report, self._recipe = _NOT_REQUESTED, None
        self.needs_attention = True

    def ensure(self, on_report: OnReport | None = None, wait: bool = False) -> BuildReport:
        """Do what the function `ensure` of this module does."""
        self._on_report = on_report or self._on_report
        self.attend()
        if wait and self._ended is not None:
            # Not the join of its thread: after Ctrl-C in a join, Python 3.11 takes a thread that runs for ended.
            self._ended.wait()
            self.attend()
        return self.report

    def require(self) -> BuildReport:
        """Build now unless the kernels are built, in every mode but "reference".

        Raises:
            RuntimeError: the kernels cannot be built, or AMPLAB_KERNELS=reference.
        """
        with self._lock:
            if self.report.status != "built":
                if checked_mode() == "reference":
                    raise RuntimeError(
                        "AMPLAB_KERNELS=reference forbids a build, and this feature has no reference; unset it."
                    )
                self._begin("require", self._make_recipe())
            return self.report

    def attend(self) -> None:
        """Take the next step: begin, load what has been built, or report that the build failed."""
        with self._lock:
            if self._recipe is None:
                self._begin(checked_mode(), self._make_recipe())
            elif self.report.status in ("built", "failed") and not self._settled:
                self._load_or_warn()
            self.needs_attention = False

    def _begin(self, mode: str, recipe: Recipe) -> None:
        if mode == "reference":
            self._publish(BuildReport("reference", recipe.what, cause="AMPLAB_KERNELS=reference"))
        elif (cached := _load_cached(recipe)) is not None:
            self._settled = True
            self._publish(cached)
        elif mode == "require":
            self._publish(_build(recipe))
            self._load_or_warn(required=True)
        else:
            self._build_in_background(recipe)
        self._recipe = recipe

    def _build_in_background(self, recipe: Recipe) -> None:
        missing = obstacle()
        if missing is not None:  # known at once, so reported at once
            self._publish(BuildReport("failed", recipe.what, 0.0, missing.cause, missing.remedy))
            self._load_or_warn()
            return
        self._publish(BuildReport("building", recipe.what))
        # Not in a notebook: the outputs of its cells are compared when the notebook is tested.
        if self._on_report is None and "ipykernel" not in sys.modules:
            print(self.report, file=sys.stderr)  # noqa: T201 (the one line about a build)
        # Started here and not in the thread: a script that ends at once still leaves a builder running.
        builder = _Builder(recipe, own_session=True)
        ended = threading.Event()
        threading.Thread(target=self._wait_for, args=(builder, ended), name="amplab-build", daemon=True).start()
        self._ended = ended

    def _wait_for(self, builder: _Builder, ended: threading.Event) -> None:
        """Run in the background thread. Load nothing: an operator may be running."""
        try:
            news = builder.report()
            with self._lock:
                self._publish(news)
                self.needs_attention = True
        finally:
            ended.set()

    def _load_or_warn(self, *, required: bool = False) -> None:
        if self.report.status == "built" and (failure := _load(self.report)) is not None:
            self._publish(failure)
        self._settled = not required or self.report.status == "built"
        if self.report.status == "built":
            return
        if required:
            raise RuntimeError(f"AMPLAB_KERNELS=require: {self.report.cause}. To enable them: {self.report.remedy}.")
        if self._on_report is None:
            warnings.warn(str(self.report), RuntimeWarning, stacklevel=_frames_to_caller())

    def _publish(self, news: BuildReport) -> None:
        self.report = news
        if self._on_report is not None:
            self._on_report(news)


_KERNELS = KernelLibrary()


def checked_mode() -> str:
    """Return ``AMPLAB_KERNELS``, "auto" by default.

    Raises:
        ValueError: it has another value.
    """
    mode = os.environ.get("AMPLAB_KERNELS") or "auto"
    if mode not in _MODES:
        raise ValueError(f"AMPLAB_KERNELS={mode!r}: expected one of {', '.join(_MODES)}; unset it for auto.")
    return mode


def _load_cached(recipe: Recipe) -> BuildReport | None:
    """Load the libraries of an earlier build; return None if there are none that can be trusted and loaded."""
    began = time.perf_counter()
    for refusal in cache.refusals(recipe.key):
        warnings.warn(
            f"amplab kernels: not loading a built library: {refusal}.", RuntimeWarning, stacklevel=_frames_to_caller()
        )
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
    """Load the libraries that were just built; return a report if that fails, else None."""
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
    return _Builder(recipe, own_session=False).report()


# What the builder runs. It loads amplab from the given folder, whatever is on the path: an install that is editable
# or a bare folder is found, and the neighbors of that folder are not imported.
_START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

key, package, *folders = sys.argv[1:]
sys.path += [folder for folder in folders if folder not in sys.path]
spec = spec_from_file_location("amplab", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["amplab"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["amplab"])
from amplab.kernels.builder.compilation import compile_key

compile_key(key)
"""


class _Builder:
    """A process that compiles (``compilation.py``). In a session of its own it survives an interrupt of this process.

    It never imports from the working folder, whose files may have any name (``torch.py``): ``-P`` keeps that folder
    off the path, and `_other_folders` removes it from what is inherited.
    """

    def __init__(self, recipe: Recipe, *, own_session: bool) -> None:
        self._recipe, self._began = recipe, time.perf_counter()
        self._log: IO[bytes] = io.BytesIO()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: Obstacle | None = None
        package = str(Path(__file__).parents[2])
        try:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the report is made)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, recipe.key, package, *_other_folders(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_builder_environment(),
                start_new_session=own_session,
            )
        except OSError as error:
            self._failure = _did_not_run(error)

    def report(self) -> BuildReport:
        """Wait for the end and return the outcome."""
        with self._log:
            failure = self._failure or self._wait()
        libraries = cache.find(self._recipe.key)
        seconds = time.perf_counter() - self._began
        if libraries:
            what = f"{self._recipe.what}, kept in {libraries[0].parent}"
            return BuildReport("built", what, seconds, libraries=libraries)
        if failure is None:
            refusals = cache.refusals(self._recipe.key)
            failure = Obstacle(refusals[0] if refusals else "the build left no library", _SET_CACHE)
        return BuildReport("failed", self._recipe.what, seconds, failure.cause, failure.remedy)

    def _wait(self) -> Obstacle | None:
        if self._process is None:
            return None
        try:
            status = self._process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            return _did_not_run(error)
        if status == 0:
            return None
        if status < 0:
            name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
            sender = " (the system sends it when memory runs out)" if name == "SIGKILL" else ""
            return Obstacle(f"the build was ended by {name}{sender}", "start the process again")
        self._log.seek(0)
        return _explain(self._recipe, self._log.read())


def _builder_environment() -> dict[str, str]:
    """Return this process's environment, with the absolute folders of PYTHONPATH other than the working folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    folders = _other_folders(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {
        **environment,
        **({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}),
        "PYTHONSAFEPATH": "1",  # the same for what the builder starts
    }


def _other_folders(path: Iterable[str]) -> list[str]:
    """Return the absolute entries of a search path that are not the working folder."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was removed
        here = ""
    return [
        entry for entry in path if isinstance(entry, str) and os.path.isabs(entry) and os.path.realpath(entry) != here
    ]


def _did_not_run(error: Exception) -> Obstacle:
    return Obstacle(f"the build did not run: {error}", "set AMPLAB_KERNELS=reference to use the reference without it")


def _explain(recipe: Recipe, log: bytes) -> Obstacle:
    """Return the first error of a failed build, and where to read the rest."""
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror( \w+)?:", line)]  # a compiler's, not Python's "Error:"
    cause = (errors[:1] or lines[-1:] or ["the build printed nothing"])[0].removeprefix("error: ")
    folder = cache.writable_folder(recipe.key)
    if folder is None:
        return Obstacle(cause, _SET_CACHE)
    try:
        (folder / "build.log").write_bytes(log)
    except OSError as error:
        return Obstacle(cause, f"free some space, since {folder} cannot be written ({error.strerror}), or {_SET_CACHE}")
    return Obstacle(cause, f"read {folder / 'build.log'}")


def _frames_to_caller() -> int:
    """Return the stacklevel at which a warning points at the first line outside this package."""
    package = str(Path(__file__).parents[2]) + os.sep
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level
