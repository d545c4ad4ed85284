"""An entry of the catalogue of findings, and the catalogue as a mapping that prints as text.

The entries themselves are in the other files of this package, by subject.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from amplab.diagnose.finding import Severity
from amplab.diagnose.remedies.api_styles import PerApi

__all__ = ["Case", "Catalogue", "CatalogueEntry", "OF_THE_RUN", "SYMPTOMS"]

# Symptoms without a specific cause: omitted if an error names the cause.
OF_THE_RUN = ("scale-collapse", "nonfinite-loss", "still-skipping")
SYMPTOMS = (*OF_THE_RUN, "nonfinite-parameter")

Text = str | PerApi


class Case(NamedTuple):
    """What a finding says in one situation. An empty text is that of the entry's first case.

    Args:
        symptom: what was observed, one sentence.
        cause: why, one or two sentences.
        remedy: code to paste.
    """

    symptom: Text = ""
    cause: Text = ""
    remedy: Text = ""


@dataclass(frozen=True)
class CatalogueEntry:
    """One kind of finding.

    Args:
        id: lower-case words joined by hyphens.
        title: what it means, in one line.
        severities: the usual one first; a rule may choose a later one where a run shows less harm.
        cases: situation -> what is said, the usual one first; its name is "" where it needs none.
        supersedes: ids that are omitted if this one is found.
        supersedes_as_error: ids that are left out where this one is an error.
        explains: ids that this one may be the cause of: their certainty becomes "possible".
        settles: as a note it needs no action: a report shows one such note, and shows it last.
    """

    id: str
    title: str
    severities: tuple[Severity, ...]
    cases: Mapping[str, Case]
    supersedes: tuple[str, ...] = ()
    supersedes_as_error: tuple[str, ...] = SYMPTOMS
    explains: tuple[str, ...] = ()
    settles: bool = False

    def texts(self, case: str) -> tuple[Text, Text, Text]:
        """Return symptom, cause and remedy of a case."""
        said, first = self.cases[case], next(iter(self.cases.values()))
        return said.symptom or first.symptom, said.cause or first.cause, said.remedy or first.remedy

    def __str__(self) -> str:
        lines = [f"{self.id} [{', '.join(self.severities)}]", f"  {self.title}"]
        if self.supersedes:
            lines.append(f"  supersedes: {', '.join(self.supersedes)}")
        if "error" in self.severities:
            lines.append(f"  as an error, supersedes: {', '.join(self.supersedes_as_error)}")
        if self.explains:
            lines.append(f"  may explain: {', '.join(self.explains)}")
        for name, case in self.cases.items():
            lines += [f"  case {name}:"] if len(self.cases) > 1 and name else []
            lines += [line for word, said in zip(_WORDS, case, strict=True) if said for line in _shown(word, said)]
        return "\n".join(lines)


class Catalogue(Mapping[str, CatalogueEntry]):
    """Id -> entry, in the order in which a person reads them; prints as text."""

    def __init__(self, entries: Iterable[CatalogueEntry]) -> None:
        self._entries = {each.id: each for each in entries}

    def __getitem__(self, name: str) -> CatalogueEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.values()))

    def __repr__(self) -> str:
        return f"<Catalogue: {len(self)} findings>"


_WORDS = ("seen", "because", "to do")


def _shown(word: str, said: Text) -> Iterator[str]:
    """A text as lines; one that differs between APIs once for each group of styles that share it."""
    if isinstance(said, str):
        groups = {said: ""}
    else:
        texts = list(dict.fromkeys(said.texts.values()))
        shared = {each: [style.name for style in said.texts if said.texts[style] == each] for each in texts}
        groups = {text: f" ({', '.join(names)})" for text, names in shared.items()}
        groups |= {said.otherwise: f" (other {said.by})"}
    for text, styles in groups.items():
        if "\n" not in text:
            yield f"    {word}{styles}: {text}"
            continue
        yield f"    {word}{styles}:"
        yield from (f"        {line}" for line in text.split("\n"))
