"""The ``amplab`` command: open the lab in JupyterLab, or train in the terminal.

Only the command line is read here. :mod:`amplab.lab.launch` opens JupyterLab, :mod:`amplab.lab.console` trains and
prints; each is imported when its command runs, so that ``amplab --help`` needs no torch.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence

from amplab import __version__

__all__ = ["main", "build_parser", "parse_number", "parse_count", "parse_choice"]

BAD_INPUT = 2
INTERRUPTED = 130
POWER = re.compile(r"(?P<base>\d+(?:\.\d+)?)\*\*(?P<exponent>[+-]?\d+)")
# Options of `train` that are not fields of the experiment's configuration.
NOT_CONFIG = frozenset({"command", "run", "steps", "log"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for bad input (one sentence on stderr), 130 interrupted.

    Args:
        arguments: the words after ``amplab``; None takes those of the process.
    """
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return INTERRUPTED


def open_lab(options: argparse.Namespace) -> int:
    """Open JupyterLab on a notebook."""
    from amplab.lab.launch import LaunchError, choose_notebook, find_notebooks, launch, plan_launch

    try:
        notebook = choose_notebook(find_notebooks(), options.notebook)
        plan = plan_launch(notebook, port=options.port, browser=options.browser, extra=options.jupyter)
    except LaunchError as error:
        return refuse(options, error)
    where = "in your browser" if plan.opens_browser else "at the address that JupyterLab prints below"
    print(f"Opening {notebook.name} {where}. Ctrl+C twice here ends the lab.")
    return launch(plan)


def train(options: argparse.Namespace) -> int:
    """Train without a browser."""
    from amplab.lab import ExperimentConfig, console

    given = {name: value for name, value in vars(options).items() if name not in NOT_CONFIG}
    try:
        config = ExperimentConfig(**given)
    except ValueError as error:
        return refuse(options, error)
    console.train(config, steps=options.steps, log_path=options.log)
    return 0


def refuse(options: argparse.Namespace, error: Exception) -> int:
    """Say on stderr why a command cannot run; return the exit status of bad input."""
    print(f"amplab {options.command}: {error}", file=sys.stderr)
    return BAD_INPUT


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose refusal is one sentence."""

    def error(self, message: str) -> None:
        """Exit with status 2 and `message`, without the usage."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see `{self.prog} --help`.\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="amplab", description="A lab for automatic mixed precision.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"amplab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    add_lab(commands.add_parser("lab", help="open JupyterLab on the lab notebook", allow_abbrev=False))
    add_train(commands.add_parser("train", help="train in the terminal", allow_abbrev=False))
    return parser


def add_lab(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab lab``."""
    parser.description = "Open JupyterLab on the lab notebook, for this machine only."
    parser.add_argument("--notebook", default="00", metavar="03", help="the lesson whose name starts so (default: 00)")
    parser.add_argument("--port", type=parse_count, help="fail if it is taken (default: 8888 or the next free one)")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="print the address instead")
    parser.add_argument("jupyter", nargs="*", metavar="-- ARGUMENT", help="anything else for JupyterLab, after --")
    parser.set_defaults(run=open_lab)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amplab train``; an option left out keeps the default of ExperimentConfig."""
    parser.description = "Train one model and print its loss, its loss scale and every skipped step."
    parser.epilog = "Numbers may be written 65536, 2**16 or 1e4."
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("--steps", type=parse_count, default=300, help="training steps (default: 300)")
    parser.add_argument("--log", default=None, metavar="PATH", help="file of the run log, written as it goes")
    for flag, kind, metavar, text in TRAIN_OPTIONS:
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    parser.set_defaults(run=train)


def parse_number(text: str) -> float:
    """Read a number: 128, 0.5, 1e4 or a power such as 2**20.

    >>> parse_number("2**20"), parse_number("1e4"), parse_number("2**-14")
    (1048576.0, 10000.0, 6.103515625e-05)

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    power = POWER.fullmatch(text.strip())
    try:
        return float(power["base"]) ** int(power["exponent"]) if power else float(text)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number such as 128, 1e4 or 2**16") from None


def parse_count(text: str) -> int:
    """Read a whole number, in any of the spellings of :func:`parse_number`.

    >>> parse_count("2**5"), parse_count("1e3")
    (32, 1000)
    """
    number = parse_number(text)
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number such as 300, 1e3 or 2**10")
    return int(number)


def parse_choice(text: str) -> bool | None:
    """Read true, false or default (None: what the opt_level prescribes).

    >>> parse_choice("true"), parse_choice("default")
    (True, None)
    """
    spellings = {"true": True, "false": False, "default": None}
    if text.lower() not in spellings:
        raise argparse.ArgumentTypeError(f"{text!r}: expected true, false or default")
    return spellings[text.lower()]


def parse_loss_scale(text: str) -> float | str:
    """Read dynamic, or a static loss scale."""
    return "dynamic" if text.lower() == "dynamic" else parse_number(text)


Option = tuple[str, Callable[[str], object], str, str]
# Flag, type, metavar, help; the flag's name is the field of ExperimentConfig.
TRAIN_OPTIONS: tuple[Option, ...] = (
    ("--task", str, "digits", "what is learnt"),
    ("--model", str, "mlp", "mlp or cnn"),
    ("--hidden", parse_count, "128", "width of the hidden layers"),
    ("--opt-level", str, "O1", "O0, O1, O2 or O3"),
    ("--optimizer", str, "sgd", "sgd, adam or adamw"),
    ("--lr", parse_number, "0.1", "learning rate"),
    ("--momentum", parse_number, "0.9", "momentum of sgd"),
    ("--batch-size", parse_count, "64", "images per step"),
    ("--seed", parse_count, "0", "seed of weights and batches"),
    ("--loss-scale", parse_loss_scale, "dynamic|128", "dynamic, or a static scale"),
    ("--init-scale", parse_number, "2**16", "dynamic scale at the first step"),
    ("--growth-interval", parse_count, "50", "clean steps until the dynamic scale doubles"),
    ("--min-loss-scale", parse_number, "1", "floor of the dynamic scale"),
    ("--max-loss-scale", parse_number, "2**24", "ceiling of the dynamic scale"),
    ("--keep-batchnorm-fp32", parse_choice, "true|false", "override of the opt_level"),
    ("--master-weights", parse_choice, "true|false", "override of the opt_level"),
)
