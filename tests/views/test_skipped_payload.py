"""The table of skipped steps."""

import json
import math

import pytest

from amplab.lab import ExperimentConfig, History, SkipExplanation, Trainer
from amplab.lab.history import row_of
from amplab.views.tabs.skipped_payload import skipped_payload


def spiral(record, skips, *, faults=None):
    history = History()
    for step in range(max(skips) + 2):
        history.append(record(step, skipped=step in skips, injected=(faults or {}).get(step)))
    return history


def steps(payload):
    return [row["steps"] for row in payload["rows"]]


def test_the_first_skip_is_on_top_and_the_others_follow_newest_first(eventful: History, record) -> None:
    payload = skipped_payload(eventful)
    assert steps(payload) == ["5", "8"]
    assert [row["is_first"] for row in payload["rows"]] == [True, False]
    first = payload["rows"][0]
    assert (first["before"], first["after"], first["level"], first["times"]) == (65536.0, 32768.0, "O1", "")
    assert payload["count"] == "2"
    assert payload["summary"] == "2 steps skipped. The first one comes first."
    assert steps(skipped_payload(spiral(record, {1, 4, 9, 12}))) == ["1", "12", "9", "4"]


def test_the_first_skip_stays_on_top_of_any_number_of_rows(record) -> None:
    payload = skipped_payload(spiral(record, set(range(3, 900, 2))), limit=20)
    assert steps(payload) == ["3", *(str(step) for step in range(899, 899 - 2 * 19, -2))]
    assert payload["count"] == "449"
    assert payload["summary"].startswith("449 steps skipped; the first and the latest 19 rows are listed.")


def test_thousands_of_skips_that_follow_one_another_are_one_row(record) -> None:
    history = spiral(record, set(range(1, 3000)))
    history.explain(SkipExplanation(1, "divergence", "diverged: the loss is 2.6e23"))
    (row,) = skipped_payload(history)["rows"]
    assert (row["steps"], row["times"], row["label"]) == ("1 – 2,999", "2,999 in a row", "divergence")
    assert row["why"] == "step 1: diverged: the loss is 2.6e23"


def test_a_row_begins_where_the_reason_changes_and_where_a_fault_goes_in(record) -> None:
    history = spiral(record, set(range(2, 10)), faults={4: "overflow"})
    history.explain(SkipExplanation(2, "scale", "fits at 2¹⁸"))
    history.explain(SkipExplanation(4, "injected", "injected overflow"))
    history.explain(SkipExplanation(5, "scale", "fits at 2¹⁵"))
    history.explain(SkipExplanation(6, "scale", "fits at 2¹⁴"))
    history.explain(SkipExplanation(8, "format", "65504"))
    rows = skipped_payload(history)["rows"]
    assert [(row["steps"], row["kind"]) for row in rows] == [
        ("2 – 3", "scale"),
        ("8 – 9", "format"),
        ("5 – 7", "scale"),
        ("4", "injected"),
    ]
    assert rows[0]["why"] == "step 2: fits at 2¹⁸"
    assert rows[3]["why"] == "injected overflow"


def test_the_first_skip_is_on_top_even_if_the_reason_changes_within_its_row(record) -> None:
    history = spiral(record, {*range(2, 10), 20})
    history.explain(SkipExplanation(2, "scale", "fits at 2¹⁸"))
    history.explain(SkipExplanation(6, "format", "65504"))
    assert steps(skipped_payload(history)) == ["2 – 5", "20", "6 – 9"]


def test_a_row_without_a_reason_says_whether_it_can_still_be_had(eventful: History, record) -> None:
    eventful.append(eventful.record(-1).__class__(**{**_fields(eventful.record(8)), "step": 10}))
    first, newest, older = skipped_payload(eventful, explainable=(10,), walkable=(10,))["rows"]
    assert newest["explain"] == newest["walk"] == 10
    assert newest["why"].startswith("Not explained yet: ")
    assert older["explain"] is older["walk"] is None
    assert "cannot run again any more" in older["why"]
    assert older["why"].endswith("First gradient that is not finite: hidden.weight.")
    assert first["explain"] is None


def test_a_row_offers_the_first_of_its_steps_that_can_run_again_or_the_explained_one(record) -> None:
    history = spiral(record, {*range(2, 10), 20, 30})
    kept = (5, 6, 7, 8, 9, 30)
    rows = {row["steps"]: row for row in skipped_payload(history, explainable=kept, walkable=kept)["rows"]}
    assert {name: (row["explain"], row["walk"]) for name, row in rows.items()} == {
        "2 – 9": (5, 5),
        "20": (None, None),
        "30": (30, 30),
    }
    history.explain(SkipExplanation(7, "scale", "fits at 2¹⁸"))
    (first, *_) = skipped_payload(history, explainable=kept, walkable=kept)["rows"]
    assert (first["explain"], first["walk"]) == (None, 7)


def _fields(record):
    return {name: getattr(record, name) for name in record.__slots__}


def test_nothing_skipped_is_explained() -> None:
    payload = skipped_payload(History())
    assert payload["rows"] == []
    assert payload["count"] == ""
    assert payload["summary"].startswith("A dynamic loss scale skips")


@pytest.mark.parametrize(("loss", "word"), [(math.nan, "NaN"), (math.inf, "inf")])
def test_a_loss_that_stays_non_finite_is_reported_with_its_first_step(record, loss: float, word: str) -> None:
    history = History()
    for step in range(6):
        history.append(record(step, loss=loss if step in (1, 3, 4, 5) else 1.0))
    assert skipped_payload(history)["summary"].startswith(f"The loss is {word} since step 3.")


def test_a_skipped_or_past_nan_is_not_reported(record, eventful: History) -> None:
    assert "since step" not in skipped_payload(eventful)["summary"]
    eventful.append(record(10, loss=math.nan, skipped=True))
    assert "since step" not in skipped_payload(eventful)["summary"]
    eventful.append(record(11, loss=math.nan))
    summary = skipped_payload(eventful)["summary"]
    assert summary.startswith("The loss is NaN since step 10.")
    assert "3 steps skipped." in summary


def test_a_missing_loss_is_not_reported_as_nan(record) -> None:
    """A watched loop may not tell its losses; what is NaN in their records has damaged nothing."""
    history = History()
    for step in range(3):
        history.append_row((*row_of(record(step))[:1], None, *row_of(record(step))[2:]))
    assert skipped_payload(history)["summary"].startswith("A dynamic loss scale skips")
    history.append(record(3, loss=math.nan))
    assert skipped_payload(history)["summary"].startswith("The loss is NaN since step 3.")
    assert [history.loss(row) for row in range(3)] == [None] * 3
    assert math.isnan(history.loss(3))
    assert (history.loss(4), history.loss(-5)) == (None, None)


def test_the_payload_of_a_real_run_is_plain_values() -> None:
    trainer = Trainer(ExperimentConfig(hidden=16, init_scale=2.0**24))
    history = trainer.run(30)
    assert history.skip_count > 0
    json.dumps(skipped_payload(history))  # NumPy's bool and numbers raise here and in the kernel
