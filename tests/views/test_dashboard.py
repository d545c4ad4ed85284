"""The dashboard without a page: what it sends when a page says hello, when messages come, when things fail."""

import threading
import time
from collections.abc import Callable
from datetime import datetime

import numpy as np
import pytest

from amplab.lab import ExperimentConfig, Trainer
from amplab.lab.checkpoints import Checkpoint
from amplab.views import Dashboard
from amplab.views.dashboard import wait_for_steps


@pytest.fixture
def lab(trainer: Trainer, wire: list[dict]):
    made = Dashboard(trainer)
    yield made
    made.close()


def tell(part, **message: object) -> None:
    """Deliver a message as the page sends it."""
    part._handle_custom_msg(message, [])


def contents(wire: list[dict], kind: str) -> list[dict]:
    custom = [sent for sent in wire if sent["data"].get("method") == "custom"]
    return [sent for sent in custom if sent["data"]["content"].get("kind") == kind]


def frames(wire: list[dict]) -> list[dict]:
    return contents(wire, "frame")


def ranges(wire: list[dict]) -> list[dict]:
    return contents(wire, "range")


def rows_of(frame: dict) -> np.ndarray:
    return np.frombuffer(frame["buffers"][0], np.float64).reshape(-1, 4)


def parts(lab: Dashboard):
    return lab._presenter.parts


def test_its_text_is_one_short_line_without_addresses(lab: Dashboard) -> None:
    assert repr(lab) == "<amplab lab at step 0: amplab/1 task=digits model=mlp opt_level=O1 hidden=16>"
    assert lab.config() == "amplab/1 task=digits model=mlp opt_level=O1 hidden=16"
    assert ExperimentConfig.parse(lab.config()) == lab.trainer.config


def test_nothing_is_drawn_before_a_page_is_there(lab: Dashboard, wire: list[dict], until) -> None:
    lab.run(steps=30)
    assert frames(wire) == []
    tell(parts(lab).live, type="hello", view="a")
    until(lambda: frames(wire))
    rows = rows_of(frames(wire)[-1])
    np.testing.assert_array_equal(rows[:, 0], np.arange(30))
    np.testing.assert_array_equal(rows[:, 1], lab.trainer.history.column("loss"))
    figures = frames(wire)[-1]["data"]["content"]["summary"]
    assert figures["step"] == 30
    assert figures["scale"] == lab.trainer.loss_scale
    assert figures["score"] == lab.trainer.history.last_score


def test_a_second_page_gets_the_whole_run_and_the_last_to_leave_ends_the_drawing(
    lab: Dashboard, wire: list[dict], until
) -> None:
    for view in ("a", "b"):
        tell(parts(lab).live, type="hello", view=view)
        until(lambda: frames(wire))
        wire.clear()
    tell(parts(lab).live, type="bye", view="a")
    lab.run(steps=3)
    until(lambda: frames(wire) and len(rows_of(frames(wire)[-1])) == 3)
    tell(parts(lab).live, type="bye", view="b")
    settle(lab, until)
    wire.clear()
    lab.run(steps=3)
    settle(lab, until)
    assert frames(wire) == []


def settle(lab: Dashboard, until) -> None:
    """Wait until the trainer and the ticker have done all that they were asked for."""
    lab.trainer.wait(20)
    ticker = lab._presenter._ticker

    def is_quiet() -> bool:
        was_awake = ticker._awake  # False also while a tick draws
        ticker.wait()
        return not was_awake and not ticker._awake

    until(is_quiet)


def test_not_more_than_ten_frames_a_second(lab: Dashboard, wire: list[dict], until) -> None:
    began = time.monotonic()
    tell(parts(lab).live, type="hello", view="a")
    tell(parts(lab).controls, type="start")
    until(lambda: len(lab.trainer.history) > 100)
    tell(parts(lab).controls, type="pause")
    until(lambda: lab.trainer.state == "paused")
    settle(lab, until)
    history = lab.trainer.history
    assert len(frames(wire)) <= 10 * (time.monotonic() - began + 0.5)
    assert len(rows_of(frames(wire)[-1])) == len(history), "and the last of them is complete"


