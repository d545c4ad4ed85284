"""The formulas of an agreement's cost against a simulation that sends each message."""

import pytest
import torch

from amplab.parallel.agreement_cost import (
    LatencyModel,
    agreement_bounds,
    agreement_time,
    harmonic,
    simulated_agreement,
)

SIZES = (1, 2, 4, 8, 16, 24, 40, 64, 1000, 1016, 1024, 10_000)


@pytest.mark.parametrize("gpus", SIZES)
def test_without_jitter_the_simulation_is_the_formula(gpus):
    simulated = simulated_agreement(gpus, LatencyModel(), trials=2)
    assert simulated.tolist() == pytest.approx([agreement_time(gpus)] * 2, rel=1e-12)


@pytest.mark.parametrize("gpus", SIZES)
def test_with_jitter_the_mean_lies_between_the_bounds(gpus):
    latency = LatencyModel(jitter=5e-6)
    low, high = agreement_bounds(gpus, latency)
    simulated = simulated_agreement(gpus, latency, trials=400)
    error = 4 * simulated.std().item() / 20 + 1e-12
    assert low - error <= simulated.mean().item() <= high + error
    assert low <= high


@pytest.mark.parametrize("gpus", [8, 1000, 10_000])
def test_ranks_that_arrive_late_cost_the_expected_maximum(gpus):
    """With instantaneous messages an agreement waits for the last rank."""
    instant = LatencyModel(base=0.0, inside=0.0, between=0.0)
    simulated = simulated_agreement(gpus, instant, spread=1.0, trials=1000)
    assert simulated.mean().item() == pytest.approx(harmonic(gpus), abs=4 * simulated.std().item() / 1000**0.5)


def test_every_rank_counts():
    """The late arrival of any single rank delays the result."""
    latency = LatencyModel(gpus_per_host=4)
    for seed in range(5):
        assert (simulated_agreement(12, latency, spread=1.0, trials=50, seed=seed) > agreement_time(12, latency)).all()
    assert torch.equal(simulated_agreement(12, latency, seed=3), simulated_agreement(12, latency, seed=3))


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda: LatencyModel(gpus_per_host=6), "gpus_per_host=6"),
        (lambda: LatencyModel(jitter=-1.0), "jitter=-1.0"),
        (lambda: agreement_time(12), "gpus=12"),
        (lambda: agreement_time(0), "gpus=0"),
    ],
)
def test_what_has_no_tree_is_refused(call, given):
    with pytest.raises(ValueError, match=given):
        call()
