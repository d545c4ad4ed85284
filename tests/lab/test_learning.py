"""Mixed precision learns: O1 on held-out digits against O0, and the loss scale is seen to move."""

import pytest

from amplab.lab import ExperimentConfig, Trainer

SEEDS = (0, 1)
STEPS = 250


def accuracy(config: ExperimentConfig) -> float:
    trainer = Trainer(config)
    trainer.run(STEPS)
    return trainer.score()


@pytest.mark.parametrize(("model", "learnt"), [("mlp", 0.93), ("cnn", 0.95)])
def test_o1_learns_what_o0_learns(model, learnt):
    """Five seeds agree within a point after 300 steps; two leave room for the luck of 360 held-out images."""
    config = ExperimentConfig(model=model, hidden=64)
    half = [accuracy(config.changed(seed=seed)) for seed in SEEDS]
    single = [accuracy(config.changed(seed=seed, opt_level="O0")) for seed in SEEDS]
    assert min(sum(half), sum(single)) / len(SEEDS) > learnt
    assert abs(sum(half) - sum(single)) / len(SEEDS) < 0.02


def test_the_default_scale_climbs_and_overflows():
    history = Trainer(ExperimentConfig()).run(400)
    scale = history.column("loss_scale")
    assert scale[0] == 2.0**16
    assert scale.max() >= 2.0**18
    assert 1 <= history.skip_count <= 12
    for skip in history.skips():
        assert skip.next_loss_scale == skip.loss_scale / 2
        assert skip.first_nonfinite is not None
