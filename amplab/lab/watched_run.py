"""What the header of a run log says of a run that was watched rather than trained here.

watched/1 model=Seq2Seq optimizer=Adam scaling=apex opt_level=O1
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["NO_LEVEL", "WatchedRun"]

NO_LEVEL = "–"
"""The opt_level of a run in which there are none."""

_START = "watched/1"


@dataclass(frozen=True)
class WatchedRun:
    """A training loop of somebody's own, in the words that a log keeps of it.

    Attributes:
        model: class of the model.
        optimizer: class of the (first) optimizer.
        scaling: what scaled the loss: "apex", "amplab", "torch" or "none".
        opt_level: of the apex face; "–" elsewhere.

    >>> WatchedRun.parse(str(WatchedRun("Net", "Adam", "apex", "O1"))).opt_level
    'O1'
    """

    model: str
    optimizer: str
    scaling: str
    opt_level: str = NO_LEVEL

    def __str__(self) -> str:
        """The form that `parse` reads back."""
        return " ".join([_START, *(f"{each.name}={getattr(self, each.name)}" for each in fields(self))])

    @classmethod
    def parse(cls, text: str) -> WatchedRun:
        """Read a header.

        Raises:
            ValueError: it is none of a watched run.
        """
        start, *words = text.split()
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        if start != _START or set(pairs) != {each.name for each in fields(cls)}:
            raise ValueError(f"{text!r}: expected the header of a watched run, such as {_START} model=Net ….")
        return cls(**pairs)

    @classmethod
    def is_header(cls, text: str) -> bool:
        """Whether a header says that the run was watched."""
        return text.startswith("watched/")
