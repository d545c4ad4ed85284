"""Growing columns return what was appended, wherever the rows are: in memory, in the file, or on a full disk."""

import os
import tempfile

import numpy as np
import pytest

from amplab.lab.growing_columns import CHUNK, MOST_IN_MEMORY, GrowingColumns

KINDS = {"step": np.int64, "loss": np.float64, "skipped": np.bool_}
LONG = MOST_IN_MEMORY + 2 * CHUNK + 12_345


def values(count: int, start: int = 0) -> dict[str, np.ndarray]:
    steps = np.arange(start, start + count)
    return {"step": steps, "loss": np.sin(steps), "skipped": steps % 7 == 3}


def grown(pieces: list[int]) -> GrowingColumns:
    columns = GrowingColumns(KINDS)
    for piece in pieces:
        columns.extend(values(piece, len(columns)))
    return columns


def assert_holds(columns: GrowingColumns, count: int) -> None:
    """Ranges and positions around every border are those of plain arrays."""
    expected = values(count)
    assert len(columns) == count
    borders = [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 1, MOST_IN_MEMORY, count - CHUNK, count - 2, count]
    for name, array in expected.items():
        for start in borders:
            for end in (*borders, None):
                rows = slice(max(start, 0), end)
                np.testing.assert_array_equal(columns.read(name, rows), array[rows])
        np.testing.assert_array_equal(columns.read(name, slice(-5, None)), array[-5:])
        positions = np.random.default_rng(0).integers(0, count, 1000)
        np.testing.assert_array_equal(columns.read(name, positions), array[positions])
        assert columns.read(name, positions[:0]).dtype == array.dtype == columns.read(name, slice(3, 2)).dtype


@pytest.mark.parametrize("pieces", [[LONG], [256] * 700 + [3 * CHUNK], [CHUNK, CHUNK, 1, CHUNK - 1, 2 * CHUNK, 77]])
def test_rows_come_back_from_memory_and_from_the_file(pieces):
    assert_holds(grown(pieces), sum(pieces))


def test_what_was_read_is_a_copy():
    columns = grown([LONG])
    for rows in (slice(0, 10), slice(LONG - 10, None), np.arange(10)):
        columns.read("loss", rows)[:] = 7.0
    assert_holds(columns, LONG)


def test_a_folder_without_room_leaves_the_rows_in_memory(monkeypatch):
    opened = []

    def full(**kwargs):
        opened.append(open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
        return opened[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert_holds(grown([1000] * 600), 600_000)
    assert len(opened) == 1, "it is not tried again at every step"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_that_goes_on_changes_nothing_here():
    columns = grown([MOST_IN_MEMORY, CHUNK])
    wait, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(wait, 1)
            for _ in range(5):
                columns.extend({name: each * 0 for name, each in values(CHUNK).items()})
            os._exit(int(len(columns) != 8 * CHUNK or columns.read("step", slice(CHUNK, CHUNK + 1))[0] != CHUNK))
        finally:
            os._exit(2)
    columns.extend(values(3 * CHUNK, len(columns)))
    os.write(go_on, b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(wait)
    os.close(go_on)
    assert_holds(columns, 6 * CHUNK)
