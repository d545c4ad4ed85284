"""A finding prints what it knows, and findings stand in the order in which to look at them."""

import json

import pytest

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
    assert "&lt;i&gt; = &lt;u&gt;" in html


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
    assert (str(Findings()), len(Findings()), Findings()._repr_html_()) == (
        "nothing found",
        0,
        "<div>nothing found</div>",
    )


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
