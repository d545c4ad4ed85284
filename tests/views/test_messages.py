"""Messages of an altered page, or of one of another version: refused in words, and nothing happens."""

import math
from functools import partial

import pytest
from long_step import busy

from amplab.lab import ExperimentConfig, Run, Trainer, load_run
from amplab.views import Dashboard, RunView
from amplab.views.messages import MESSAGES, TAB_MESSAGES, refusal

LONG = "1" * 5000  # more digits than int() takes
BAD = [None, True, -1, 1.5, 1e308, 10**30, 10**400, math.inf, "", "x", "\0", LONG, [], [1], {}, {"a": 1}]
ALL = [(part, kind, {}, fields) for part, kinds in MESSAGES.items() for kind, fields in kinds.items()]
ALL += [("panels", kind, {"tab": tab}, fields) for tab, kinds in TAB_MESSAGES.items() for kind, fields in kinds.items()]
FORGED = [
    (part, {"type": kind, **tab, **dict.fromkeys(fields, value)})
    for part, kind, tab, fields in ALL
    for value in BAD
    if fields
]
WITHOUT_FIELDS = [(part, {"type": kind, **tab}) for part, kind, tab, fields in ALL if fields]
UNKNOWN = [
    *((part, {"type": "unknown"}) for part in MESSAGES if part != "live"),
    *(("panels", {"type": "step", "tab": tab}) for tab in ("nowhere", "memory", None, [], {}, 5)),
]


def tell(part, message: dict) -> None:
    part._handle_custom_msg(message, [])


@pytest.fixture
def lab(trainer: Trainer, wire: list[dict]):
    made = Dashboard(trainer)
    yield made
    made.close()


def test_messages_of_any_values_leave_no_traceback_and_a_run_that_works(lab: Dashboard, until) -> None:
    parts, trainer = lab._presenter.parts, lab.trainer
    seen = {}
    parts.notices.observe(lambda change: seen.update((each["text"], each) for each in change["new"]), "notices")
    tell(parts.live, {"type": "hello", "view": "a"})
    lab.run(2)
    for part, message in [*FORGED, *WITHOUT_FIELDS, *UNKNOWN]:
        if message["type"] not in ("setting", "reset", "new"):  # these may be sound
            tell(getattr(parts, part), message)
    tell(parts.controls, {"type": "pause"})  # some of them are sound, such as a run of 1e308 steps
    done = []
    lab._presenter._ticker.call(lambda: done.append(trainer.wait(60)))
    until(lambda: done, seconds=90)
    assert trainer.state == "paused"
    assert not [each for each in seen.values() if each["kind"] == "error"]
    assert not trainer.failures
    steps = len(trainer.history)
    lab.run(2)
    assert len(trainer.history) == steps + 2


def test_ops_that_are_put_into_float32_one_after_the_other_in_a_long_step_all_are(lab: Dashboard, until) -> None:
    panels, trainer = lab._presenter.parts.panels, lab.trainer
    for ops, on, expected in [("linear relu", True, "linear,relu"), ("relu linear", False, None)]:
        with busy(trainer):
            for op in ops.split():
                tell(panels, {"tab": "dtypes", "type": "override", "kind": "op", "name": op, "on": on})
            done: list[bool] = []
            lab._presenter._ticker.call(partial(done.append, True))
            until(lambda done=done: done)
        assert trainer.wait(20)
        assert trainer.config.float32_ops == expected


@pytest.mark.parametrize(("part", "message"), [*WITHOUT_FIELDS, *UNKNOWN])
def test_a_message_without_its_fields_is_refused_in_words(part: str, message: dict) -> None:
    why = refusal(part, message)
    assert why
    assert len(why) < 400


def test_a_refused_message_is_a_notice(lab: Dashboard, until) -> None:
    parts = lab._presenter.parts
    tell(parts.panels, {"tab": "skipped", "type": "explain", "step": []})
    until(lambda: parts.notices.notices)
    assert [(each["kind"], "step is []" in each["text"]) for each in parts.notices.notices] == [("note", True)]
    parts.panels.tab = "nowhere"
    tell(parts.controls, {"type": "step"})
    until(lambda: len(lab.trainer.history) == 1)
    assert len(parts.notices.notices) == 1


@pytest.mark.parametrize("step", [[], "x", None, True, -1, 1.5])
def test_a_step_that_is_no_number_is_refused_where_it_is_asked_for(trainer: Trainer, step: object) -> None:
    for request in (trainer.request_explanation, trainer.request_stages, trainer.request_inputs):
        with pytest.raises(ValueError, match="expected a whole number"):
            request(step)
    assert trainer.wait(10)
    assert trainer.state == "ready"


def test_of_many_selections_the_last_one_is_drawn(lab: Dashboard, until) -> None:
    parts, drawn = lab._presenter.parts, []
    lab.run(3)
    parts.panels.observe(lambda change: drawn.append(change["new"]), "selected")
    for step in [*range(1000), 2]:
        tell(parts.live, {"type": "select", "step": step})
    until(lambda: parts.panels.selected == 2)
    assert len(drawn) < 500


@pytest.fixture
def run(tmp_path) -> Run:
    trainer = Trainer(ExperimentConfig(hidden=16), log=tmp_path)
    trainer.run(2)
    trainer.stop()
    assert trainer.wait(10)
    return load_run(trainer.log_path)


def test_the_view_of_a_run_refuses_them_too(run: Run, wire: list[dict], until) -> None:
    view = RunView(run)
    for part, message in [*FORGED, *WITHOUT_FIELDS, *UNKNOWN]:
        if part in ("panels", "take_away", "live"):
            tell({"panels": view.panels, "take_away": view._take_away, "live": view._live}[part], message)
    tell(view.panels, {"type": "select", "step": 1})
    until(lambda: view.panels.selected == 1)
    assert "Traceback" not in view._notice.value
    view.close()
