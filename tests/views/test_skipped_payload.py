"""The table of skipped steps."""

import math

import pytest

from amplab.lab import Experiment, ExperimentConfig, History
from amplab.views.tabs.skipped_payload import explanation, is_broken, skipped_payload


def test_one_row_for_each_skip_newest_first(eventful: History) -> None:
    payload = skipped_payload(eventful)
    assert payload["rows"] == [
        {
            "step": 8,
            "before": 32768.0,
            "after": 65536.0,
            "tensor": "hidden.weight",
            "level": "O2",
            "cause": "unknown; no fault injected",
        },
        {
            "step": 5,
            "before": 65536.0,
            "after": 32768.0,
            "tensor": "output.bias",
            "level": "O1",
            "cause": "injected overflow",
        },
    ]
    assert payload["count"] == "2"
    assert payload["summary"] == "2 steps skipped, 1 with an injected fault."


def test_a_spiral_lists_the_latest_and_says_how_many_there_are(record) -> None:
    history = History()
    for step in range(50):
        history.append(record(step, skipped=True))
    payload = skipped_payload(history, limit=20)
    assert [row["step"] for row in payload["rows"]] == list(range(49, 29, -1))
    assert payload["summary"].startswith("50 steps skipped; the latest 20 are listed")
    assert payload["count"] == "50"


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
    assert not is_broken(eventful)
    assert "since step" not in skipped_payload(eventful)["summary"]
    eventful.append(record(10, loss=math.nan, skipped=True))
    assert "since step" not in skipped_payload(eventful)["summary"]
    eventful.append(record(11, loss=math.nan))
    summary = skipped_payload(eventful)["summary"]
    assert summary.startswith("The loss is NaN since step 10.")
    assert summary.endswith("3 steps skipped, 1 with an injected fault.")


def test_what_a_replay_found_stands_in_the_row(eventful: History) -> None:
    rows = skipped_payload(eventful, {8: "scale too large: linear", 5: "leaves float16"})["rows"]
    assert [row["cause"] for row in rows] == ["scale too large: linear", "injected overflow; leaves float16"]


def test_a_replay_in_a_few_words() -> None:
    experiment = Experiment(ExperimentConfig(hidden=16))
    experiment.step()
    experiment.inject("overflow")
    assert experiment.step().skipped
    assert explanation(experiment.explain_skip()).startswith(
        ("loss scale too large: ", "overflows float16", "not finite in")
    )
    experiment.inject("nan")
    experiment.step()
    assert explanation(experiment.explain_skip()).startswith("batch not finite: batch.images")
    assert explanation(None).startswith("not reproduced")
