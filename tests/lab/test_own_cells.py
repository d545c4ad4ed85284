"""Cells that call `lab.open` with a model of one's own, again or beside others."""

import math
import os
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from interrupts import interrupted_everywhere
from own_models import TAGS, ResNet, Tagger, loader, registered
from torch import nn

import amplab.lab
from amplab.lab import (
    MODELS,
    TASKS,
    ExperimentConfig,
    TraceReady,
)

pytestmark = pytest.mark.usefixtures("nothing_own")


def test_open_changes_no_teacher_of_a_step_and_refuses_a_loss_with_weights():
    teacher = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8))
    registered(Tagger(), TAGS, step=lambda model, batch: model(batch[0]).mean() + teacher(batch[0]).mean())
    assert int(teacher[2].num_batches_tracked) == 0
    criterion = nn.Sequential(nn.Linear(5, 1))
    with pytest.raises(ValueError, match=r"has parameters to train \(0.weight, 0.bias\).*part of the model"):
        registered(Tagger(), TAGS, loss=criterion)


@pytest.mark.filterwarnings("ignore:Adam on half parameters")
@pytest.mark.parametrize("state", ["ready", "failed", "comparing"])
def test_a_cell_that_runs_again_keeps_the_runs_beside_the_present_one(kernel, state):
    fails = []

    def loss(output, labels):
        if fails:
            raise ArithmeticError("a slip")
        return F.cross_entropy(output, labels)

    def opened():
        dashboard = amplab.lab.open(model=Tagger, data=TAGS, loss=loss)
        dashboard.close()
        return dashboard.trainer

    trainer = opened()
    trainer.run(3)
    trainer.reset()
    if state == "failed":
        fails.append(True)
        with pytest.raises(RuntimeError):
            trainer.run(1)
        fails.clear()
    elif state == "comparing":
        trainer.compare(steps=3)
    again = opened()
    assert again.wait(30)
    assert [len(run.history) for run in again.kept.runs][:1] == [3]
    assert sum(run.is_compared for run in again.kept.runs) == (6 if state == "comparing" else 0)
    assert len(again.run(2)) == 2
    assert again.config.task == "own-2"


def test_an_offer_of_an_older_cell_can_begin(kernel):
    dashboards = [amplab.lab.open(model=Tagger, data=TAGS, loss=F.cross_entropy)]
    trainer = dashboards[0].trainer
    trainer.run(2)
    dashboards += [amplab.lab.open(model=lambda: nn.Sequential(Tagger()), data=TAGS, loss=F.cross_entropy)]
    dashboards += [amplab.lab.open(model=Tagger, data=TAGS, loss=F.cross_entropy)]
    trainer.reset(ExperimentConfig(task="own-2"))
    assert len(trainer.run(1)) == 1
    assert isinstance(trainer._run.experiment.model, nn.Sequential)
    for each in dashboards:
        each.close()


def test_a_dashboard_that_was_replaced_begins_its_own_model_again(kernel):
    def opened(model):
        dashboard = amplab.lab.open(model=model, data=TAGS, loss=F.cross_entropy)
        dashboard.close()
        return dashboard.trainer

    torch.manual_seed(0)
    first = opened(nn.Sequential(Tagger()))
    second, third = opened(nn.Sequential(Tagger(), nn.Tanh())), opened(nn.Sequential(Tagger(), nn.Sigmoid()))
    for trainer, size in ((first, 1), (second, 2)):
        trainer.reset()
        trainer.run(1)
        assert len(trainer._run.experiment.model) == size
    assert len({each.config.task for each in (first, second, third)}) == 3


def test_open_shows_ones_own_model_and_finds_it_again(kernel):
    dashboard = amplab.lab.open(model=Tagger(), data=TAGS, loss=F.cross_entropy)
    assert dashboard.config() == "amplab/1 task=own model=tagger opt_level=O1 optimizer=adam"
    dashboard.trainer.run(2)
    again = amplab.lab.open(model=ResNet(), data=loader(), loss=F.cross_entropy)
    assert again.trainer is dashboard.trainer  # it has begun, so the page asks
    assert {"own", "own-2"} <= set(TASKS)
    dashboard.trainer.reset(ExperimentConfig(task="own-2"))
    assert math.isfinite(dashboard.trainer.run(1).last.loss)
    assert MODELS[dashboard.trainer.config.model].label == "ResNet"
    dashboard.close(), again.close()


