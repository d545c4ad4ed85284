"""Run a script or a module as ``__main__`` with amplab in place of apex, otherwise as ``python`` runs it.

    python script.py arguments...         run_script("script.py", arguments)
    python -m package.module arguments... run_module("package.module", arguments)

The arguments, ``sys.path[0]``, ``__main__``, the exit status and the traceback of an error are the same as with
``python``. Python processes that the script starts also get amplab in place of apex (``children.py``).
"""

import builtins
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from amplab.scripts.apex_alias import ApexAlias, as_apex
from amplab.scripts.apex_names import refusal
from amplab.scripts.children import let_children_follow
from amplab.scripts.local_rank import accept_both_spellings

__all__ = ["DEVICES", "ScriptError", "run_module", "run_script"]

DEVICES = ("cpu",)
UNCAUGHT, INTERRUPTED = 1, 130
_ON_CPU = "to run the CUDA calls of a script on the CPU, use `amplab run --device cpu`."
ADVICE = {
    "Torch not compiled with CUDA enabled": _ON_CPU,
    "Found no NVIDIA driver": _ON_CPU,
    "No CUDA GPUs are available": _ON_CPU,
    "Attempting to deserialize object on a CUDA device": _ON_CPU,
    "Weights only load failed": (
        "this checkpoint contains more than tensors, and since torch 2.6 torch.load reads only tensors by default. "
        "Loading the rest can run any code that the file contains. If you trust the file, set the environment variable "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 to load it completely."
    ),
}
"""What to do next, printed after an error whose message contains the key."""


class ScriptError(Exception):
    """The script cannot be started; the message says why."""


def run_script(path: str | Path, arguments: Sequence[str] = (), *, device: str | None = None) -> int:
    """Run a file as ``__main__`` in this process; from now on ``apex`` is amplab.

    Args:
        path: path of the script.
        arguments: the arguments of the script, for ``sys.argv``.
        device: "cpu" runs CUDA calls on the CPU; None redirects nothing.

    Returns:
        Exit status: 0, 1 after an exception that the script did not catch, 130 after Ctrl+C.

    Raises:
        ScriptError: no such file, a directory, a file that cannot be read, or an unknown device.
        SystemExit: raised by the script.
    """
    source = _read(path)
    _prepare(device)
    let_children_follow(device)
    sys.argv = [os.fspath(path), *arguments]
    accept_both_spellings()
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    here = "" if os.path.isabs(path) else os.getcwd()  # which may have been deleted
    main = _main_module(os.path.join(here, path))  # not normalized, as python leaves it
    sys.modules["__main__"] = main
    try:
        code = compile(source, main.__dict__["__file__"], "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return _report(error.with_traceback(None))
    return _guarded(lambda: exec(code, main.__dict__))


def run_module(name: str, arguments: Sequence[str] = (), *, device: str | None = None) -> int:
    """Run a module as ``python -m`` does, otherwise like `run_script`.

    Raises:
        ScriptError: no such module, or an unknown device.
        SystemExit: raised by the module.
    """
    _set_first_path(os.getcwd())
    alias = _prepare(device)  # before the search, which imports the packages above the module
    try:
        found = importlib.util.find_spec(name) is not None
        reason = "no module of that name"
    except (ImportError, ValueError) as error:
        found, reason = False, str(error)
    if not found:
        alias.undo()
        message = refusal(name) or f"{name}: {reason}; expected a module that can be imported from {os.getcwd()}."
        raise ScriptError(f"-m {message}")
    let_children_follow(device)
    sys.argv = [name, *arguments]
    accept_both_spellings()
    return _guarded(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except IsADirectoryError as error:
        raise ScriptError(f"{path}: a directory; expected the path of a Python file.") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ScriptError(f"{path}: {reason.lower()}; expected the path of a Python file.") from error


def _prepare(device: str | None) -> ApexAlias:
    if device is not None and device not in DEVICES:
        raise ScriptError(f"--device {device}: expected {' or '.join(DEVICES)}; omit it to redirect nothing.")
    if device == "cpu":
        from amplab.scripts.cuda_on_cpu import cuda_on_cpu

        cuda_on_cpu()
    return as_apex()


def _set_first_path(folder: str) -> None:
    """Set ``sys.path[0]``, where the interpreter keeps the folder of the script."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _main_module(path: str) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __cached__=None, __package__=None, __builtins__=builtins, __annotations__={},
        __loader__=SourceFileLoader("__main__", path),
    )  # fmt: skip
    return main


def _guarded(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  as the interpreter does at the top of a program
        return _report(_without_frames_of_this_file(error))
    return 0


def _without_frames_of_this_file(error: BaseException) -> BaseException:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return error.with_traceback(traceback)


def _report(error: BaseException) -> int:
    """Print an error as the interpreter does, with the hook that the script may have set."""
    for stream in (sys.stderr, sys.stdout):
        with suppress(Exception):  # Python tries again at exit, and tells then what it cannot write
            stream.flush()
    sys.excepthook(type(error), error, error.__traceback__)
    for words, advice in ADVICE.items():
        if words in str(error):
            with suppress(Exception):
                print(f"amplab run: {advice}", file=sys.stderr)  # noqa: T201
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else UNCAUGHT
