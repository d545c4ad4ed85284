"""Every random state is what it was, whatever a block draws."""

import contextlib
import random

import numpy as np
import pytest
import torch

from amplab.trace.random_states import random_states_kept, seed_all


def draw_all():
    return random.random(), np.random.rand(), np.random.randn(), np.random.randn(), torch.rand(()).item()


DRAWS = {
    "nothing": lambda: None,
    "python": random.random,
    "numpy": np.random.rand,
    "numpy, 700 words": lambda: np.random.rand(700),
    "numpy, a normal value": np.random.randn,
    "numpy, two normal values": lambda: np.random.randn(2),
    "numpy, another seed": lambda: np.random.seed(9),
    "torch": lambda: torch.rand(3),
}


@pytest.mark.parametrize("spare", [False, True], ids=["", "with a spare normal value"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_comes_next_is_what_would_have_come(draw, spare):
    def begin():
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        if spare:
            np.random.randn()

    begin()
    expected = draw_all()
    begin()
    with random_states_kept([torch.device("cpu"), torch.device("meta")]):
        draw()
    assert draw_all() == expected


@pytest.mark.parametrize("draws", [False, True])
def test_another_generator_of_numpys_is_kept_too(draws):
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        expected = np.random.rand()
        np.random.set_bit_generator(np.random.PCG64(5))
        with random_states_kept([]):
            draws and np.random.rand()
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(usual)


def test_after_an_exception_too():
    state = np.random.get_state()[2]
    with contextlib.suppress(KeyError), random_states_kept([]):
        np.random.rand()
        raise KeyError
    assert np.random.get_state()[2] == state


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_a_seed_is_for_all_generators(seed):
    with random_states_kept(()):
        seed_all(seed)
        first = draw_all()
        seed_all(seed)
        assert draw_all() == first