def test_controls_show_what_is_in_effect(lab: Dashboard, until) -> None:
    until(lambda: parts(lab).controls.shown)
    tell(parts(lab).live, type="hello", view="a")
    tell(parts(lab).controls, type="change", field="opt_level", value="O2")
    until(lambda: parts(lab).controls.shown["fields"]["opt_level"]["value"] == "O2")
    tell(parts(lab).controls, type="change", field="lr", value=-1)
    until(lambda: parts(lab).controls.shown["refusal"])
    assert "Learning rate: -1" in parts(lab).controls.shown["refusal"]
    tell(parts(lab).controls, type="change", field="lr", value=0.5)
    until(lambda: parts(lab).controls.shown["fields"]["lr"]["value"] == 0.5)
    assert parts(lab).controls.shown["refusal"] is None


def test_undo_is_offered_with_what_it_takes_back_and_says_what_it_took_back(lab: Dashboard, until) -> None:
    tell(parts(lab).live, type="hello", view="a")
    controls = parts(lab).controls
    until(lambda: controls.shown)
    assert (controls.shown["last_change"], controls.shown["undone"]) == (None, None)
    tell(controls, type="change", field="lr", value=1e9)
    until(lambda: controls.shown["last_change"] == "Learning rate 0.1 → 1e9")
    tell(controls, type="inject", kind="nan")
    until(lambda: controls.shown["armed"] == ["nan"] and controls.shown["last_change"] == "NaN on")
    tell(controls, type="undo")
    until(lambda: controls.shown["undone"] == "NaN on" and controls.shown["armed"] == [])
    tell(controls, type="undo")
    until(lambda: controls.shown["undone"] == "Learning rate 0.1 → 1e9")
    assert controls.shown["fields"]["lr"]["value"] == 0.1
    assert controls.shown["last_change"] is None
    tell(parts(lab).gallery, type="choose", name="first-overflow")
    until(lambda: controls.shown["undone"] is None)
    until(lambda: parts(lab).gallery.chosen["stage"] == "seen")
    tell(controls, type="change", field="opt_level", value="O2")
    until(lambda: controls.shown["last_change"] == "opt_level O1 → O2")
    assert controls.shown["undone"] is None


def test_a_reset_that_changes_nothing_is_not_offered_for_undo(lab: Dashboard, until) -> None:
    tell(parts(lab).live, type="hello", view="a")
    controls = parts(lab).controls
    tell(controls, type="change", field="task", value="even-logits")
    until(lambda: (controls.shown.get("last_change") or "").startswith("Task digits → even or odd"))
    lab.trainer.reset()
    assert lab.trainer.wait(10)
    assert lab.trainer.last_change.startswith("Task digits → even or odd")


def test_an_armed_fault_shows_until_its_step_is_made(lab: Dashboard, until) -> None:
    tell(parts(lab).live, type="hello", view="a")
    tell(parts(lab).controls, type="inject", kind="overflow")
    until(lambda: parts(lab).controls.shown.get("armed") == ["overflow"])
    tell(parts(lab).controls, type="step")
    until(lambda: parts(lab).controls.shown["armed"] == [])
    until(lambda: parts(lab).panels.shown("skipped").get("count") == "1")
    tell(parts(lab).controls, type="inject", kind="underflow")
    until(lambda: parts(lab).controls.shown["shrinking"] and lab.trainer.shrinking)


def test_a_fault_is_armed_in_every_dashboard_whoever_has_armed_it(lab: Dashboard, until) -> None:
    tell(parts(lab).live, type="hello", view="a")
    lab.trainer.inject("nan")
    until(lambda: parts(lab).controls.shown["armed"] == ["nan"])
    other = Dashboard(lab.trainer)
    try:
        assert parts(other).controls.shown["armed"] == ["nan"], "as after the page was loaded again"
        tell(parts(other).live, type="hello", view="b")
        tell(parts(lab).controls, type="inject", kind="overflow")
        until(lambda: parts(other).controls.shown["armed"] == ["nan", "overflow"])
        lab.trainer.inject("nan", on=False)
        lab.trainer.inject("underflow", on=True)
        for each in (lab, other):
            until(lambda each=each: parts(each).controls.shown["armed"] == ["overflow"])
            until(lambda each=each: parts(each).controls.shown["shrinking"])
        lab.trainer.step()
        for each in (lab, other):
            until(lambda each=each: parts(each).controls.shown["armed"] == [])
    finally:
        other.close()


