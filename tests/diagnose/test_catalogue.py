"""The catalogue names every finding once, with sentences and remedies that can be filled in for every API."""

import ast
import string
from pathlib import Path

import pytest

import amplab
from amplab.diagnose import CATALOGUE, Finding
from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import SEVERITIES
from amplab.diagnose.ranking import ranked
from amplab.diagnose.remedies.api_styles import Api, ApiStyle, PerApi

PACKAGE = Path(amplab.__file__).parent


def texts_of(name):
    for case in CATALOGUE[name].cases:
        for said in CATALOGUE[name].texts(case):
            yield from (said,) if isinstance(said, str) else (*said.texts.values(), said.otherwise)


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_entry_can_be_read(name):
    entry = CATALOGUE[name]
    assert entry.id == name
    assert set(entry.severities) <= set(SEVERITIES)
    assert list(entry.severities) == sorted(set(entry.severities), key=entry.severities.index)
    assert not entry.title.endswith(".")
    assert {*entry.supersedes, *entry.supersedes_as_error, *entry.explains} <= {*CATALOGUE}
    for symptom, cause, remedy in map(entry.texts, entry.cases):
        assert str(symptom)[-1] in ".}"
        assert cause
        assert remedy
    for text in texts_of(name):
        assert all(field is None or field.isidentifier() for _, field, _, _ in string.Formatter().parse(text))
    assert name in str(CATALOGUE)
    assert entry.title in str(entry)


@pytest.mark.parametrize("style", ApiStyle)
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_remedy_without_fields_compiles_for_every_api(name, style):
    for _, _, remedy in map(CATALOGUE[name].texts, CATALOGUE[name].cases):
        try:
            code = remedy.text(Api(style, style), {}) if isinstance(remedy, PerApi) else remedy.format_map({})
        except KeyError:
            continue  # a field that the rule provides
        compile(code.replace("...", "lr=0.1") if "torch.optim" in code else code, "remedy", "exec")


def ids_in(path):
    """The ids that the code of a file passes to `finding`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if called and node.func.id in ("finding", "_Verdict", "_finding") and node.args:
            yield from (e.value for e in ast.walk(node.args[0]) if isinstance(e, ast.Constant) and "-" in str(e.value))


def test_rules_take_from_the_catalogue_alone():
    """No rule words a finding of its own."""
    own = []
    for path in (*PACKAGE.glob("diagnose/rules/*.py"), *PACKAGE.glob("lab/*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        own += [path.name for node in calls if getattr(node.func, "id", "") == "Finding" and node.args]
        assert {*ids_in(path)} - {"nonfinite-"} <= {*CATALOGUE}, path
    assert own == []


def test_a_severity_that_the_entry_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'error'"):
        finding("launch-bound", severity="error", evidence={"ops": 1, "median_elements": 1})
    with pytest.raises(KeyError):
        finding("launch-bound")
    with pytest.raises(KeyError):
        finding("no-such-finding")


RULES = [
    path for path in PACKAGE.glob("diagnose/rules/*.py") if path.stem not in ("__init__", "out_of_float32", "raised")
]


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_the_heading_of_a_file_names_its_findings(path):
    heading = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    named = {word.strip(",") for word in heading.split()} & {*CATALOGUE}
    assert named >= {*ids_in(path)} - {"nonfinite-"}


def made(name, severity="error", certainty="certain", **evidence):
    return Finding(name, severity, "seen", "why", "code", certainty, evidence=evidence)


@pytest.mark.parametrize(
    ("found", "left"),
    [
        (("nonfinite-loss", "scale-collapse", "adam-on-half"), ["adam-on-half"]),
        (("diverging", "adam-on-half"), ["adam-on-half"]),
        (("nonfinite-parameter", "nonfinite-loss", "scale-collapse"), ["nonfinite-parameter"]),
        (("nonfinite-loss", "scale-collapse"), ["nonfinite-loss", "scale-collapse"]),
        (("a-finding-of-ones-own", "scale-collapse"), ["a-finding-of-ones-own"]),
    ],
)
def test_what_an_error_supersedes(found, left):
    assert [each.name for each in ranked(map(made, found))] == left
    assert [each.name for each in ranked([*map(made, found), made("still-skipping", "note")])] == left


def test_a_note_supersedes_what_its_entry_says():
    skipping = made("still-skipping", "note")
    assert ranked([skipping, made("launch-bound", "note")])[0] is skipping
    for name in ("scale-too-large", "nonfinite-gradient"):
        assert [each.name for each in ranked([skipping, made(name, "note")])] == [name]


def test_divergence_explains_an_overflow_unless_float32_refutes_it():
    diverging, overflow = made("diverging", first_loss=2.0), {"not_finite": "loss"}
    found = ranked([diverging, made("overflow-in-half", loss_in_float32=1e9, **overflow)])
    assert [(each.name, each.certainty) for each in found] == [
        ("diverging", "certain"),
        ("overflow-in-half", "possible"),
    ]
    found = ranked([diverging, made("overflow-in-half", loss_in_float32=1.0, **overflow)])
    assert [(each.name, each.certainty) for each in found] == [("overflow-in-half", "certain")]


@pytest.mark.parametrize(("loss_now", "left"), [(20.0, ["infinite-value"]), (1e4, ["diverging", "infinite-value"])])
def test_a_cause_that_is_certain_leaves_no_divergence_beside_it_unless_the_loss_exploded(loss_now, left):
    diverging = made("diverging", certainty="likely", first_loss=2.0, loss_now=loss_now)
    found = ranked([diverging, made("infinite-value", not_finite="loss")])
    assert sorted(each.name for each in found) == left
    at_once = made("diverging", certainty="likely", first_loss=2.0, steps_lost=5)
    assert [each.name for each in ranked([at_once, made("infinite-value", not_finite="loss")])] == ["infinite-value"]


def test_what_settles_by_itself_comes_last_and_once():
    notes = [Finding("scale-too-large", "note", "seen", "why", "code", op=op) for op in ("linear", "cast")] + [
        made("launch-bound", "note", "possible")
    ]
    assert [each.name for each in ranked(notes)] == ["launch-bound", "scale-too-large"]


WORDS_OF_NO_ENGINEER = (
    "fitting_scale",
    "weight_at_most",
    "result = ",
    "tiny-ops",
    "aten.",
    "halves bear",
    "nothing to do",
)


def test_no_finding_uses_a_word_that_an_engineer_does_not_know():
    for path in (*PACKAGE.glob("diagnose/rules/*.py"), *PACKAGE.glob("diagnose/catalogue/*.py")):
        texts = [
            each.value
            for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        found = [(word, text) for word in WORDS_OF_NO_ENGINEER for text in texts if word in text]
        assert not found, path
