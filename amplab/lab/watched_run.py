"""The header of a run log for a run that was watched, not trained by the lab.

watched/1 model=Seq2Seq optimizer=Adam scaling=apex opt_level=O1

Whitespace and control characters in a name, which a class that code has made can have, are percent-encoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from urllib.parse import quote, unquote

from amplab.diagnose.remedies.api_styles import ApiStyle
from amplab.display.text import CONTROLS

__all__ = ["NO_LEVEL", "WatchedRun"]

NO_LEVEL = "–"
"""The opt_level of a run without one."""

_START = "watched/1"
_LONGEST_NAME = 1000
_SPECIAL = re.compile(rf"[%\s]|{CONTROLS.pattern}")


@dataclass(frozen=True)
class WatchedRun:
    """A watched training loop, as its log describes it.

    Attributes:
        model: class of the model.
        optimizer: class of the (first) optimizer.
        scaling: what scaled the loss: "apex", "amplab", "torch" or "none".
        opt_level: of the session; "–" without one.

    >>> WatchedRun.parse(str(WatchedRun("Net", "Adam", "apex", "O1"))).opt_level
    'O1'
    """

    model: str
    optimizer: str
    scaling: str
    opt_level: str = NO_LEVEL

    def __str__(self) -> str:
        """Return the form that `parse` reads, with names of at most `_LONGEST_NAME` characters."""
        return " ".join([_START, *(f"{each.name}={_encoded(getattr(self, each.name))}" for each in fields(self))])

    @classmethod
    def parse(cls, text: str) -> WatchedRun:
        """Read a header.

        Raises:
            ValueError: it is not the header of a watched run.
        """
        start, *words = text.split()
        pairs = {name: unquote(value) for name, is_pair, value in (word.partition("=") for word in words) if is_pair}
        fits = start == _START and set(pairs) == {each.name for each in fields(cls)}
        if not fits or pairs["scaling"] not in [*ApiStyle]:
            raise ValueError(f"{text!r}: expected the header of a watched run, such as {cls('Net', 'Adam', 'apex')}.")
        return cls(**pairs)

    @classmethod
    def is_header(cls, text: str) -> bool:
        """Whether a header is that of a watched run."""
        return text.startswith("watched/")


def _encoded(name: str) -> str:
    return _SPECIAL.sub(lambda found: quote(found[0], errors="replace"), name[:_LONGEST_NAME])