def test_the_dtypes_follow_the_level_and_mark_what_changed(lab: Dashboard, until) -> None:
    panels = parts(lab).panels
    until(lambda: panels.shown("dtypes").get("rows"))
    assert not any(row["changed"] for row in panels.shown("dtypes")["rows"])
    tell(parts(lab).controls, type="change", field="opt_level", value="O0")
    until(lambda: panels.shown("dtypes")["summary"].startswith("O0"))
    lab.trainer.request_trace()  # as another dashboard does
    lab.trainer.wait()
    lab._presenter.wait()
    assert any(row["changed"] for row in panels.shown("dtypes")["rows"])
    tell(parts(lab).controls, type="change", field="model", value="cnn")
    until(lambda: any(row["module"] == "conv1" for row in panels.shown("dtypes")["rows"]))
    assert not any(row["changed"] for row in panels.shown("dtypes")["rows"]), "another model has no level before"


def test_the_dtypes_say_when_the_present_step_cannot_be_traced(lab: Dashboard, until) -> None:
    panels = parts(lab).panels
    lab.trainer.reset(lab.trainer.config.changed(task="even-bce", opt_level="O0"))
    until(lambda: panels.shown("dtypes").get("summary", "").startswith("O0"))
    tell(parts(lab).controls, type="change", field="opt_level", value="O1")
    until(lambda: panels.shown("dtypes")["problem"])
    said = panels.shown("dtypes")["problem"]
    assert said.startswith("Shown is a step at O0, before the change. The present step fails: NotImplementedError: ")
    assert "binary_cross_entropy" in said
    tell(parts(lab).controls, type="change", field="opt_level", value="O0")
    until(lambda: panels.shown("dtypes")["problem"] == "")
    lab.trainer.reset(lab.trainer.config.changed(task="digits", opt_level="O1"))
    lab.trainer.reset(lab.trainer.config.changed(task="even-bce", opt_level="O1"))
    until(lambda: panels.shown("dtypes")["problem"].startswith("This step cannot be traced: NotImplementedError: "))
    assert panels.shown("dtypes")["rows"] == []


def test_a_paused_run_has_one_number_of_steps_and_skips_in_open_and_closed_tabs(lab: Dashboard, wire, until) -> None:
    tell(parts(lab).live, type="hello", view="a")
    panels = parts(lab).panels
    lab.run(steps=3)
    until(lambda: panels.shown("runs").get("rows"))
    lab.trainer.inject("overflow")
    lab.run(steps=20)
    history = lab.trainer.history
    assert panels.tab != "runs"

    def numbers() -> list[object]:
        row, figures = panels.shown("runs")["rows"][0], frames(wire)[-1]["data"]["content"]["summary"]
        return [row["steps"], row["skipped"], figures["step"], figures["skipped"], panels.shown("skipped")["count"]]

    until(lambda: numbers() == ["23", str(history.skip_count), 23, history.skip_count, str(history.skip_count)])


def test_gradients_are_drawn_when_their_tab_is_opened(lab: Dashboard, until) -> None:
    tell(parts(lab).live, type="hello", view="a")
    settle(lab, until)
    panels = parts(lab).panels
    assert panels.shown("gradients") == {}
    opened = time.monotonic()
    panels.tab = "gradients"
    until(lambda: panels.shown("gradients"))
    assert time.monotonic() - opened < 5
    assert "output.bias" in [layer["name"] for layer in panels.shown("gradients")["layers"]]
    first = panels.shown("gradients")["curves"]["unscaled"]
    tell(parts(lab).controls, type="step")
    until(lambda: panels.shown("gradients")["summary"].startswith("Step 1,"))
    assert panels.shown("gradients")["curves"]["unscaled"] != first


