"""Notices: what a failure and an offer say, and which stay up."""

import json
from dataclasses import replace

from amplab.lab import ExperimentConfig, Failed, Trainer
from amplab.views.notice_board import KEPT, Notice, NoticeBoard, failure, offer

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no\n'


def test_a_traceback_is_kept_and_its_last_line_is_the_sentence() -> None:
    notice = failure(TRACEBACK)
    assert notice.text == "ValueError: no"
    assert notice.detail == TRACEBACK.strip()
    assert notice.choices == (("dismiss", "Dismiss"),)


def test_a_sentence_before_a_traceback_is_the_sentence() -> None:
    notice = failure(f"callback f raised ValueError\n{TRACEBACK}", fatal=True)
    assert notice.text == "callback f raised ValueError"
    assert notice.detail == TRACEBACK.strip()
    assert notice.choices[0] == ("reset", "Reset the run")


def test_an_offer_names_both_experiments() -> None:
    text = offer("amplab/1 one", 1234, "paused", "amplab/1 two").text
    assert text == "amplab/1 one is paused at step 1,234 and has not been changed. Start new starts amplab/1 two."
    assert "Start new" not in offer("amplab/1 one", 0, "running", None).text


def test_the_newest_is_first_and_the_oldest_gives_way() -> None:
    board = NoticeBoard()
    for number in range(KEPT + 2):
        board.put(failure(f"failure {number}"))
    board.put(failure(f"failure {KEPT + 1}"))  # the same again
    payload = board.payload()
    assert [notice["text"] for notice in payload] == [f"failure {KEPT + 1 - place}" for place in range(KEPT)]
    assert json.loads(json.dumps(payload)) is not None
    board.remove(payload[0]["id"])
    board.remove(payload[0]["id"])
    assert len(board.payload()) == KEPT - 1


def test_an_offer_replaces_an_older_one_and_can_be_withdrawn() -> None:
    board = NoticeBoard()
    board.put(failure("stays"))
    board.put(offer("a", 1, "running", None))
    board.put(offer("a", 2, "running", None))
    assert [notice["kind"] for notice in board.payload()] == ["offer", "error"]
    board.remove_kind("offer")
    assert [notice["text"] for notice in board.payload()] == ["stays"]


def test_damage_is_named_as_such_and_offers_a_reset() -> None:
    notice = failure("step 12 left NaN or inf in norm.running_mean: BatchNorm takes a batch in.", damaged=True)
    assert "damaged" in notice.title
    assert [kind for kind, _ in notice.choices] == ["reset", "dismiss"]


def test_a_new_run_removes_notices_about_the_old_one() -> None:
    board = NoticeBoard()
    board.put(failure("step 1,234 left NaN or inf in norm.running_mean: BatchNorm", damaged=True))
    board.put(failure("the optimizer failed", fatal=True))
    board.put(Notice("note", "Paused", "10 steps are done", of_run=True))
    board.remove_of_run()
    board.put(offer("a", 1, "running", None))
    board.put(failure("callback f raised ValueError"))
    board.remove_of_run()
    assert [notice["text"] for notice in board.payload()] == ["callback f raised ValueError"]


def test_a_trace_that_failed_is_no_failure_of_the_next_run(trainer: Trainer) -> None:
    trainer.reset(replace(trainer.config, task="even-bce", model="even-mlp", opt_level="O1"))
    trainer.request_trace()
    trainer.wait(10)
    assert [(each.attempted, each.fatal) for each in trainer.failures] == [(True, False)]
    assert failure(trainer.failures[0].text, attempted=True).of_run
    trainer.reset(ExperimentConfig(hidden=16))
    trainer.wait(10)
    assert trainer.failures == ()


def test_the_trainer_says_that_a_run_is_damaged_until_it_is_reset(trainer: Trainer) -> None:
    heard: list[Failed] = []
    trainer.subscribe(lambda event: heard.append(event) if isinstance(event, Failed) else None)
    trainer.reset(replace(trainer.config, model="cnn"))
    trainer.inject("nan")
    trainer.run(1)
    assert [failure(event.text, damaged=event.damaged).of_run for event in heard] == [True]
    assert trainer.failures == tuple(heard)
    trainer.reset()
    assert trainer.wait(10)
    assert trainer.failures == ()
