"""The ``amplab`` command: open the lab in JupyterLab, train in the terminal, measure, or run a script as apex.

Only the command line is read here. :mod:`amplab.launch` opens JupyterLab, :mod:`amplab.scripts` runs scripts,
:mod:`amplab.lab.console` trains and prints, :class:`amplab.lab.ExperimentConfig` judges the values of an experiment,
:mod:`amplab.bench` measures; these three are imported when they are needed, so that ``amplab lab`` and
``amplab --help`` wait for no torch.
"""

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from amplab import __version__
from amplab.launch import LaunchError, choose_notebook, find_notebooks, launch, plan_launch
from amplab.scripts import DEVICES, ScriptError, run_module, run_script

if TYPE_CHECKING:
    from amplab.diagnose import Findings

__all__ = ["main", "build_parser", "parse_count"]

BAD_INPUT = 2
INTERRUPTED = 130
POWER = re.compile(r"(?P<base>\d+)\*\*(?P<exponent>\d{1,2})")

BENCH_SUITES = ("scaler", "casting", "kernels", "xray", "diagnose")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for bad input (one sentence on stderr), 130 interrupted.

    Args:
        arguments: the words after ``amplab``; None takes those of the process.
    """
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        return refuse(options, ValueError(unknown_words(options, unknown)))
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return INTERRUPTED


def open_lab(options: argparse.Namespace) -> int:
    """Open JupyterLab on a notebook."""
    if options.jupyter and not options.jupyter[0].startswith("-"):
        stray = options.jupyter[0]
        return refuse(options, LaunchError(f"{stray}: no option; a lesson is `amplab lab --notebook {stray}`."))
    try:
        notebook = choose_notebook(find_notebooks(), options.notebook)
        plan = plan_launch(notebook, port=options.port, browser=options.browser, extra=options.jupyter)
    except LaunchError as error:
        return refuse(options, error)
    where = "in your browser" if plan.opens_browser else "at the address that JupyterLab prints below"
    print(f"Opening {notebook.name} {where}. Ctrl+C twice here ends the lab.", flush=True)
    return launch(plan)


def train_in_terminal(options: argparse.Namespace) -> int:
    """Train without a browser."""
    from amplab.lab import FIELDS, ExperimentConfig
    from amplab.lab.console import train

    words = {name: getattr(options, name) for name in FIELDS}
    try:
        config = ExperimentConfig(**{name: FIELDS[name].read(word) for name, word in words.items() if word is not None})
        return train(config, steps=options.steps, log_path=options.log).exit_status
    except (ValueError, ImportError, RuntimeError) as error:  # the last where kernels are required and cannot be built
        return refuse(options, error)


def bench(options: argparse.Namespace) -> int:
    """Measure a suite and print its table; a figure below its goal is no failure."""
    if options.suite == "gpu":
        return bench_gpu(options)
    from amplab.amp.run_state.atomic_file import write_atomically
    from amplab.bench import as_json, as_text, run_suite

    if options.json is not None and not may_write(options.json):
        return refuse(options, OSError(f"--json {options.json}: expected a file in a folder that can be written to."))
    try:
        results = run_suite(options.suite, rounds=options.rounds)
        print(as_text(results))
        if options.json is not None:
            write_atomically(options.json, lambda file: file.write(as_json(results).encode()))
    except (OSError, RuntimeError) as error:
        return refuse(options, error)
    return 0


def bench_gpu(options: argparse.Namespace) -> int:
    """Check and measure the CUDA kernels; the figures go to a file in any case."""
    from amplab.bench import gpu

    file = [] if options.json is None else ["--json", str(options.json)]
    return gpu.main(["--rounds", str(options.rounds), *file])


def may_write(path: Path) -> bool:
    """Whether a file can be written at `path`, to be known before minutes of measuring."""
    return not path.is_dir() and os.access(path.parent, os.W_OK)


def examine(options: argparse.Namespace) -> int:
    """Print what the machine has, or what is found in a run log or a step; return 1 where that is harmful."""
    from amplab.diagnose import doctor

    if options.target is None:
        print(doctor())
        return 0
    look = findings_in_log if options.target.endswith(".jsonl") else findings_in_step
    try:
        found = look(options.target)
    except TargetError as error:
        return refuse(options, error)
    print(found)
    return int(bool(found.harmful))


class TargetError(ValueError):
    """What `amplab doctor` was given cannot be looked at."""


def findings_in_log(path: str) -> "Findings":
    """Print which run it is, return what the rules find in it. Raises TargetError: no run log, or it cannot be read."""
    from amplab.lab import load_run

    try:
        run = load_run(path)
    except OSError as error:
        raise TargetError(f"{path}: {error.strerror or error}; name a run log, as in ~/.amplab/runs.") from None
    except ValueError as error:
        raise TargetError(str(error)) from None
    print(run)
    return run.findings()


def findings_in_step(target: str) -> "Findings":
    """Return what the doctor finds in what a function of a file returns: its arguments by name, or (model, loss_fn).

    Raises:
        TargetError: the target is not FILE.py:FUNCTION, or the function returns something else. What the file or the
            function raises passes through.
    """
    from amplab.diagnose import doctor

    path, _, name = target.rpartition(":")
    if not name.isidentifier() or not Path(path).is_file():
        raise TargetError(
            f"{target!r}: expected a run log (.jsonl), or FILE.py:FUNCTION, where the function returns a model and a "
            "function of no arguments that returns its loss, or the arguments of amplab.doctor as a dict."
        )
    returned = function_in(path, name)()
    given = dict(zip(("model", "loss_fn"), returned, strict=False)) if isinstance(returned, tuple) else returned
    if not isinstance(given, dict) or (isinstance(returned, tuple) and len(returned) != 2) or "model" not in given:
        raise TargetError(f"{name}() returned {said(returned)}: expected (model, loss_fn), or a dict with a model.")
    takes = inspect.signature(doctor).parameters
    unknown = [repr(key) for key in given if key not in takes]
    if unknown:
        raise TargetError(f"{name}() returned {', '.join(unknown)}: expected what doctor takes, {', '.join(takes)}.")
    try:
        return doctor(**given)
    except (TypeError, ValueError) as refusal:
        raise TargetError(f"{name}(): {refusal}") from refusal


def function_in(path: str, name: str) -> Callable[[], object]:
    """Return a function of a file. Raises TargetError: there is none, or Python has another module of that name."""
    file = Path(path).resolve()
    sys.path.insert(0, str(file.parent))
    module = importlib.import_module(file.stem)
    loaded = getattr(module, "__file__", None)
    if loaded is None or Path(loaded).resolve() != file:
        raise TargetError(f"{path}: Python knows another module as {file.stem}; expected another name, so rename it.")
    function = getattr(module, name, None)
    if not callable(function):
        here = [each for each, value in vars(module).items() if isinstance(value, FunctionType)]
        raise TargetError(f"{path}: it has no function {name}; expected one of {', '.join(here) or 'none'}.")
    return function


def said(returned: object) -> str:
    """What a function returned, in words."""
    return f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__


def run_as_apex(options: argparse.Namespace) -> int:
    """Run a script with amplab in the place of apex; what it prints, raises and returns is its own."""
    run = run_module if options.module else run_script
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        example = "-m package.module" if options.module else "train.py"
        return refuse(options, ScriptError(f"no script: expected one, such as `amplab run --device cpu {example}`."))
    try:
        return run(words[0], words[1:], device=options.device)
    except ScriptError as error:
        return refuse(options, error)


def refuse(options: argparse.Namespace, error: Exception) -> int:
    """Say on stderr why a command cannot run; return the exit status of bad input."""
    print(f"amplab {options.command}: {error}", file=sys.stderr)
    return BAD_INPUT


def unknown_words(options: argparse.Namespace, words: Sequence[str]) -> str:
    """Return the sentence that refuses words no option takes, with the option that was probably meant."""
    flags = {"--no-browser", *(f"--{name.replace('_', '-')}" for name in vars(options))} - {"--browser"}
    close = get_close_matches(words[0].partition("=")[0], sorted(flags), n=1, cutoff=0.7)
    meant = f"did you mean {close[0]}?" if close else f"see `amplab {options.command} --help`."
    return f"{' '.join(words)}: no option takes this; {meant}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose refusal is one sentence.

    Args:
        add_options: Adds the options of a command, once its name was given; some of them need torch.
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

    def error(self, message: str) -> None:
        """Exit with status 2 and `message`, without the usage."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see `{self.prog} --help`.\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="amplab", description="A lab for automatic mixed precision.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"amplab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_options, text in (
        ("lab", add_lab, "open JupyterLab on the lab notebook"),
        ("train", add_train, "train in the terminal"),
        ("bench", add_bench, "measure amplab against torch"),
        ("doctor", add_doctor, "look at this machine, a run log, or a step"),
        ("run", add_run, "run a script that imports apex"),
    ):
        commands.add_parser(name, help=text, allow_abbrev=False, add_options=add_options)
    return parser


