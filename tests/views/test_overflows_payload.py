"""The table of skipped steps."""

from amplab.lab import History
from amplab.views.overflows_payload import overflows_payload


def test_one_row_for_each_skip_newest_first(eventful: History) -> None:
    payload = overflows_payload(eventful)
    assert payload["rows"] == [
        {
            "step": 8,
            "before": 32768.0,
            "after": 65536.0,
            "tensor": "hidden.weight",
            "level": "O2",
            "cause": "not injected",
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
    payload = overflows_payload(history, limit=20)
    assert [row["step"] for row in payload["rows"]] == list(range(49, 29, -1))
    assert payload["summary"].startswith("50 steps skipped; the latest 20 are listed")
    assert payload["count"] == "50"


def test_nothing_skipped_is_explained() -> None:
    payload = overflows_payload(History())
    assert payload["rows"] == []
    assert payload["count"] == ""
    assert payload["summary"].startswith("A dynamic scale skips")
