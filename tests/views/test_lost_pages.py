"""Pages that are lost without a goodbye are drawn for a while; pages that cannot be heard are drawn on."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from amplab.lab import History
from amplab.views.parts import MOST_UNANSWERED, LiveView


class Kernel:
    """A thread with a loop that delivers messages, as a kernel does between its cells."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def make(self, on_open: Callable[[], None]) -> LiveView:
        """Return a view that was made in the loop, as by a cell."""
        made: list[LiveView] = []
        self.loop.call_soon_threadsafe(lambda: made.append(LiveView(on_open)))
        self.is_free()
        return made[0]

    def tell(self, part: LiveView, **message: object) -> None:
        """Deliver a message of the page when the loop is free."""
        self.loop.call_soon_threadsafe(part._handle_custom_msg, message, [])

    def is_free(self) -> None:
        """Wait until the loop has done what it was told so far."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(done.set)
        assert done.wait(10)

    def end(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    if not made.loop.is_closed():
        made.end()


def frames(wire: list[dict]) -> list[dict]:
    """What the frames held so far, beside their rows; each is given once."""
    contents = [sent["data"].get("content", {}) for sent in wire]
    wire.clear()
    return [content for content in contents if content.get("kind") == "frame"]


@pytest.fixture
def opened() -> list[bool]:
    return []


@pytest.fixture
def live(kernel: Kernel, opened: list[bool], wire: list[dict]) -> Iterator[LiveView]:
    """A view that one page has opened."""
    made = kernel.make(lambda: opened.append(True))
    kernel.tell(made, type="hello", view="a")
    kernel.is_free()
    assert (made.is_open, len(opened)) == (True, 1)
    yield made
    made.close()


def draw(live: LiveView, kernel: Kernel, wire: list[dict], *, answering: tuple[str, ...] = (), limit: int) -> int:
    """Draw as the dashboard does, until no page is open, at most `limit` frames; return how many."""
    for drawn in range(limit):
        if not live.is_open:
            return drawn
        live.draw(History(), {})
        for frame in frames(wire):
            for view in answering if frame["asks"] else ():
                kernel.tell(live, type="seen", view=view)
        kernel.is_free()
    return limit


def test_a_lost_page_gets_a_minute_of_frames_and_any_message_opens_it_again(kernel, live, wire, opened) -> None:
    assert draw(live, kernel, wire, limit=5000) == MOST_UNANSWERED + 1
    assert len(opened) == 1
    for message in ({"type": "seen"}, {"type": "range", "low": 0, "high": 9}, {"type": "hello"}):
        kernel.tell(live, **message, view="a")
        kernel.is_free()
        assert live.is_open
        assert draw(live, kernel, wire, limit=5000) == MOST_UNANSWERED + 1
    assert len(opened) == 4
    assert live._ranges == {}


def test_a_page_that_answers_is_drawn_on_and_a_lost_one_beside_it_is_forgotten(kernel, live, wire, opened) -> None:
    kernel.tell(live, type="hello", view="lost")
    kernel.tell(live, type="range", view="lost", last=500)
    assert draw(live, kernel, wire, answering=("a",), limit=2000) == 2000
    assert (list(live._pages), live._ranges) == (["a"], {})
    assert len(opened) == 3, "an answer of a page that is open draws nothing more"


def test_pages_are_seldom_asked(kernel, live, wire) -> None:
    asked = 0
    for _ in range(1000):
        live.draw(History(), {})
        asked += sum(frame["asks"] for frame in frames(wire))
        kernel.is_free()
        kernel.tell(live, type="select", step=None)
    assert asked == 10


def test_a_page_is_drawn_on_while_a_cell_keeps_the_kernel_from_hearing_it(kernel, live, wire) -> None:
    over = threading.Event()
    kernel.loop.call_soon_threadsafe(over.wait, 60)
    asked = 0
    for _ in range(5 * MOST_UNANSWERED):
        live.draw(History(), {})
        for _ in filter(lambda frame: frame["asks"], frames(wire)):
            asked += 1
            kernel.tell(live, type="seen", view="a")
        assert live.is_open
    assert asked <= 1, "answers that nobody hears do not pile up"
    over.set()
    kernel.is_free()
    assert draw(live, kernel, wire, answering=("a",), limit=2 * MOST_UNANSWERED) == 2 * MOST_UNANSWERED


def test_a_loop_that_has_ended_ends_no_drawing(kernel, live, wire) -> None:
    kernel.end()
    for _ in range(2 * MOST_UNANSWERED):
        live.draw(History(), {})
    assert live.is_open


CELLS = """
import asyncio
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
callbacks = shell.events.callbacks


def run(cell):
    shell.run_cell(cell).raise_error()
    print(*(sum("amplab" in str(each) for each in callbacks[name]) for name in ("pre_execute", "post_execute")))


async def kernel():
    run("from amplab.views.parts import LiveView")
    for _ in range(2):
        run("one, other = (LiveView(lambda: None) for _ in range(2))")
        run("one.close()")
        run("other.close(); other.close()")

asyncio.run(kernel())
"""


def test_nothing_is_left_in_ipython_after_the_last_view_is_closed() -> None:
    """Dashboards of one kernel share one pair of callbacks."""
    done = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["0 0", *["1 1", "1 1", "0 0"] * 2]