def test_a_dashboard_without_a_page_draws_no_gradients_for_another(lab: Dashboard, trainer: Trainer, until) -> None:
    other = Dashboard(trainer)
    for each in (lab, other):
        tell(parts(each).live, type="hello", view="a")
        parts(each).panels.tab = "gradients"
        until(lambda each=each: parts(each).panels.shown("gradients"))
    tell(parts(other).live, type="bye", view="a")
    settle(other, until)
    still = other._presenter.parts.panels.shown("gradients")
    tell(parts(lab).controls, type="step")
    until(lambda: parts(lab).panels.shown("gradients")["summary"].startswith("Step 1,"))
    settle(other, until)
    assert parts(other).panels.shown("gradients") == still
    tell(parts(other).live, type="hello", view="b")
    until(lambda: parts(other).panels.shown("gradients")["summary"].startswith("Step 1,"))
    other.close()


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_page_gets_the_steps_of_the_runs_behind_that_it_shows(
    lab: Dashboard, wire: list[dict], record, until, logarithmic: bool
) -> None:
    for steps in (20_000, 300):
        lab.trainer.reset()
        lab.trainer.wait(10)
        for step in range(steps):
            lab.trainer.history.append(record(step, loss=1.0 / (step + 1)))
    tell(parts(lab).live, type="hello", view="a")
    tell(parts(lab).live, type="behind", view="a", low=0, high=1024, logarithmic=logarithmic)
    until(lambda: contents(wire, "behind"))
    (sent,) = contents(wire, "behind")
    told = sent["data"]["content"]
    assert (told["view"], told["low"], told["high"], told["logarithmic"]) == ("a", 0, 1024, logarithmic)
    assert told["overlays"] == contents(wire, "overlays")[-1]["data"]["content"]["overlays"]
    np.testing.assert_array_equal(rows_of(sent)[:300], rows_of(frames(wire)[-1]), "as those of the present run")
    np.testing.assert_array_equal(rows_of(sent)[:, 0], np.arange(1025))


def test_a_page_that_zooms_gets_every_step_of_its_range_once(lab: Dashboard, wire: list[dict], record, until) -> None:
    history = lab.trainer.history
    for step in range(100_000):
        history.append(record(step, loss=1.0 / (step + 1)))
    tell(parts(lab).live, type="hello", view="a")
    tell(parts(lab).live, type="range", view="a", low=70_100, high=70_300)
    until(lambda: ranges(wire))
    content = ranges(wire)[-1]["data"]["content"]
    assert (content["view"], content["low"], content["high"]) == ("a", 70_100, 70_300)
    np.testing.assert_array_equal(rows_of(ranges(wire)[-1])[:, 0], np.arange(70_100, 70_301))
    assert sum(len(buffer) for sent in wire for buffer in sent["buffers"]) / len(wire) < 60_000, "frames stay small"
    settle(lab, until)
    sent = len(ranges(wire))
    history.append(record(100_000))
    lab._presenter.wake()
    settle(lab, until)
    assert len(ranges(wire)) == sent, "a range that has not changed is not sent again"
    tell(parts(lab).live, type="range", view="a", last=500)
    until(lambda: len(ranges(wire)) > sent)
    np.testing.assert_array_equal(rows_of(ranges(wire)[-1])[:, 0], np.arange(99_501, 100_001))
    history.append(record(100_001))
    lab._presenter.wake()
    until(lambda: rows_of(ranges(wire)[-1])[-1, 0] == 100_001)  # it follows the run
    tell(parts(lab).live, type="range", view="a", low=None)
    settle(lab, until)
    sent = len(ranges(wire))
    history.append(record(100_002))
    lab._presenter.wake()
    settle(lab, until)
    assert len(ranges(wire)) == sent
    for without in ({}, {"high": 3}):  # "low"
        tell(parts(lab).live, type="range", view="a", **without)
    sent = len(frames(wire))
    history.append(record(100_003))
    lab._presenter.wake()
    until(lambda: len(frames(wire)) > sent)


def test_a_step_selected_anywhere_is_selected_everywhere(lab: Dashboard, until) -> None:
    lab.run(steps=5)
    tell(parts(lab).live, type="select", step=3)
    until(lambda: parts(lab).panels.selected == 3)
    tell(parts(lab).panels, type="select", step=2)
    until(lambda: parts(lab).live.selected == 2)
    tell(parts(lab).controls, type="reset")
    until(lambda: parts(lab).live.selected is None)
    assert parts(lab).panels.selected is None


