"""Lines of text: what fits a page, and what does not and is broken."""

import pytest

from amplab.display.html import markup, name
from amplab.display.numbers import number, size
from amplab.display.table import Column, Table
from amplab.display.text import WIDTH, escape, fitted, labelled, visible, wrapped


def test_a_table_that_fits_is_left_alone():
    assert list(fitted([["a", "bb"], ["ccc", "1"]], right={1})) == [["a    bb"], ["ccc   1"]]


def test_cells_go_on_below_and_lose_nothing():
    path = "encoder.layers.11.a_residual_attention_block_with_a_long_name.query"
    lines = [["#", "module", "line", "why"], ["1000", path, "x" * 50 + "/file.py:12", "because " * 12]]
    for row, cells in zip(fitted(lines, right={0}), lines, strict=True):
        assert all(len(line) <= WIDTH for line in row)
        assert sorted("".join(row).replace(" ", "")) == sorted("".join(cells).replace(" ", ""))


def test_a_cell_that_is_cut_ends_in_dots():
    (*_, row) = fitted([["op", "why"], ["x" * 60, "because, " * 30]], cut={1})
    assert len(row) == 1
    assert row[0].startswith("x" * 60 + "  because, because")
    assert row[0].endswith("…")
    assert not row[0].endswith(",…")
    assert len(row[0]) <= WIDTH


def test_numbers_are_never_broken():
    (*_, row) = fitted([["a" * 100, "range"], ["b" * 100, "0.00033..3.38 2^-24..2^-10"]])
    assert {"0.00033..3.38", "2^-24..2^-10"} <= {word for line in row for word in line.split()}


@pytest.mark.parametrize(("given", "shown"), [(999, "999 B"), (1000, "1.00 kB"), (12345, "12.3 kB")])
def test_bytes(given, shown):
    assert size(given) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [(128.0, "128"), (0.5, "0.5"), (float("nan"), "NaN"), (float("inf"), "inf"), (0.0, "0")],
)
def test_numbers(given, shown):
    assert number(given) == shown


def test_a_sentence_keeps_its_units():
    text = wrapped("x" * 94 + " 512 kB and so on")
    assert text.splitlines()[1].strip() == "512 kB and so on"
    assert all(len(line) <= WIDTH for line in labelled("seen", "word " * 90).splitlines())


def test_a_word_that_fits_is_not_broken():
    reason = "lower_precision_fp list, linear: products of two halves"
    lines = [["op", "line", "why"], ["x" * 68, "two lines " * 2, reason]]
    (*_, row) = fitted(lines, right={0}, cut={2})
    ends = [line[85:].strip() for line in row]
    assert ends == ["lower_", "precision_fp l…"]


CONTROLS = ["\x1b[2J", "\x9b31m", "\x07", "\x00", "\r", "\u202egnp.exe", "\u2066", "\u200f", "\u2028", "\x7f", "\ud800"]


@pytest.mark.parametrize("control", CONTROLS)
def test_no_control_character_reaches_a_terminal(control):
    shown = (
        visible(f"a{control}b"),
        wrapped(f"a {control} b " * 30),
        labelled("seen", f"a{control}b"),
        *(line for row in fitted([["op", "why"], [f"x{control}", f"y{control} " * 40]]) for line in row),
    )
    for text in shown:
        assert control[0] not in text
        assert text.encode()
        assert control[0].encode("unicode_escape").decode() in text or text.startswith("op")


def test_letters_of_any_script_stay():
    text = "naïve Σ 数值 العربية 👩‍🔬\n\tindented"
    assert visible(text) == text


@pytest.mark.parametrize("text", ["fc.weight", "two\n\tlines", "\u05e9\u05dc\u05d5\u05dd", "\U0001f642"])
def test_text_without_control_characters_is_shown_as_it_is(text):
    assert visible(text) == escape(text) == text


def test_html_shows_control_characters_as_escapes():
    hostile = "\x1b[2J\u202e<b>\u2066"
    shown = r"\x1b[2J\u202e&lt;b&gt;\u2066"
    column = Column("module", as_html=name)
    assert shown in Table((column, hostile), [(hostile, hostile)]).html()
    assert visible(Table((column, hostile), [(hostile, hostile)], caption=hostile).html()).count(shown) == 5
    assert shown in markup(hostile)
