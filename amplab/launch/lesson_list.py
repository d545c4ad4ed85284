"""The list of the lessons that `amplab lab --list` prints: number, title, minutes, and which exercises are solved."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from amplab.launch.lessons import lesson_names

__all__ = ["LessonRow", "lesson_rows", "lesson_table"]

_MINUTES = re.compile(r"(\d+(?:\s*(?:–|-|to|到)\s*\d+)?)[\s-](?:minutes|分钟)")


@dataclass(frozen=True)
class LessonRow:
    """What the list says of a lesson.

    Attributes:
        name: its name without suffix, such as "03_why_scale_the_loss".
        title: its heading without the number.
        minutes: as the lesson says, such as "10–15"; empty if it does not.
        exercises: how many it has.
        solved: how many of them a person has solved.
    """

    name: str
    title: str
    minutes: str
    exercises: int
    solved: int


def lesson_rows(shipped: Path, solved: Mapping[str, str]) -> list[LessonRow]:
    """Return a row for each shipped lesson; `solved` has the names of the solved exercises, such as "03-1"."""
    return [_row(shipped / name, name.removesuffix(".ipynb"), solved) for name in lesson_names(shipped)]


def _row(path: Path, name: str, solved: Mapping[str, str]) -> LessonRow:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    heading = re.match(r"#\s+(?:\d+\s+)?(.+)", sources[0] if sources else "")
    minutes = _MINUTES.search(" ".join(sources[:4]))
    exercises = sum(
        cell["cell_type"] == "code" and bool(re.fullmatch(r"exercise-\d", cell.get("id", ""))) for cell in cells
    )
    done = sum(each.startswith(f"{path.name[:2]}-") for each in solved)
    title = heading[1].strip() if heading else name
    return LessonRow(name, title, minutes[1].replace("到", "to") if minutes else "", exercises, min(done, exercises))


def lesson_table(rows: list[LessonRow]) -> str:
    """Return the rows as lines of text.

    >>> print(lesson_table([LessonRow("03_why", "Why", "10–15", 3, 1), LessonRow("04_levels", "Opt levels", "", 0, 0)]))
    03  Why         10–15 min     1 of 3 exercises
    04  Opt levels
    """
    widest = max((len(row.title) for row in rows), default=0)
    lines = []
    for row in rows:
        minutes = f"{row.minutes} min" if row.minutes else ""
        solved = f"{row.solved} of {row.exercises} exercises" if row.exercises else ""
        number = re.match(r"(?:\w+/)?\d\d", row.name)
        lines.append(f"{number[0] if number else row.name}  {row.title:{widest}}  {minutes:12}  {solved}".rstrip())
    return "\n".join(lines)
