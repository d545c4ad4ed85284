"""The ``amplab`` command: open the lab in JupyterLab, train in the terminal, measure, diagnose, or run an apex script.

This file only parses the command line. :mod:`amplab.launch` opens JupyterLab, :mod:`amplab.scripts` runs scripts,
:mod:`amplab.lab.console` trains and prints, :mod:`amplab.bench` measures, :mod:`amplab.diagnose` looks for what is
wrong. Whatever needs torch is imported in the command that uses it, so that ``amplab lab`` and ``amplab --help`` start
without it. The options of ``amplab train`` are the fields of :class:`amplab.lab.ExperimentConfig`, read from their
declarations.
"""

import argparse
import atexit
import errno
import inspect
import io
import os
import select
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from amplab import __version__
from amplab.display.numbers import parse_number
from amplab.display.text import visible
from amplab.launch import (
    LaunchError,
    LaunchStopped,
    WorkingCopies,
    choose_lesson,
    copy_lessons,
    end_with_launcher,
    find_lessons,
    launch,
    launch_ranks,
    lesson_rows,
    lesson_table,
    lessons_directory,
    plan_launch,
    progress_file,
)
from amplab.lessons.progress import read_progress
from amplab.scripts import DEVICES, ScriptError, run_module, run_script

if TYPE_CHECKING:
    from amplab.diagnose import Findings

__all__ = ["main", "build_parser", "parse_count"]

BAD_INPUT = 2
INTERRUPTED = 130

_FULL = (errno.ENOSPC, errno.EDQUOT)

_LARGEST_COUNT = 10**9  # a billion steps of a millisecond take 12 days
_MOST_PROCESSES = 1024

BENCH_SUITES = ("scaler", "casting", "kernels", "xray", "diagnose")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0; 1 if its output cannot be written, since the reader has closed it, as `| head` does, or the disk is full; 2 for
    bad input (one sentence on stderr); 130 if interrupted. A script of `run` ends as with ``python``.

    Args:
        arguments: the words after ``amplab``; None takes those of the process.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a shell has closed it (>&-)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  for the process
    interrupted: list[str] = []  # the command
    if is_own := arguments is None:
        atexit.register(_end_interrupted_training, interrupted)  # the first one is called last
    try:
        with _ended_by_ctrl_c(is_own):  # imports of torch take seconds
            options, unknown = build_parser().parse_known_args(arguments)
    except OSError as error:  # of the help
        return _end_without_output(error, "amplab", is_own=is_own)
    if is_own and options.command != "run":  # a script decides for itself
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # of a terminal that shows ASCII alone
    if unknown:
        return refuse(options, ValueError(unknown_words(options, unknown)))
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        status = run(options)
        if options.command != "run":  # what a script has printed, or made of sys.stdout, is Python's to flush
            sys.stdout.flush()
        return status
    except OSError as error:
        return _end_without_output(error, f"amplab {options.command}", is_own=is_own)
    except KeyboardInterrupt:
        interrupted.append(options.command)
        _end_by_ctrl_c(is_own)  # without the traceback of what runs at exit
        return INTERRUPTED


def _end_interrupted_training(interrupted: Sequence[str]) -> None:
    """End this process if Ctrl-C did not wait for a step: its thread is inside torch, which aborts when Python ends.

    What runs at exit has run, so the log is closed. A script of `amplab run` may have files that Python flushes later.
    """
    if "train" in interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader has closed it, or a program has
                stream.flush()
        os._exit(INTERRUPTED)


def _end_without_output(error: OSError, command: str, *, is_own: bool) -> int:
    """Return the exit status, 1, if an error says that the output cannot be written; raise it if it says another thing.

    Args:
        error: What writing has raised, unless something else has.
        command: Whose output it is.
        is_own: Whether the command line, and so what Python writes at exit, is that of this process.
    """
    is_closed = isinstance(error, BrokenPipeError) and _is_closed_by_its_reader(sys.stdout)
    if not is_closed and error.errno not in _FULL:
        raise error
    if is_own:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())  # where Python writes the rest at exit
    if not is_closed:
        print(
            f"{command}: cannot write its output: {error.strerror}; free some space and call it again.", file=sys.stderr
        )
    return 1


def _is_closed_by_its_reader(stream: TextIO) -> bool:
    """Return whether nobody reads any more what is written to a pipe, as after `| head`."""
    if not hasattr(select, "poll"):  # Windows
        return False
    asked = select.poll()
    asked.register(stream, 0)
    return bool(asked.poll(0))


