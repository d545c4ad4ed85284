"""Every random state is what it was, whatever a block draws."""

import contextlib
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from amplab.trace.random_states import (
    GENERATORS,
    generators_of,
    is_global,
    random_states_kept,
    reseed,
    restorers,
    seed_all,
)


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


SINGLE = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda own: torch.rand((), generator=own).item()),
    "python": (random.Random, random.Random.random),
    "numpy": (np.random.default_rng, np.random.Generator.normal),
    "numpy, old": (np.random.RandomState, np.random.RandomState.normal),
    "numpy, old with another": (lambda seed: np.random.RandomState(np.random.PCG64(seed)), np.random.RandomState.rand),
}


@pytest.mark.parametrize(("make", "draw"), SINGLE.values(), ids=SINGLE)
def test_a_single_generator_is_restored_and_seeded_anew_by_its_state_and_a_seed(make, draw):
    own, same, other = make(3), make(3), make(4)
    (undo,) = restorers([own, "no generator"])
    first = [draw(own) for _ in range(3)]
    undo()
    assert [draw(own) for _ in range(3)] == first
    undo()
    drawn = []
    for each, seed in ((own, 2**63 - 1), (same, 2**63 - 1), (other, 2**63 - 1), (make(3), 7)):
        reseed(each, seed)
        drawn.append(draw(each))
    assert drawn[0] == drawn[1]
    assert len({first[0], *drawn}) == 4


def test_the_generators_that_a_seed_is_for_are_global():
    found = torch.default_generator, random.random.__self__, np.random.rand.__self__
    assert all(isinstance(each, GENERATORS) and is_global(each) for each in found)
    assert not any(is_global(make(1)) for make, _ in SINGLE.values())


def test_a_generator_without_a_state_is_left_out():
    assert restorers((random.SystemRandom(), random.Random(1))) != ()
    assert len(restorers((random.SystemRandom(), random.Random(1)))) == 1


def test_an_object_that_is_gone_is_left_out():
    class Parent:
        pass

    own, gone = random.Random(1), Parent()
    data = SimpleNamespace(parent=weakref.proxy(gone), draw=own)
    del gone
    assert list(generators_of(data)) == [own]
