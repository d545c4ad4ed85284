"""Learning rates that code of one's own sets: what changes them besides, and what cannot."""

import pytest
import torch.nn.functional as F
from own_models import TAGS, Tagger, registered
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from amplab.lab import Experiment, Trainer

pytestmark = pytest.mark.usefixtures("nothing_own")


class Inner(SGD):
    """Has its schedule in an attribute."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        self.schedule = ExponentialLR(self, 0.9)

    def step(self, closure=None):
        super().step(closure)
        self.schedule.step()


class Noam(SGD):
    """Computes its rate before each step."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        self.made = 0

    def step(self, closure=None):
        self.made += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * 0.8**self.made
        super().step(closure)


def decayed_in_a_hook(weights):
    optimizer = SGD(weights, lr=0.1)

    def decay(*_):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    optimizer.register_step_post_hook(decay)
    return optimizer


@pytest.mark.parametrize("make", [Inner, Noam, decayed_in_a_hook])
def test_a_rate_that_code_sets_is_not_overwritten_by_the_lab(make, tmp_path):
    config = registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=make)
    whole = Experiment(config)
    losses = [whole.step().loss for _ in range(9)]

    changed = Experiment(config)
    seen = [changed.step().loss for _ in range(3)]
    with pytest.raises(ValueError, match="your optimizer, or a schedule in a hook of it, sets the learning rate"):
        changed.switch(config.changed(lr=0.5))
    changed.switch(config.changed(momentum=0.3, opt_level="O0"))
    changed.switch(config)
    seen += [changed.step().loss for _ in range(3)]
    assert seen == losses[:6]
    assert changed.config == config

    if make is not Inner:  # a schedule in an attribute begins anew, and that is told
        changed.save(tmp_path / "run.checkpoint", {})
        again, _ = Experiment.load(tmp_path / "run.checkpoint")
        with pytest.raises(ValueError, match="sets the learning rate"):
            again.switch(config.changed(lr=0.5))
        assert [again.step().loss for _ in range(3)] == losses[6:]


def test_a_rate_that_only_the_lab_sets_can_change_again_and_again():
    config = registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=lambda weights: SGD(weights, lr=0.1))
    experiment = Experiment(config)
    for rate in (0.3, 1e-7, 0.123456789, 0.1):
        experiment.step()
        experiment.switch(config.changed(lr=rate))
        assert experiment.optimizer.param_groups[0]["lr"] == rate


def test_an_undo_that_would_overwrite_the_rate_is_told_and_changes_nothing():
    config = registered(Tagger(), TAGS, loss=F.cross_entropy, optimizer=decayed_in_a_hook)
    trainer = Trainer(config)
    trainer.change(lr=0.5)  # no step has shown yet that code sets it
    trainer.run(3)
    losses = list(trainer.history.column("loss"))
    trainer.undo()
    assert trainer.wait(10)
    assert trainer.config.learning_rate == 0.5
    assert "sets the learning rate" in trainer.failures[-1].text
    trainer.stop()
    assert losses == list(trainer.history.column("loss"))