@contextmanager
def _ended_by_ctrl_c(is_own: bool) -> Iterator[None]:
    """Let Ctrl-C end this process at once in the block: there is nothing to save, and an import may discard it.

    Args:
        is_own: Whether the command line is that of this process.
    """
    before = _end_by_ctrl_c(is_own)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _end_by_ctrl_c(is_own: bool) -> Any:
    """Let Ctrl-C end this process at once; return the handler from before, None if nothing has changed."""
    if not is_own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return None
    return signal.signal(signal.SIGINT, signal.SIG_DFL)


def open_lab(options: argparse.Namespace) -> int:
    """Open JupyterLab on a notebook."""
    try:
        shipped = find_lessons()
        named, further = _lesson_and_arguments(options)
        lesson = choose_lesson(shipped, "00" if named is None else named)
        if options.list:
            rows = lesson_rows(shipped, read_progress(progress_file(lessons_directory())))
            chosen = lesson.relative_to(shipped).with_suffix("").as_posix()
            print(lesson_table([row for row in rows if named is None or row.name == chosen]))
            return 0
        copies = copy_lessons(shipped, lessons_directory(), renew=options.renew)
        plan = plan_launch(
            copies.folder / lesson.relative_to(shipped),
            folder=copies.folder,
            port=options.port,
            browser=options.browser,
            app=options.app,
            extra=further,
        )
    except LaunchError as error:
        return refuse(options, error)
    print(lessons_line(copies))
    if plan.opens_browser:
        print(f"Opening {lesson.name} in your browser. If no window appears, open the address that JupyterLab prints.")
    else:
        print(f"To see {lesson.name}, open the address that JupyterLab prints below.")
    if plan.warning:
        print(f"amplab lab: warning: {plan.warning}", file=sys.stderr)
    print("To stop the lab, press Ctrl+C twice here.", flush=True)
    return launch(plan)


