"""Random number generators, which stand after loading where they stood at saving."""

import random

import numpy as np
import pytest
import torch

from amplab import amp


@pytest.fixture(autouse=True)
def generators_are_restored():
    numpy_state, python_state = np.random.get_state(), random.getstate()
    random.seed(5)
    np.random.seed(6)
    yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def draw_from_all():
    return torch.rand(2).tolist(), random.random(), np.random.random(), np.random.standard_normal()


def test_generators_are_restored(tmp_path):
    path = tmp_path / "run.pt"
    np.random.standard_normal()  # numpy keeps the second of a pair for the next call
    amp.save_run_state(path)
    drawn = draw_from_all()
    draw_from_all()
    amp.load_run_state(path)
    assert draw_from_all() == drawn


def test_another_generator_of_numpy_is_refused(tmp_path):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(amp.RunStateError, match="uses PCG64: expected MT19937"):
            amp.save_run_state(tmp_path / "run.pt")
    finally:
        np.random.set_bit_generator(before)
