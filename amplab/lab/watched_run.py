"""The header of a run log for a run that was watched, not trained by the lab.

watched/1 model=Seq2Seq optimizer=Adam scaling=apex opt_level=O1
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from amplab.diagnose.remedies.api_styles import ApiStyle

__all__ = ["NO_LEVEL", "WatchedRun"]

NO_LEVEL = "–"
"""The opt_level of a run without one."""

_START = "watched/1"


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
        """Return the form that `parse` reads."""
        return " ".join([_START, *(f"{each.name}={getattr(self, each.name)}" for each in fields(self))])

    @classmethod
    def parse(cls, text: str) -> WatchedRun:
        """Read a header.

        Raises:
            ValueError: it is not the header of a watched run.
        """
        start, *words = text.split()
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        fits = start == _START and set(pairs) == {each.name for each in fields(cls)}
        if not fits or pairs["scaling"] not in [*ApiStyle]:
            raise ValueError(f"{text!r}: expected the header of a watched run, such as {cls('Net', 'Adam', 'apex')}.")
        return cls(**pairs)

    @classmethod
    def is_header(cls, text: str) -> bool:
        """Whether a header is that of a watched run."""
        return text.startswith("watched/")
