"""A watched loop and a log on the dashboard's tabs, without a page."""

import threading

import pytest
import torch
from torch import nn

import amplab
from amplab.lab import Run, Watch, load_run
from amplab.views import RunView
from amplab.views.take_away import FILES


def drawn(view: RunView) -> RunView:
    """Wait until the view has drawn its tabs."""
    done = threading.Event()
    view._ticker.call(done.set)  # after the first drawing
    assert done.wait(20)
    assert view._notice.value == ""
    return view


def watched(tmp_path, *, batches: bool) -> Watch:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amplab.GradScaler("cpu", init_scale=2.0**24)
    x, y = torch.randn(32, 8), torch.arange(32) % 2

    def loss_of(batch):
        with amplab.autocast("cpu", dtype=torch.float16):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with amplab.watch(model, optimizer, scaler=scaler, step=loss_of, log=tmp_path, every=5) as watch:
        for batch in watch.batches([(x, y)] * 30) if batches else [(x, y)] * 30:
            optimizer.zero_grad()
            loss = loss_of(batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return watch


def test_a_watched_loop_has_op_dtypes_gradients_skips_and_findings(tmp_path):
    watch = watched(tmp_path, batches=True)
    view = drawn(RunView(watch))
    assert [name for name, _ in view.panels.tabs] == ["findings", "skipped", "gradients", "scale", "dtypes"]
    skipped = view.panels.shown("skipped")
    assert skipped["count"] == f"{watch.history.skip_count}" != "0"
    assert "fits at" in str(skipped["rows"][0])
    ops = view.panels.shown("dtypes")
    assert {row["dtype"] for row in ops["rows"] if row["op"] == "linear"} == {"float16"}
    assert ops["fixed"] is True
    assert view.panels.shown("gradients")["summary"].startswith("Measured in step 25, scale")
    view.select(3)
    assert view.panels.shown("gradients")["summary"].startswith("Selected step 3 (histogram of step 5")
    assert view.panels.shown("findings")["cards"]
    view.close()


def test_without_batches_the_tab_says_what_to_write(tmp_path):
    view = drawn(RunView(watched(tmp_path, batches=False)))
    assert "w.batches(loader)" in view.panels.shown("dtypes")["empty"]
    view.close()


def test_a_skip_without_reason_says_why_it_has_none(tmp_path):
    watch = watched(tmp_path, batches=False)
    for run, said in ((watch, "Pass loss= or step="), (load_run(watch.log_path), "the run log holds no reason")):
        view = drawn(RunView(run))
        assert said in view.panels.shown("skipped")["rows"][0]["why"]
        view.close()


def test_a_log_shows_what_it_holds(tmp_path):
    watch = watched(tmp_path, batches=True)
    view = drawn(RunView(load_run(watch.log_path)))
    assert [name for name, _ in view.panels.tabs] == ["findings", "skipped", "gradients", "scale"]
    assert view.panels.shown("skipped")["count"] == f"{watch.history.skip_count}"
    assert view.panels.shown("gradients")["curves"]
    view.close()


@pytest.mark.parametrize("step", [0, 29])
def test_a_selected_step_is_selected_in_the_charts_and_the_tabs(tmp_path, step):
    view = drawn(RunView(watched(tmp_path, batches=True)))
    view.select(step)
    assert view._live.selected == view.panels.selected == step
    view.close()


def names_of(layers):
    return [row["name"] for row in layers]


def test_a_watched_loop_has_the_gradients_of_each_layer(tmp_path):
    watch = watched(tmp_path, batches=True)
    for run in (watch, load_run(watch.log_path)):
        view = drawn(RunView(run))
        shown = view.panels.shown("gradients")
        assert names_of(shown["layers"]) == shown["heat"]["layers"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert shown["heat"]["steps"] == [5, 10, 15, 20, 25]  # step 0 was skipped
        view.close()


def asked(drawn_by: RunView, **message):
    """What the tab of the scale shows after a message of the page."""
    drawn_by._on_message({"tab": "scale", **message})
    return drawn(drawn_by).panels.shown("scale")


def test_the_scale_of_a_watched_loop_and_other_rules_over_it(tmp_path):
    watch = watched(tmp_path, batches=True)
    now = asked(view := RunView(watch), type="view", view="now")
    assert now["growth"]["interval"] == 2000
    assert now["growth"]["text"].startswith("Grows to 2")
    assert f"{watch.history.skip_count} steps skipped" in now["skips"]
    assert "lab's own experiments" in now["memory"]["note"]
    assert now["memory"]["end"] == now["rate"]["steps"][-1] == 29  # the axis of both charts
    asked(view, type="view", view="whatif")
    rows = {run["name"]: run for run in asked(view, type="rule", init=10, window=5, backoff=0.5)["runs"]}
    assert rows["recorded"]["skipped"] == str(watch.history.skip_count) > rows["your rule"]["skipped"]
    view.close()
    log = RunView(load_run(watch.log_path))
    assert "is not known of this run" in asked(log, type="view", view="now")["growth"]["text"]
    log.close()


def test_a_watched_loop_can_be_taken_along(tmp_path):
    watch = watched(tmp_path, batches=True)
    for run in (watch, load_run(watch.log_path)):
        view = drawn(RunView(run))
        sent = []
        view._take_away.send = lambda message, sent=sent: sent.append(message)
        for kind in FILES:
            view._on_take_away({"type": "file", "kind": kind})
        drawn(view)
        files = {each["name"]: each["text"] for each in sent}
        assert files["run.csv"].count("\n") >= 30
        assert "watched/1 model=Sequential" in files["run.json"]
        assert ("Not recorded" in files["run.html"]) == isinstance(run, Run)
        assert str(tmp_path) not in files["run.html"]
        view.close()


@pytest.mark.parametrize("init_scale", [1e-45, 0.0])
def test_a_run_whose_scale_has_fallen_to_0_is_shown(init_scale):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    with amplab.watch(model, optimizer, scaler=scaler) as watch:
        for batch in watch.batches([torch.full((1, 2), float("nan"))] * 3):
            scaler.scale(watch.loss(model(batch).sum())).backward()
            scaler.step(optimizer)
            scaler.update()
    assert watch.history.last is not None
    assert watch.history.last.next_loss_scale == 0
    assert asked(RunView(watch), type="view", view="now")["growth"]["text"].startswith("The scale is 0, and stays 0")
