"""The old scalers against apex's own recurrence, written out."""

import random

import pytest
import torch
from torch import nn

from amplab.fp16_utils import DynamicLossScaler, LossScaler


def transcription(overflows, scale, factor, window):
    """Yield apex's ``cur_scale`` after each update."""
    last_overflow = -1
    for iteration, overflow in enumerate(overflows):
        if overflow:
            scale = max(scale / factor, 1)
            last_overflow = iteration
        elif (iteration - last_overflow) % window == 0:
            scale *= factor
        yield scale


@pytest.mark.parametrize(("factor", "window"), [(2.0, 4), (3.0, 2), (1.5, 1)])
def test_the_dynamic_scale_is_apexs(factor, window):
    overflows = [random.Random(0).random() < 0.3 for _ in range(200)]
    scaler = DynamicLossScaler(init_scale=2.0**10, scale_factor=factor, scale_window=window)
    scales = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == list(transcription(overflows, 2.0**10, factor, window))


def test_a_saved_scale_goes_on():
    first = DynamicLossScaler(init_scale=8.0, scale_window=3)
    for _ in range(2):
        first.update_scale(False)
    second = DynamicLossScaler(init_scale=2.0, scale_window=3)
    second.load_state_dict(first.state_dict())
    second.update_scale(False)
    assert second.cur_scale == 16.0


def test_overflows_are_seen_by_a_dynamic_scaler_alone():
    weight = nn.Parameter(torch.ones(2))
    assert not DynamicLossScaler().has_overflow([weight])
    weight.grad = torch.tensor([1.0, float("nan")])
    assert DynamicLossScaler().has_overflow([weight])
    assert not LossScaler(128.0).has_overflow([weight])


def test_a_static_scale_stays_and_scales():
    scaler, weight = LossScaler(128.0), nn.Parameter(torch.ones(2))
    scaler.update_scale(True)
    scaler.backward(weight.sum())
    assert weight.grad.tolist() == [128.0, 128.0]
    assert scaler.scale_gradient(None, (torch.ones(1),), None)[0].item() == 128.0


def test_the_dynamic_scale_stops_at_one():
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=3.0)
    for _ in range(5):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