def test_a_setting_of_ones_own_model_can_be_opened_again(kernel):
    text = "amplab/1 task=own model=tagger opt_level=O2 optimizer=adamw lr=0.003"
    dashboard = amplab.lab.open(text, model=Tagger(), data=TAGS, loss=F.cross_entropy)
    config = dashboard.trainer.config
    assert (config.opt_level, config.optimizer, config.lr) == ("O2", "adamw", 0.003)
    dashboard.close()


@pytest.mark.parametrize("raises", [False, True])
def test_open_leaves_the_settings_of_torch_though_a_step_does_not_switch_them_back(kernel, raises):
    def step(model, batch):
        torch.set_autocast_enabled("cpu", True)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        torch.set_grad_enabled(False)
        if raises:
            raise ArithmeticError("a bad batch")
        return loss

    try:
        amplab.lab.open(model=Tagger(), data=TAGS, step=step).close()
        assert not raises
    except ArithmeticError:
        assert raises
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_ctrl_c_in_open_leaves_grad_mode_on(kernel):
    """Copies of tensors, and of models, begin without gradients; the interrupt comes where that ends."""
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    F.cross_entropy(model(TAGS[0][0]), TAGS[0][1]).backward()
    optimizer.step()
    grad_mode = torch.autograd.grad_mode.__file__

    def opened():
        amplab.lab.open(model=model, data=TAGS, loss=F.cross_entropy, optimizer=optimizer).close()

    met = []
    for interrupt in interrupted_everywhere(opened, folders=[grad_mode], functions=["__exit__"], every=9):
        met.append(interrupt)
        assert torch.is_grad_enabled(), interrupt
    assert len(met) > 5


class Looked:
    """A step that takes a while, and knows how often it was run."""

    def __init__(self):
        self.times, self.goes_on, self.in_thread = 0, threading.Event(), threading.Event()
        self.goes_on.set()

    def __call__(self, model, batch):
        time.sleep(0.05)
        if threading.current_thread() is not threading.main_thread():
            self.in_thread.set()
            self.goes_on.wait(20)
        self.times += 1
        return F.cross_entropy(model(batch[0]), batch[1]) + torch.rand(())


def test_nothing_draws_beside_the_cell_once_open_or_attach_has_returned(kernel, listen):
    """The page shows a step of an experiment that has not begun, and a second page shows the same."""
    step = Looked()
    dashboards = [amplab.lab.open(model=Tagger, data=TAGS, step=step)]
    times = step.times
    torch.manual_seed(5)
    drawn = [torch.rand(()).item(), time.sleep(0.3), torch.rand(()).item()]
    assert (step.times, torch.initial_seed()) == (times, 5)
    torch.manual_seed(5)
    assert drawn == [torch.rand(()).item(), None, torch.rand(()).item()]
    ear = listen(kernel.trainer)
    dashboards.append(amplab.lab.attach())
    time.sleep(0.3)
    assert [type(each) for each in ear.events] == [TraceReady]
    assert (step.times, torch.initial_seed()) == (times, 5)
    kernel.trainer.run(1)
    dashboards.append(amplab.lab.attach())
    assert len(ear.of(TraceReady)) == 2
    assert ear.of(TraceReady)[1].step == 1
    for each in dashboards:
        each.close()


def test_open_does_not_wait_for_a_run(kernel, until):
    step = Looked()
    amplab.lab.open(model=Tagger, data=TAGS, step=step).close()
    kernel.trainer.start()
    amplab.lab.open(model=Tagger, data=TAGS, step=step).close()
    amplab.lab.attach().close()
    assert kernel.trainer.state == "running"
    kernel.trainer.pause()
    kernel.trainer.compare(steps=500)
    until(lambda: kernel.trainer.comparison is not None)
    amplab.lab.attach().close()
    assert kernel.trainer.comparison is not None


def test_ctrl_c_while_open_waits_for_the_first_look_leaves_a_lab_that_opens(kernel):
    step = Looked()
    step.goes_on.clear()

    def interrupt():
        step.in_thread.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        amplab.lab.open(model=Tagger, data=TAGS, step=step)
    thread.join()
    step.goes_on.set()
    amplab.lab.open(model=Tagger, data=TAGS, step=step).close()
    assert len(kernel.trainer.run(2)) == 2