def add_lab(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab lab``."""
    parser.description = "Open JupyterLab on the lab notebook, for this machine only."
    parser.add_argument("--notebook", default="00", metavar="03", help="the lesson whose name starts so (default: 00)")
    parser.add_argument("--port", type=int, help="fail if it is taken (default: 8888 or the next free one)")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="print the address instead")
    parser.add_argument("jupyter", nargs="*", metavar="-- ARGUMENT", help="anything else for JupyterLab, after --")
    parser.set_defaults(run=open_lab)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab train``; their values are text until ExperimentConfig reads them."""
    from amplab.lab import FIELDS

    parser.description = "Train one model and print its loss, its loss scale and every skipped step."
    parser.epilog = "Numbers may be written 65536, 2**16 or 1e4."
    parser.add_argument("--steps", type=parse_count, default=300, metavar="300", help="training steps (default: 300)")
    parser.add_argument("--log", type=Path, metavar="PATH", help="file of the run log, written as it goes")
    for name, field in FIELDS.items():
        text = f"{field.help} (default: {field.default_text})"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=field.example_text, help=text)
    parser.set_defaults(run=train_in_terminal)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab bench``."""
    parser.description = "Measure amplab against torch, by turns in one run, with one thread, and print the ratios."
    parser.epilog = "Close what else is running: the ratios bear it, but their spread grows."
    suites = (*BENCH_SUITES, "gpu")
    parser.add_argument("suite", choices=suites, metavar="|".join(suites), help="what to measure; gpu needs one")
    parser.add_argument("--rounds", type=parse_count, default=30, metavar="30", help="of each figure (default: 30)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures and the machine's facts there, too"
    )
    parser.set_defaults(run=bench)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add ``amplab doctor``."""
    parser.description = (
        "Say what this machine has for mixed precision and what is missing; or what is wrong with a run, read from its "
        "log, or with a training step."
    )
    what = "a run log; or FILE.py:FUNCTION, which returns (model, loss_fn) or a dict of amplab.doctor's arguments"
    parser.add_argument("target", nargs="?", metavar="RUN.jsonl|FILE.py:FUNCTION", help=what)
    parser.set_defaults(run=examine)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab run``; everything from the script's name on is the script's."""
    parser.description = "Run a script as `python` would, with amplab in the place of apex."
    parser.add_argument("--device", choices=DEVICES, help="carry out on the CPU what the script asks of CUDA")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as `python -m` would")
    # In one: argparse would keep a "--" that follows a positional of its own from the script.
    words = "the script, or the dotted name of a module after -m, then what it is given"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]", help=words)
    parser.usage = "amplab run [-h] [--device {cpu}] [-m] SCRIPT [ARGUMENT ...]"
    parser.set_defaults(run=run_as_apex)


def parse_count(text: str) -> int:
    """Read a whole number > 0.

    >>> parse_count("300"), parse_count("1e3"), parse_count("2**5")
    (300, 1000, 32)

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    power = POWER.fullmatch(text)
    try:
        number = float(power["base"]) ** int(power["exponent"]) if power else float(text)
    except (ValueError, OverflowError):
        number = -1.0
    if number < 1 or not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number > 0 such as 300, 1e3 or 2**10")
    return int(number)
