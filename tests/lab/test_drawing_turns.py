"""Code of one's own that trains another experiment where a trainer calls it: it waits in the turn of its thread."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from interrupts import interrupted_everywhere
from own_models import registered
from torch import nn
from torch.nn import functional as F

from amplab.lab import ExperimentConfig, Failed, Trainer, drawing_turns
from amplab.lab.drawing_turns import drawing_alone, leaving_turn

pytestmark = pytest.mark.usefixtures("nothing_own")

SMALL = ExperimentConfig(hidden=8)
PLACES = ("model", "data", "step", "optimizer", "evaluate")
SECONDS = 60


def within_time(act):
    """Return what `act` returns in a thread of its own, or raise what it raises; fail if it does not end."""
    answers, errors = [], []

    def answer():
        try:
            answers.append(act())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]
    return answers[0]


def own(place, act):
    """Return the config of a model that draws, whose code at one place calls `act`."""

    def acting(where, value):
        if where == place:
            act()
        return value

    batches = [(torch.ones(4, 3), torch.arange(4) % 2), (torch.zeros(4, 3), torch.arange(4) % 2)]
    return registered(
        lambda: acting("model", nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))),
        lambda: acting("data", batches),
        step=lambda model, batch: acting("step", F.cross_entropy(model(batch[0]), batch[1])),
        optimizer=lambda weights: acting("optimizer", torch.optim.SGD(weights, lr=0.1)),
        evaluate=lambda model: acting("evaluate", model(batches[0][0]).std().item()),
    )


def records(trainer):
    return [replace(record, seconds=0.0) for record in trainer.history.records()]


@pytest.mark.parametrize("place", PLACES)
def test_code_of_ones_own_may_train_another_experiment_and_both_have_the_bits_that_they_have_alone(place):
    inner, acted, drawing = [], [], own("", lambda: None)

    def train_another():
        inner.append(Trainer(drawing))
        inner[-1].run(2)
        inner[-1].start(1)
        inner[-1].trace()
        inner[-1].wait()
        inner[-1].score()

    def trained(act):
        trainer = Trainer(own(place, act))
        trainer.run(26 if place == "evaluate" else 2)
        trainer.reset()
        trainer.run(2)
        assert trainer.failures == ()
        return records(trainer)

    alone = within_time(lambda: trained(lambda: acted.append(1)))
    state = torch.get_rng_state()
    beside = Trainer(drawing)
    beside.start()
    assert within_time(lambda: trained(train_another)) == alone
    beside.pause()
    assert beside.wait(SECONDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(inner) == len(acted) > 0
    assert records(beside)[:3] == records(inner[0])
    assert all(records(each) == records(inner[0]) and len(each.history) == 3 for each in inner)


@pytest.mark.parametrize("wait", [Trainer.wait, lambda trainer: trainer.run(2)])
@pytest.mark.parametrize("place", ["evaluate", "step"])
def test_waiting_for_the_trainer_that_calls_is_an_error_of_that_code(place, wait, listen):
    begun = []
    trainer = Trainer(own(place, lambda: wait(begun[0]) if begun else None))
    ear = listen(trainer)
    begun.append(trainer)
    if place == "step":
        with pytest.raises(RuntimeError, match="would wait for itself"):
            within_time(lambda: trainer.run(30))
        assert trainer.state == "failed"
    else:
        assert len(within_time(lambda: trainer.run(30))) == 30
        with pytest.raises(RuntimeError, match="would wait for itself"):
            within_time(trainer.score)
        assert len(trainer.history) == 30
    assert all("would wait for itself" in failed.text for failed in ear.of(Failed))
    assert ear.of(Failed)
    begun.clear()
    trainer.reset()
    assert len(within_time(lambda: trainer.run(2))) == 2


def test_ctrl_c_where_the_turn_is_left_and_taken_again_leaves_it_to_its_owner_then_free():
    free = drawing_alone(lambda: True)

    def is_taken():
        thread = threading.Thread(target=free, daemon=True)
        thread.start()
        thread.join(0.05)
        return thread.is_alive()

    @drawing_alone
    def act():
        try:
            assert leaving_turn(lambda: within_time(free))()
        finally:
            assert is_taken()

    points = 0
    for interrupt in interrupted_everywhere(act, folders=[drawing_turns.__file__]):
        points += 1
        assert within_time(free), interrupt
        assert interrupt.escaped, interrupt
    assert points > 10


def test_ctrl_c_while_another_experiment_is_waited_for_leaves_trainers_that_train(until):
    other = Trainer(SMALL)

    def press():
        until(lambda: len(other.history) > 3)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        own("model", lambda: other.run(10**6))
    presses.join()
    assert other.state == "paused"
    assert other.wait(SECONDS)
    assert len(within_time(lambda: Trainer(SMALL).run(2))) == 2
