"""apex.amp.scaler.LossScaler: its names, and its scale beside the rule of torch."""

import random

import pytest
import torch

from amplab import amp
from amplab.amp.apex.loss_scaling import LossScaler


def test_a_dynamic_scale_moves_as_torchs_does():
    scaler = LossScaler("dynamic", init_scale=2.0**10, scale_window=3, min_loss_scale=4.0, max_loss_scale=2.0**12)
    scale, tracker = torch.tensor(2.0**10), torch.tensor(0, dtype=torch.int32)
    verdicts = random.Random(0)
    for _ in range(300):
        found = verdicts.random() < 0.3
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(found)), 2.0, 0.5, 3)
        scale.clamp_(4.0, 2.0**12)
        scaler._overflow_buf.fill_(int(found))
        assert scaler.update_scale() is found
        assert not scaler._has_overflow
        assert scaler.loss_scale() == scaler._loss_scale == scale.item()


def test_a_static_scale_stays_and_skips_nothing():
    scaler = LossScaler("128.0")
    scaler._overflow_buf.fill_(1)
    assert not scaler.update_scale()
    assert (scaler.loss_scale(), scaler.dynamic) == (128.0, False)


def test_those_of_initialize_are_of_this_class(problem):
    amp.initialize(problem.model(), opt_level="O2", verbosity=0)
    assert isinstance(amp._amp_state.loss_scalers[0], LossScaler)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"loss_scale": "static"}, "loss_scale='static': expected"),
        ({"loss_scale": "dynamic", "scale_factor": 0}, "scale_factor=0: expected a finite number > 0"),
        ({"loss_scale": "dynamic", "min_loss_scale": 8, "max_loss_scale": 4}, "min_loss_scale=8 is above"),
    ],
)
def test_what_cannot_be_a_scale_is_refused(arguments, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        LossScaler(**arguments)


def test_unscaling_is_elsewhere():
    with pytest.raises(AttributeError, match=r"unscale does not exist .* unscaled by amp.scale_loss\.$"):
        LossScaler("dynamic").unscale([], [], 1.0)
