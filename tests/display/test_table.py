"""Tables and cards: one description, the same content as text and as HTML."""

from html_outline import outline

from amplab.display.html import Markup, dtype_chips, page
from amplab.display.table import Card, Cell, Column, Table

COLUMNS = ("op", Column("bytes", right=True), "note", Column("dtype", as_html=dtype_chips), "drawn")
DRAWING = Cell("", Markup('<svg class="small" role="img" aria-label="drawn"></svg>'))
LINES = [("add", "8", "-", "float16", DRAWING), ("linear", "128", "", "float32", DRAWING)]


def test_a_column_without_content_is_left_out_of_both_forms():
    table = Table(COLUMNS, LINES, "Ops")
    assert str(table).split("\n")[0].split() == ["op", "bytes", "dtype"]
    assert outline(table.html()).words.startswith("Opsopbytesdtypedrawn")


def test_a_cell_with_its_own_html_uses_it_only_in_html():
    html = Table(COLUMNS, LINES, "Ops").html()
    assert html.count("<svg") == 2
    assert html.count("data-dtype") == 2
    assert "<" not in str(Table(COLUMNS, LINES, "Ops"))


def test_numbers_end_at_the_same_place_and_groups_have_a_heading():
    table = Table(COLUMNS, LINES, "Ops", groups=["forward", "backward"], chosen={1})
    lines = str(table).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("--")] == ["forward", "backward"]
    assert lines[2].index("8") == lines[4].index("128") + 2
    read = outline(table.html())
    assert len(read.named("th", "rowgroup")) == 2
    assert [each.get("class") for each in read.named("tr")] == [None, "group", None, "group", "chosen"]


def test_a_table_without_lines_keeps_its_titles():
    assert str(Table(("op", "bytes"), [])) == "op  bytes"


def test_a_card_says_the_same_twice():
    card = Card("A <sentence>", ("a paragraph", DRAWING.html, Table(COLUMNS, LINES, "Ops"), "an end"))
    table = Table(COLUMNS, LINES, "Ops")
    assert str(card) == f"A <sentence>\na paragraph\n\n{table}\n\nan end"
    read = outline(card.html())
    assert read.words.startswith("A <sentence>a paragraphOpsopbytes")
    assert read.words.endswith("an end")
    assert read.counts["p"] == 3


def test_a_card_of_one_sentence():
    assert str(Card("nothing found")) == "nothing found"
    assert Card("nothing found").html() == page("nothing found")
