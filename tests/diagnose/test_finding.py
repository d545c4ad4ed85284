"""A finding prints what it knows, and findings stand in the order in which to look at them."""

import json

import pytest
from html_outline import outline

from amplab.diagnose.finding import Finding, Findings


def finding(name="eps-lost", severity="warning", **fields):
    words = {"symptom": "0 < eps", "cause": "it is <b>small</b>", "remedy": "eps = 1e-4"}
    return Finding(name, severity, **{**words, **fields})


def test_it_prints_every_part_that_it_has():
    printed = str(finding(op="add", module="norm", tensor="input 0", line="model.py:7", evidence={"eps": 1e-8}))
    assert printed.splitlines() == [
        "[warning] eps-lost: add in norm, input 0, model.py:7",
        "  seen      0 < eps",
        "  because   it is <b>small</b> (certain)",
        "  numbers   eps = 1e-08",
        "  to do     eps = 1e-4",
    ]


def test_it_leaves_out_what_it_lacks():
    assert str(finding()).splitlines()[0] == "[warning] eps-lost"
    assert "numbers" not in str(finding())


def test_html_escapes_what_comes_from_the_user():
    html = finding(module="<script>", evidence={"<i>": "<u>"})._repr_html_()
    assert "<script>" not in html
    assert "it is &lt;b&gt;small" in html
    assert "<dt>&lt;i&gt;</dt><dd>&lt;u&gt;</dd>" in html


def test_as_dict_is_ready_for_json():
    given = finding(evidence={"eps": 1e-8, "result": "loss"})
    assert json.loads(json.dumps(given.as_dict()))["evidence"] == {"eps": 1e-8, "result": "loss"}


def test_rank_is_severity_then_certainty_then_the_order_given():
    given = [
        finding("a", "note"),
        finding("b", "error", certainty="possible"),
        finding("c", "warning"),
        finding("d", "error"),
        finding("e", "error"),
    ]
    assert [each.name for each in Findings.ranked(given)] == ["d", "e", "b", "c", "a"]
    assert [each.name for each in Findings.ranked(given).harmful] == ["d", "e", "b", "c"]


def test_the_same_finding_counts_once():
    assert len(Findings.ranked([finding(module="a"), finding(module="a"), finding(module="b")])) == 2


def test_nothing_found_says_so():
    assert (str(Findings()), len(Findings()), repr(Findings())) == ("nothing found", 0, "<Findings: nothing found>")
    assert "nothing found" in outline(Findings()._repr_html_()).words


def test_the_harmful_ones_lie_open_and_the_style_comes_once():
    found = Findings.ranked([finding(), finding("a", "note"), finding("b", "error"), finding("c", "note")])
    page = outline(found._repr_html_())
    assert repr(found) == "<Findings: 1 error, 1 warning, 2 notes>"
    assert page.words.startswith("1 error, 1 warning, 2 notes")
    details = [(each["data-severity"], "open" in each) for each in page.named("details")]
    assert details == [("error", True), ("warning", True), ("note", False), ("note", False)]
    assert page.counts["style"] == 1
    assert "open" in outline(finding("a", "note")._repr_html_()).named("details")[0]


def test_a_remedy_is_code_as_it_was_given():
    remedy = "policy = {\"a\": 'b'}\nif x < 1:\n    y = 2"
    assert remedy in outline(finding(remedy=remedy)._repr_html_()).text
    assert str(finding(remedy=remedy)).endswith(remedy.replace("\n", "\n" + " " * 12))


def test_long_words_stay_within_a_page_and_code_is_not_broken():
    long = finding(symptom="word " * 60, cause="why " * 60, remedy="x" * 200, evidence=dict.fromkeys("abcdefgh" * 9, 1))
    *lines, code = str(long).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) > 5
    assert code.endswith("x" * 200)


def test_numbers_are_those_of_people():
    printed = str(finding(evidence={"loss_scale": 65536.0, "elements": 9216, "eps": 1e-8, "absmax": 0.46973}))
    assert "loss_scale = 2^16, elements = 9,216, eps = 1e-08, absmax = 0.4697" in printed


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"severity": "fatal"}, "severity='fatal'"), ({"name": "Eps lost"}, "name='Eps lost'")],
)
def test_other_words_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        finding(**fields)


def test_other_certainties_are_refused():
    with pytest.raises(ValueError, match="certainty='sure'"):
        finding(certainty="sure")