def test_a_cell_that_waits_for_long_is_told_until_it_ends(lab: Dashboard, until, monkeypatch) -> None:
    monkeypatch.setattr("amplab.views.presenter._A_MOMENT", 0.1)
    lab.trainer.set_speed(20)
    told = []
    unsubscribe = lab.trainer.subscribe(lambda _: told.extend(each["title"] for each in parts(lab).notices.notices))
    lab.run(20)
    unsubscribe()
    assert "A cell waits for this run" in told
    until(lambda: not parts(lab).notices.notices)


def test_a_callback_that_raises_is_a_notice_and_the_run_goes_on(lab: Dashboard, until) -> None:
    def mine(event: object) -> None:
        raise ValueError("a callback of my own")

    lab.trainer.subscribe(mine)
    tell(parts(lab).controls, type="step")
    until(lambda: parts(lab).notices.notices)
    notice = parts(lab).notices.notices[0]
    assert notice["kind"] == "error"
    assert 'raise ValueError("a callback of my own")' in notice["detail"]
    tell(parts(lab).notices, type="dismiss", id=notice["id"])
    until(lambda: not parts(lab).notices.notices)
    lab.run(steps=2)
    assert lab.trainer.state == "paused"


def test_a_view_that_fails_says_so_itself(lab: Dashboard, until, monkeypatch) -> None:
    monkeypatch.setattr("amplab.views.presenter.act", lambda *_: {}["explode"])
    tell(parts(lab).controls, type="step")
    until(lambda: parts(lab).notices.notices)
    assert "KeyError" in parts(lab).notices.notices[0]["text"]


def test_an_offer_is_answered(lab: Dashboard, until) -> None:
    lab.run(steps=3)
    wanted = ExperimentConfig(opt_level="O3", hidden=16)
    lab.offer(wanted)
    until(lambda: parts(lab).notices.notices)
    notice = parts(lab).notices.notices[0]
    assert str(wanted) in notice["text"]
    with pytest.raises(RuntimeError, match=r"at step 3, but .*O3.* was asked for: choose one above the charts"):
        lab.run(steps=3)
    tell(parts(lab).notices, type="new", id=notice["id"])
    until(lambda: lab.trainer.config == wanted and len(lab.trainer.history) == 0)
    until(lambda: not parts(lab).notices.notices)
    lab.run(steps=3)


@pytest.mark.parametrize("answer", ["dismiss", "reset"])
def test_code_trains_the_present_run_once_that_was_chosen(lab: Dashboard, until, answer: str) -> None:
    lab.run(steps=3)
    lab.offer(ExperimentConfig(opt_level="O3", hidden=16))
    until(lambda: parts(lab).notices.notices)
    if answer == "dismiss":
        tell(parts(lab).notices, type="dismiss", id=parts(lab).notices.notices[0]["id"])
    else:
        lab.trainer.reset(ExperimentConfig(opt_level="O2", hidden=16))
    until(lambda: not parts(lab).notices.notices)
    lab.run(steps=3)


@pytest.mark.parametrize(
    "starts",
    [lambda trainer: trainer.start(), lambda trainer: trainer.step(), lambda trainer: trainer.run(2)],
    ids=["start", "step", "run"],
)
def test_the_offer_of_a_saved_run_goes_when_another_run_starts(lab: Dashboard, until, tmp_path, starts) -> None:
    saved = Checkpoint(tmp_path / "run.checkpoint", lab.trainer.config, 100, saved=datetime.now())
    lab.offer_saved(saved)
    until(lambda: parts(lab).notices.notices)
    assert "at step 100?" in parts(lab).notices.notices[0]["title"]
    starts(lab.trainer)
    until(lambda: not parts(lab).notices.notices)