def _lesson_and_arguments(options: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Return the lesson that is named, None if none is, and the arguments for JupyterLab, which start with a dash."""
    words = list(options.words)
    named = options.notebook
    if words and not _is_option(words[0]):
        if named is not None:
            raise LaunchError(f"{words[0]} and --notebook {named}: expected one lesson.")
        named = words.pop(0)
    if words and not _is_option(words[0]):
        raise LaunchError(f"{words[0]}: expected one lesson, and arguments of JupyterLab only after --.")
    return named, words


def _is_option(word: str) -> bool:
    """Whether a word is an option: argparse passes on a negative number as an argument, such as -1."""
    return word.startswith("-") and not word[1:2].isdigit()


def lessons_line(copies: WorkingCopies) -> str:
    """Say where the working copies of the lessons are, and what has been written there."""
    new = f"; {len(copies.written)} new" if copies.written else ""
    moved = "".join(f"\nYour {old} is now {new_name}." for old, new_name in copies.moved)
    return (
        f"Your copies of the lessons are in {copies.folder}{new}. Changes stay there; `amplab lab --renew` writes new "
        f"copies and keeps yours.{moved}"
    )


def train_in_terminal(options: argparse.Namespace) -> int:
    """Train without a browser."""
    end_with_launcher()
    from amplab.lab import FIELDS, ExperimentConfig
    from amplab.lab.console import check_trainable, train
    from amplab.lab.rank_training import is_one_of_several, train_on_ranks

    words = {name: word for name in FIELDS if (word := getattr(options, name)) is not None}
    try:
        config = ExperimentConfig(**{name: FIELDS[name].read(word) for name, word in words.items()})
        _check_launch(options.nproc, options.max_restarts, is_rank=is_one_of_several())
        if options.nproc is not None:
            check_trainable(config, options.log)
            return _train_on(options.nproc, _train_words(options, words), options)
        run = train_on_ranks if is_one_of_several() else train
        return run(config, steps=options.steps, log_path=options.log).exit_status
    except (ValueError, ImportError, RuntimeError) as error:  # the last if kernels are required and cannot be built
        return refuse(options, error)


def _check_launch(nproc: int | None, max_restarts: int | None, *, is_rank: bool) -> None:
    """Raise a ValueError if the options of a launch do not fit together."""
    if max_restarts is not None and nproc is None:
        raise ValueError("--max-restarts: expected --nproc too; under torchrun it is an option of torchrun.")
    if nproc is not None and nproc > _MOST_PROCESSES:
        raise ValueError(f"--nproc {nproc}: expected at most {_MOST_PROCESSES} processes on one machine.")
    if nproc is not None and is_rank:
        raise ValueError(f"--nproc {nproc}: torchrun has started several processes already; leave --nproc out.")


def _train_on(count: int, words: Sequence[str], options: argparse.Namespace) -> int:
    """Train on several ranks; if one fails, print how each of them ended and where its log is."""
    from amplab.lab.rank_training import logs_of_launch

    launch = uuid.uuid4().hex
    try:
        ends = launch_ranks(count, words, name=launch, restarts=options.max_restarts or 0)
    except LaunchStopped as stopped:
        return 128 + stopped.signal_number
    if not ends:
        return 0
    logs = logs_of_launch(options.log, launch)
    for end in ends:
        log = f"its run log is {logs[end.rank]}" if end.rank in logs else "it has no run log yet"
        print(f"amplab train: {end}; {log}", file=sys.stderr)
    codes = {end.exitcode for end in ends if end.is_cause}
    return codes.pop() if codes in ({BAD_INPUT}, {INTERRUPTED}) else 1


def _train_words(options: argparse.Namespace, fields: Mapping[str, str]) -> list[str]:
    """Return the command that each rank runs."""
    words = ["amplab", "train", "--steps", str(options.steps)]
    words += [] if options.log is None else ["--log", str(options.log)]
    return words + [f"--{name.replace('_', '-')}={word}" for name, word in fields.items()]


def bench(options: argparse.Namespace) -> int:
    """Measure a suite and print its table; a figure below its goal does not change the exit status."""
    if options.suite == "gpu":
        return bench_gpu(options)
    from amplab.amp.run_state.file_format import write_atomically
    from amplab.amp.run_state.paths import given_path
    from amplab.bench import as_json, as_text, run_ddp, run_suite

    path = None
    try:
        if options.json is not None and not may_write(path := given_path(options.json, "--json")):
            raise OSError(f"--json {path}: expected the path of a file in a writable folder, on a disk with space.")
    except (OSError, ValueError) as error:
        return refuse(options, error)
    try:
        rounds = options.rounds
        results = run_ddp(rounds=rounds) if options.suite == "ddp" else run_suite(options.suite, rounds=rounds)
        print(as_text(results))
        if path is not None:
            write_atomically(path, lambda file: file.write(as_json(results).encode()))
    except (OSError, RuntimeError) as error:
        return refuse(options, error)
    return 0


def bench_gpu(options: argparse.Namespace) -> int:
    """Check and measure the CUDA kernels; the figures are always written to a file."""
    from amplab.bench import gpu

    file = [] if options.json is None else ["--json", str(options.json)]
    return gpu.main(["--rounds", str(options.rounds), *file])


def may_write(path: Path) -> bool:
    """Return whether a file can be written at `path`; asked before minutes of measuring."""
    from amplab.amp.run_state.paths import special_kind

    try:
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as file:
            file.write(b"\n")  # a full disk makes empty files
    except OSError:
        return False
    return not special_kind(path)


def examine(options: argparse.Namespace) -> int:
    """Print the state of the machine, or the findings in a run log or a step; return 1 if one of them is harmful."""
    from amplab.diagnose import doctor

    if options.target is None:
        print(doctor())
        return 0
    is_log = options.target.endswith(".jsonl") or os.path.isdir(options.target)
    look = findings_in_log if is_log else findings_in_step
    try:
        found = look(options.target)
    except TargetError as error:
        return refuse(options, error)
    print(found)
    return int(bool(found.harmful))


class TargetError(ValueError):
    """The target of `amplab doctor` cannot be examined."""


def findings_in_log(path: str) -> "Findings":
    """Print which run it is and return its findings. Raises TargetError: no run log, or it cannot be read."""
    from amplab.lab import load_run

    try:
        run = load_run(path)
    except OSError as error:
        expected = "expected a run log, such as one in ~/.amplab/runs."
        raise TargetError(f"{path}: {error.strerror}; {expected}" if error.strerror else str(error)) from None
    except ValueError as error:
        raise TargetError(str(error)) from None
    print(run)
    if run.ranks:
        print(run.rank_table())
    return run.findings()


def findings_in_step(target: str) -> "Findings":
    """Call a function of a file, pass what it returns to the doctor, and return the findings.

    The function returns ``(model, step)`` or a dict of the doctor's arguments.

    Raises:
        TargetError: the target is not FILE.py:FUNCTION, or the function returns something else. Exceptions of the file
            and of the function pass through.
    """
    from amplab.diagnose import Findings, doctor

    path, _, name = target.rpartition(":")
    if not name.isidentifier() or not os.path.isfile(path):  # False for what cannot be a path, too
        raise TargetError(
            f"{target!r}: expected a run log (.jsonl), a folder of those of several ranks, or FILE.py:FUNCTION, where "
            "the function returns a model and a function of no arguments that returns its loss, or the arguments of "
            "amplab.doctor as a dict."
        )
    returned = function_in(path, name)()
    given = dict(zip(("model", "step"), returned, strict=False)) if isinstance(returned, tuple) else returned
    if not isinstance(given, dict) or (isinstance(returned, tuple) and len(returned) != 2) or "model" not in given:
        raise TargetError(f"{name}() returned {described(returned)}: expected (model, step), or a dict with a model.")
    takes = inspect.signature(doctor).parameters
    unknown = [repr(key) for key in given if key not in takes]
    if unknown:
        raise TargetError(f"{name}() returned {', '.join(unknown)}: expected arguments of doctor: {', '.join(takes)}.")
    try:
        found = doctor(**given)
    except (TypeError, ValueError) as refusal:
        raise TargetError(f"{name}(): {refusal}") from refusal
    if not isinstance(found, Findings):  # the report on the machine
        raise TargetError(f"{name}() returned no model: expected a torch.nn.Module as model.")
    return found


def function_in(path: str, name: str) -> Callable[[], object]:
    """Return a function of a file. Raises TargetError: there is none, or another module has the name of the file."""
    file = Path(path).resolve()
    sys.path.insert(0, str(file.parent))
    module = sys.modules.get(file.stem) or module_of(file)
    loaded = getattr(module, "__file__", None)
    if loaded is None or Path(loaded).resolve() != file:
        raise TargetError(f"{path}: another module is already imported as {file.stem}; rename the file.")
    function: Callable[[], object] | None = getattr(module, name, None)
    if not callable(function):
        here = [each for each, value in vars(module).items() if isinstance(value, FunctionType)]
        raise TargetError(f"{path}: it defines no function {name}; its functions: {', '.join(here) or 'none'}.")
    return function


def module_of(file: Path) -> ModuleType:
    """Import a file by its place: its name may be no name of a module, such as step.v2.py."""
    loader = SourceFileLoader(file.stem, str(file))
    spec = spec_from_file_location(file.stem, file, loader=loader)
    module = sys.modules[file.stem] = module_from_spec(spec)  # type: ignore[arg-type]  # there is one of a loader
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[file.stem]
        raise
    return module


def described(returned: object) -> str:
    """Say in words what a function returned."""
    return f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__


def run_as_apex(options: argparse.Namespace) -> int:
    """Run a script with amplab in place of apex; its output, exceptions and exit status are its own."""
    run = run_module if options.module else run_script
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        example = "-m package.module" if options.module else "train.py"
        return refuse(
            options, ScriptError(f"no script given: expected one, as in `amplab run --device cpu {example}`.")
        )
    try:
        return run(words[0], words[1:], device=options.device)
    except ScriptError as error:
        return refuse(options, error)


def refuse(options: argparse.Namespace, error: Exception) -> int:
    """Print on stderr why a command cannot run; return the exit status for bad input."""
    print(visible(f"amplab {options.command}: {error}"), file=sys.stderr)
    return BAD_INPUT


def unknown_words(options: argparse.Namespace, words: Sequence[str]) -> str:
    """Return the error message for unknown words, with the option that was probably meant."""
    flags = {"--no-browser", *(f"--{name.replace('_', '-')}" for name in vars(options))} - {"--browser"}
    close = get_close_matches(words[0].partition("=")[0], sorted(flags), n=1, cutoff=0.7)
    meant = f"did you mean {close[0]}?" if close else f"see `amplab {options.command} --help`."
    return f"{' '.join(words)}: unknown option; {meant}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose error message is one sentence.

    Args:
        add_options: Adds the options of a command when the command line names it, since some need torch.
    """

    def __init__(self, *, add_options: Callable[["Parser"], None] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._add_options = add_options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the options first."""
        add_options, self._add_options = self._add_options, None
        if add_options is not None:
            add_options(self)
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help or the version, too, where argparse would discard what writing raises."""
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and print `message` without the usage."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see `{self.prog} --help`.\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="amplab", description="A lab for automatic mixed precision.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"amplab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_options, text in (
        ("lab", add_lab, "open JupyterLab on the lab notebook"),
        ("train", add_train, "train in the terminal"),
        ("bench", add_bench, "compare the speed of amplab and torch"),
        ("doctor", add_doctor, "examine this machine, a run log, or a training step"),
        ("run", add_run, "run a script that imports apex"),
    ):
        commands.add_parser(name, help=text, allow_abbrev=False, add_options=add_options)
    return parser


def add_lab(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab lab``."""
    parser.description = "Open JupyterLab on a lesson. The server accepts connections from this machine only."
    parser.add_argument("--notebook", metavar="03", help="the lesson, by number or name (the same as LESSON)")
    parser.add_argument(
        "--list", action="store_true", help="list the lessons and your progress, or LESSON alone; open nothing"
    )
    text = "hide the sources of the cells: the lesson's text and the dashboard alone"
    parser.add_argument("--app", action="store_true", help=text)
    text = "write new copies of the lessons; the ones that you have changed get another name"
    parser.add_argument("--renew", action="store_true", help=text)
    parser.add_argument("--port", type=int, help="port of the server (default: 8888 or the next free one)")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="print the address instead")
    text = "a lesson by number or name, such as 03 or clinic (default: 00); after --, further arguments for JupyterLab"
    parser.add_argument("words", nargs="*", metavar="LESSON", help=text)
    parser.set_defaults(run=open_lab)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab train``; their values stay text until the config's fields read them."""
    from amplab.lab import FIELDS

    parser.description = "Train one model and print its loss, its loss scale and every skipped step."
    parser.epilog = "Numbers can be written as 65536, 2**16 or 1e4."
    parser.add_argument("--steps", type=parse_count, default=300, metavar="300", help="training steps (default: 300)")
    text = "file or folder of the run log (default: ~/.amplab/runs); --run-log under torchrun, which has a --log-dir"
    parser.add_argument("--log", "--run-log", metavar="PATH", help=text)
    text = "processes that train together, each on batches of its own (default: this one)"
    parser.add_argument("--nproc", type=parse_count, metavar="2", help=text)
    text = "with --nproc: how often all processes start again from the last checkpoint if one dies (default: 0)"
    parser.add_argument("--max-restarts", type=parse_count, metavar="3", help=text)
    for name, field in FIELDS.items():
        text = f"{field.help} (default: {field.default_text})"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=field.example_text, help=text)
    parser.set_defaults(run=train_in_terminal)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab bench``."""
    parser.description = (
        "Measure amplab and torch in alternation, with one thread, and print the ratios of their times."
    )
    parser.epilog = "Close other programs first: they widen the spread of the ratios."
    suites = (*BENCH_SUITES, "ddp", "gpu")
    text = "what to measure; ddp starts 2 and 4 processes, gpu needs a CUDA device"
    parser.add_argument("suite", choices=suites, metavar="|".join(suites), help=text)
    text = "measurements of each figure (default: 30)"
    parser.add_argument("--rounds", type=parse_count, default=30, metavar="30", help=text)
    text = "also write the figures and a description of the machine to this file"
    parser.add_argument("--json", metavar="FILE", help=text)
    parser.set_defaults(run=bench)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add ``amplab doctor``."""
    parser.description = (
        "Without a target, report what this machine has for mixed precision and what is missing. With a target, report "
        "what is wrong with a run or with a training step."
    )
    text = "a run log, or the folder of those of several ranks; or a function that returns (model, step) or a dict of "
    text += "amplab.doctor's arguments"
    parser.add_argument("target", nargs="?", metavar="RUN.jsonl|FOLDER|FILE.py:FUNCTION", help=text)
    parser.set_defaults(run=examine)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab run``; everything from the script's name on belongs to the script."""
    parser.description = (
        "Run a script as `python` does, with amplab in place of apex. With --device cpu, CUDA calls run "
        "on the CPU: tensors stay there, so is_cuda is False and device is cpu, but moves copy as on a GPU, type() "
        "names CUDA's types, torch.autocast casts by CUDA's lists, and torch.cuda's names answer or say what to use "
        "instead. Each kind of redirected call is reported once on stderr."
    )
    parser.add_argument("--device", choices=DEVICES, help="run the script's CUDA calls on the CPU")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as `python -m` does")
    # One argument for all: argparse would remove a "--" that follows a separate argument for the script.
    text = "the script, or after -m the name of a module, and its arguments"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]", help=text)
    parser.usage = "amplab run [-h] [--device {cpu}] [-m] SCRIPT [ARGUMENT ...]"
    parser.set_defaults(run=run_as_apex)


def parse_count(text: str) -> int:
    """Read a whole number > 0 and at most 10**9.

    >>> parse_count("300"), parse_count("1e3"), parse_count("2**5")
    (300, 1000, 32)

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    try:
        number = parse_number(text)
    except ValueError:
        number = -1.0
    if not 1 <= number <= _LARGEST_COUNT or not number.is_integer():
        such = f"expected a whole number > 0 such as 300, 1e3 or 2**10, at most {_LARGEST_COUNT}"
        raise argparse.ArgumentTypeError(f"{text!r}: {such}")
    return int(number)
