"""Progress: a line that is rewritten on a terminal, finished rows elsewhere."""

import io

from amplab.bench import Goal, Row
from amplab.bench.suites import Progress

ROW = Row("a", "b", Goal("at least", 3.0), 2.0, (1.9, 2.1))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def follow(stream):
    progress = Progress(2, 5, stream)
    progress.begin(0, "a")
    progress.round(1)
    progress.end(ROW)
    return stream.getvalue()


def test_a_file_gets_finished_rows():
    assert follow(io.StringIO()) == "1/2 a: 2.00 (≥ 3)\n"


def test_a_terminal_sees_the_rounds():
    clear = "\r\x1b[K"
    assert follow(Terminal()) == f"{clear}1/2 a …{clear}1/2 a: round 1 of 5{clear}1/2 a: 2.00 (≥ 3)\n"