def test_a_saved_run_continues_once_though_its_button_is_pressed_again(lab: Dashboard, until, tmp_path) -> None:
    first = Trainer(ExperimentConfig(hidden=16), log=tmp_path)
    first.run(3)
    saved = Checkpoint(first.log_path.with_suffix(".checkpoint"), first.config, 3, saved=datetime.now())
    lab.offer_saved(saved)
    until(lambda: parts(lab).notices.notices)
    offer = parts(lab).notices.notices[0]["id"]
    for _ in range(3):
        tell(parts(lab).notices, type="continue", id=offer)
    until(lambda: len(lab.trainer.history) == 3)
    assert lab.trainer.wait(10)
    assert not lab.trainer.kept.runs
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_a_dashboard_of_a_run_that_has_begun_shows_all_of_it(trainer: Trainer, wire: list[dict], until) -> None:
    trainer.run(4)
    trainer.change(opt_level="O2")
    trainer.run(2)
    lab = Dashboard(trainer)
    tell(parts(lab).live, type="hello", view="a")
    until(lambda: frames(wire))
    marks = frames(wire)[-1]["data"]["content"]["changes"]
    assert [(step, label) for step, _, label, _ in marks] == [(0, "O1"), (4, "O2")]
    assert len(rows_of(frames(wire)[-1])) == 6
    lab.close()
    trainer.run(2)
    assert len(trainer.history) == 8, "closing a view ends no experiment"


def test_a_run_in_a_cell_reports_and_repeats() -> None:
    reports = []
    for _ in range(2):
        lab = Dashboard(Trainer(ExperimentConfig(hidden=16, init_scale=2.0**20)))
        reports.append(lab.run(steps=25))
        lab.close()
    assert reports[0] == reports[1]
    assert reports[0].steps == 25


def test_run_waits_for_a_run_that_is_going_on(lab: Dashboard) -> None:
    lab.trainer.start()
    assert lab.run(steps=5).steps == 5
    assert lab.trainer.state == "running"


def test_it_waits_for_so_many_steps_and_lets_them_run_on(trainer: Trainer) -> None:
    trainer.start()
    begun = len(trainer.history)
    assert wait_for_steps(trainer, 20).steps == 20
    assert len(trainer.history) >= begun + 20
    assert trainer.state == "running"


def test_a_pause_ends_the_waiting(trainer: Trainer, until) -> None:
    trainer.start()
    until(lambda: len(trainer.history) > 2)
    threading.Timer(0.3, trainer.pause).start()
    assert 0 < wait_for_steps(trainer, 1_000_000).steps < 1_000_000


def test_a_run_that_stops_before_a_step_is_an_error(trainer: Trainer) -> None:
    with pytest.raises(RuntimeError, match=r"run\(5\): .*\(ready\)"):
        wait_for_steps(trainer, 5)


def press_at(trainer: Trainer, step: int, press: Callable[[], object]) -> None:
    """Call `press` in another thread, as the page does, once the trainer has made a step of this number."""
    reached = threading.Event()
    trainer.subscribe(lambda event: reached.set() if getattr(event, "step", 0) >= step else None)

    def wait_and_press() -> None:
        assert reached.wait(30)
        press()

    threading.Thread(target=wait_and_press, daemon=True).start()


@pytest.mark.parametrize("press", ["pause", "step", "stop"])
@pytest.mark.parametrize("before", [0, 3000])  # fewer and as many as the cell asks for
def test_a_run_in_a_cell_that_the_page_ends_reports_the_steps_it_made(lab: Dashboard, press: str, before: int) -> None:
    trainer = lab.trainer
    if before:
        lab.run(steps=before)
    press_at(trainer, before + 20, getattr(trainer, press))
    report = lab.run(steps=before or 100_000)
    history = trainer.history
    assert report.steps == len(history) - before
    assert (report.total, report.first_loss) == (len(history), history.record(before).loss)


def test_a_run_in_a_cell_that_the_page_resets_reports_no_step_of_the_run_before(lab: Dashboard) -> None:
    trainer = lab.trainer
    press_at(trainer, 20, trainer.reset)
    with pytest.raises(RuntimeError, match=r"run\(100000\): the experiment stopped \(ready\) before a step"):
        lab.run(steps=100_000)
    first = trainer.kept.runs[0]
    before = len(first.history)
    press_at(trainer, 20, lambda: trainer.continue_from(first))
    report = lab.run(steps=1500)
    assert report.total == len(first.history) == len(trainer.history)
    assert report.steps == report.total - before < 1500, "the steps of the run that it replaced do not count"

    def again() -> None:
        trainer.reset(trainer.config.changed(lr=0.2))
        trainer.start(7)

    press_at(trainer, len(trainer.history) + 20, again)
    report = lab.run(steps=100_000)
    assert report.steps == report.total == len(trainer.history) <= 7  # a step that is not done yet counts as one of 7
    assert "lr=0.2" in report.config
