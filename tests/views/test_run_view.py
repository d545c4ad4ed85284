"""A watched loop and a log on the dashboard's tabs, without a page."""

import threading

import pytest
import torch
from torch import nn

import amplab
from amplab.lab import Watch, load_run
from amplab.views import RunView


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
    assert [name for name, _ in view.panels.tabs] == ["findings", "skipped", "gradients", "dtypes"]
    skipped = view.panels.shown("skipped")
    assert skipped["count"] == f"{watch.history.skip_count}" != "0"
    assert "fits at" in str(skipped["rows"][0])
    ops = view.panels.shown("dtypes")
    assert {row["dtype"] for row in ops["rows"] if row["op"] == "linear"} == {"float16"}
    assert ops["fixed"] is True
    assert view.panels.shown("gradients")["summary"].startswith("Measured in step 25, scale")
    view._select(3)
    assert view.panels.shown("gradients")["summary"].startswith("Selected step 3 (histogram of step 5")
    assert view.panels.shown("findings")["cards"]
    view.close()


def test_without_batches_the_tab_says_what_to_write(tmp_path):
    view = drawn(RunView(watched(tmp_path, batches=False)))
    assert "w.batches(loader)" in view.panels.shown("dtypes")["empty"]
    view.close()


def test_a_log_shows_what_it_holds(tmp_path):
    watch = watched(tmp_path, batches=True)
    view = drawn(RunView(load_run(watch.log_path)))
    assert [name for name, _ in view.panels.tabs] == ["findings", "skipped", "gradients"]
    assert view.panels.shown("skipped")["count"] == f"{watch.history.skip_count}"
    assert view.panels.shown("gradients")["curves"]
    view.close()


@pytest.mark.parametrize("step", [0, 29])
def test_a_selected_step_is_selected_in_the_charts_and_the_tabs(tmp_path, step):
    view = drawn(RunView(watched(tmp_path, batches=True)))
    view._select(step)
    assert view._live.selected == view.panels.selected == step
    view.close()
