"""Tables and cards with two forms: text of at most 100 columns, and HTML."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from amplab.display.html import Markup, html_table, markup, page
from amplab.display.text import WIDTH, fitted, wrapped

__all__ = ["Card", "Cell", "Column", "Table"]

_NOTHING = ("", "-", "–")


class Cell(str):
    """Text with a separate HTML form, such as a drawing.

    >>> cell = Cell("2^-3 to 2^4", Markup("<svg></svg>"))
    >>> cell, cell.html
    ('2^-3 to 2^4', '<svg></svg>')
    """

    __slots__ = ("html",)
    html: Markup

    def __new__(cls, text: str, html: Markup) -> "Cell":
        """Create a cell from both forms."""
        cell = super().__new__(cls, text)
        cell.html = html
        return cell


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: the heading of the column.
        right: whether cells are right-aligned, as for numbers.
        cut: whether text that is too long is truncated; other columns wrap it.
        as_html: returns the HTML form of a cell that is not a `Cell`.
    """

    title: str
    right: bool = False
    cut: bool = False
    as_html: Callable[[str], Markup] = markup

    def html(self, cell: str) -> Markup:
        """Return the HTML form of a cell."""
        return cell.html if isinstance(cell, Cell) else self.as_html(cell)


@dataclass(frozen=True)
class Table:
    """Lines of cells under titles; columns without any content are left out.

    Attributes:
        columns: a column, or only its title, for each cell of a line.
        lines: the cells.
        caption: what the table is, for screen readers.
        groups: the group of each line; a heading comes before the first line of each.
        chosen: the lines that HTML emphasizes.

    >>> print(Table(("op", Column("bytes", right=True)), [("add", "8"), ("linear", "128")]))
    op      bytes
    add         8
    linear    128
    """

    columns: Sequence[Column | str]
    lines: Sequence[Sequence[str]]
    caption: str = ""
    groups: Sequence[str] = ()
    chosen: Container[int] = field(default=())

    def __str__(self) -> str:
        head, *rows = self.text_rows()
        return "\n".join([*head, *_grouped(rows, self.groups)])

    def text_rows(self) -> list[list[str]]:
        """Return the lines of text of the titles, then those of each line of the table."""
        columns, lines = self._filled(lambda _, cell: cell)
        right = {place for place, column in enumerate(columns) if column.right}
        cut = {place for place, column in enumerate(columns) if column.cut}
        return list(fitted([[column.title for column in columns], *lines], right, cut))

    def html(self) -> Markup:
        """Return the table as HTML."""
        columns, lines = self._filled(Column.html)
        return html_table(
            [column.title for column in columns],
            lines,
            {place for place, column in enumerate(columns) if column.right},
            caption=self.caption,
            groups=self.groups,
            chosen=self.chosen,
        )

    def _filled(self, shown: Callable[[Column, str], str]) -> tuple[list[Column], list[list[str]]]:
        """Return the columns that have content, and their cells after `shown`."""
        columns = [each if isinstance(each, Column) else Column(each) for each in self.columns]
        lines = [[shown(column, cell) for column, cell in zip(columns, line, strict=True)] for line in self.lines]
        kept: Sequence[int] = range(len(columns))
        if lines:
            kept = [place for place in kept if any(line[place] not in _NOTHING for line in lines)]
        return [columns[place] for place in kept], [[line[place] for place in kept] for line in lines]


@dataclass(frozen=True)
class Card:
    """A result: a summary sentence and the parts below it.

    Attributes:
        lead: the sentence; may be empty.
        parts: paragraphs of text, tables, and HTML without a text form.
    """

    lead: str
    parts: tuple[str | Table, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._text()).strip("\n")

    def _text(self) -> Iterator[str]:
        if self.lead:
            yield wrapped(self.lead)
        shown = [part for part in self.parts if not isinstance(part, Markup)]
        for is_table, parts in groupby(shown, key=lambda part: isinstance(part, Table)):
            if is_table:
                yield from (f"\n{part}\n" for part in parts)
            else:
                yield from map(wrapped, map(str, parts))

    def html(self) -> str:
        """Return the card as a piece of a page."""
        return page(self.lead, *map(_part_html, self.parts))


def _part_html(part: str | Table) -> Markup:
    if isinstance(part, Table):
        return part.html()
    return part if isinstance(part, Markup) else Markup(f"<p>{markup(part)}</p>")


def _grouped(rows: Iterable[list[str]], groups: Sequence[str]) -> Iterator[str]:
    """The lines of text of all rows, with a rule before the rows of each group."""
    numbered = enumerate(rows)
    for name, members in groupby(numbered, key=lambda row: groups[row[0]] if groups else ""):
        if name:
            yield f"-- {name} ".ljust(WIDTH, "-")
        yield from (line for _, lines in members for line in lines)
