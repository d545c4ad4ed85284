"""``--local_rank`` and ``--local-rank``: a script gets its rank by the name that its own parser knows.

    torch.distributed.launch before torch 2.0    --local_rank=0
    torch.distributed.launch since               --local-rank=0

An `argparse.ArgumentParser` that knows one of the two spellings accepts the other, no matter which file it is in. For
other parsers, the text of the started file decides.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

__all__ = ["accept_both_spellings"]

OLD, NEW = "--local_rank", "--local-rank"


def accept_both_spellings() -> None:
    """Let scripts written for older launchers find their rank, in this process, if torch's launcher has started it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not any(word.partition("=")[0] in (OLD, NEW) for word in sys.argv):
        return
    import argparse  # only here: every process of a script imports this file at its start

    sys.argv[:] = _as_declared(sys.argv)
    parser: Any = argparse.ArgumentParser
    parser.parse_known_args = _knowing(parser.parse_known_args)


def _as_declared(words: list[str]) -> list[str]:
    """Return ``words`` with the spelling in the text of the script, if it has one of the two only."""
    script = Path(words[0])
    if not script.is_file():
        return words
    source = script.read_bytes()
    if OLD.encode() not in source or NEW.encode() in source:
        return words
    return [_spelled(word, OLD) for word in words]


def _knowing(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def parse_known_args(
        self: "argparse.ArgumentParser", args: Sequence[str] | None = None, *further: Any, **named: Any
    ) -> Any:
        known = [spelling for spelling in (OLD, NEW) if spelling in self._option_string_actions]
        words = [*sys.argv[1:]] if args is None else [*args]
        return own(self, [_spelled(word, known[0]) for word in words] if len(known) == 1 else words, *further, **named)

    return parse_known_args


def _spelled(word: str, spelling: str) -> str:
    name, separator, value = word.partition("=")
    return f"{spelling}{separator}{value}" if name in (OLD, NEW) else word
