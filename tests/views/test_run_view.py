"""A watched loop and a log on the dashboard's tabs, without a page."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.display.numbers import power
from amplab.lab import Run, Watch, load_run
from amplab.scalers import DynamicScale, floored
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


class Loop:
    """A model with a scaler of one kind, which may continue from the state of another one."""

    def __init__(self, kind, **numbers):
        torch.manual_seed(0)
        self.model = nn.Linear(8, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.kind, self.batch = kind, (torch.randn(16, 8), torch.arange(16) % 2)
        if kind == "apex":
            interval = numbers.get("growth_interval", 12)
            options = {"opt_level": "O1", "loss_scale": "dynamic", "scale_window": interval, "verbosity": 0}
            amp.initialize(self.model, self.optimizer, **options, dynamic_init_scale=numbers.get("init_scale", 2.0**16))
            self.scaler = amp
            return
        scaler_type = torch.amp.GradScaler if kind == "torch" else amplab.GradScaler
        self.scaler = scaler_type("cpu", **({} if "rule" in numbers else {"growth_interval": 12}) | numbers)

    def scale(self):
        return amp.default_session().loss_scale() if self.kind == "apex" else self.scaler.get_scale()

    def steps(self, number, watch=None, backwards=1):
        for _ in range(number):
            self.optimizer.zero_grad()
            for _ in range(backwards):
                with nullcontext() if self.kind == "apex" else torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(self.model(self.batch[0]), self.batch[1])
                loss = loss if watch is None else watch.loss(loss)
                if self.kind == "apex":
                    with amp.scale_loss(loss, self.optimizer) as scaled:
                        scaled.backward()
                else:
                    self.scaler.scale(loss).backward()
            if self.kind == "apex":
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()

    def steps_until_it_grows(self, watch, **options):
        before, taken = self.scale(), 0
        while self.scale() == before:
            self.steps(1, watch, **options)
            taken += 1
            assert taken < 100
        return taken


def growth_told(watch):
    """What the page says now of a loop that goes on."""
    view = RunView(watch)
    shown = asked(view, type="view", view="now")["growth"]
    view.close()
    return shown


KINDS = ["apex", "amplab", "torch"]


@pytest.fixture
def no_session():
    yield
    amp.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_watched_loop_grows_after_the_steps_that_are_told(kind, no_session):
    before = Loop(kind, init_scale=2.0**10)
    before.steps(7)
    state = before.scaler.state_dict()
    if kind == "apex":
        amp.reset()
    loop = Loop(kind)
    loop.scaler.load_state_dict(state)
    with amplab.watch(loop.model, loop.optimizer, scaler=loop.scaler) as watch:
        for steps in (0, 2):
            loop.steps(steps, watch)
            told = growth_told(watch)
        assert told["text"] == "Grows to 2¹¹ after 3 more steps without an overflow."
        assert (told["counted"], told["interval"]) == (9, 12)
        assert loop.steps_until_it_grows(watch) == 3
        assert loop.scale() == 2.0**11


@pytest.mark.parametrize("kind", ["amplab", "torch"])
@pytest.mark.parametrize("interval", [9, 20])
def test_a_window_that_the_loop_sets_is_told(kind, interval):
    loop = Loop(kind)
    with amplab.watch(loop.model, loop.optimizer, scaler=loop.scaler) as watch:
        loop.steps(8, watch)
        loop.scaler.set_growth_interval(interval)
        told = growth_told(watch)
        assert told["interval"] == watch.growth_interval == watch.observation.growth_interval == interval
        assert told["text"].startswith(f"Grows to 2¹⁷ after {interval - 8} more step")
        assert loop.steps_until_it_grows(watch) == interval - 8


@pytest.mark.parametrize("kind", ["amplab", "torch"])
@pytest.mark.parametrize("interval", [0, 5])
def test_a_scale_that_does_not_grow_any_more_says_so(kind, interval):
    """torch's scale does not grow where the count has passed a window that was made shorter."""
    loop = Loop(kind)
    with amplab.watch(loop.model, loop.optimizer, scaler=loop.scaler) as watch:
        loop.steps(8, watch)
        loop.scaler.set_growth_interval(interval)
        assert "does not grow" in growth_told(watch)["text"]
        loop.steps(20, watch)
        assert loop.scale() == 2.0**16


@pytest.mark.parametrize(
    ("numbers", "grown", "steps"),
    [
        ({"growth_factor": 4.0}, "2¹⁸", 4),
        ({"rule": DynamicScale(growth_interval=10)}, "2¹⁷", 2),
        ({"rule": floored(DynamicScale(growth_interval=10, ceiling=2.0**16 * 1.5), 1.0)}, "98304", 2),
    ],
)
def test_the_scale_to_which_a_watched_loop_grows_is_that_of_its_rule(numbers, grown, steps):
    loop = Loop("amplab", **numbers)
    with amplab.watch(loop.model, loop.optimizer, scaler=loop.scaler) as watch:
        loop.steps(8, watch)
        assert f"Grows to {grown} after {steps} more steps" in growth_told(watch)["text"]
        assert loop.steps_until_it_grows(watch) == steps
        assert power(loop.scale(), raised=True) == grown


def test_each_backward_of_a_session_counts(no_session):
    """As in apex: two backwards in a step take half of the steps."""
    loop = Loop("apex")
    with amplab.watch(loop.model, loop.optimizer, scaler=amp) as watch:
        loop.steps(2, watch, backwards=2)
        assert "after 4 more steps" in growth_told(watch)["text"]
        assert loop.steps_until_it_grows(watch, backwards=2) == 4
    amp.reset()
    assert "is not known" in growth_told(watch)["text"]


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
