"""Lesson 3: at scale 1 the first layer does not learn, and the checks say what is wrong."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from amplab.formats import FLOAT16, underflow_fraction
from amplab.lessons import lesson_03
from amplab.lessons.exercises import NOT_ANSWERED


def plain(_model, optimizer, loss, _scale):
    loss.backward()
    optimizer.step()


def scaled(model, optimizer, loss, scale, *, factor=1.0):
    (loss * scale).backward()
    for parameter in model.parameters():
        parameter.grad /= scale * factor
    optimizer.step()


def divides_the_learning_rate(_model, optimizer, loss, scale):
    (loss * scale).backward()
    for group in optimizer.param_groups:
        group["lr"] /= scale
    optimizer.step()


def divides_by_1024(model, optimizer, loss, scale):
    (loss * scale).backward()
    for parameter in model.parameters():
        parameter.grad /= 1024
    optimizer.step()


def forgets_to_unscale(_model, optimizer, loss, scale):
    (loss * scale).backward()
    optimizer.step()


def forgets_to_scale(model, optimizer, loss, scale):
    loss.backward()
    for parameter in model.parameters():
        parameter.grad /= scale
    optimizer.step()


def forgets_the_step(_model, _optimizer, loss, scale):
    (loss * scale).backward()


def test_the_first_layer_learns_with_a_scale_only() -> None:
    moved = {}
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, 1.0), (torch.float16, 2.0**16)):
        model, optimizer = lesson_03.fresh_network()
        before = model.layer1.weight.detach().clone()
        lesson_03.train(model, optimizer, dtype=dtype, scale=scale, steps=1)
        moved[dtype, scale] = float((model.layer1.weight.detach() - before).abs().max())
    assert moved[torch.float16, 1.0] == 0.0
    assert moved[torch.float16, 2.0**16] == pytest.approx(moved[torch.float32, 1.0], rel=0.1)


def test_gradients_between_layers_are_those_of_retain_grad_and_leave_no_hook() -> None:
    images, labels = lesson_03.digits(100)
    model, _ = lesson_03.fresh_network()
    found = lesson_03.gradients_between_layers(model, images, labels)
    first = model.layer1(images)
    first.retain_grad()
    F.cross_entropy(model[1:](first), labels).backward()
    assert list(found) == [f"layer{number}" for number in range(1, 8)]
    assert found["layer1"].total == first.numel()
    assert found["layer1"].underflow_fraction(FLOAT16) == pytest.approx(
        underflow_fraction(first.grad, FLOAT16), abs=1e-3
    )
    assert not model.layer1._forward_hooks


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (16, "Right"),
        (torch.tensor(16.0), "Right"),
        (np.float32(16), "Right"),
        (8, "still zero"),
        (torch.tensor(32), "find the smallest"),
        (12, "power of two"),
        (-16, "power of two"),
        ("16", "'16' is not a number: write a power of two"),
        (torch.ones(2), "is not a number"),
        (..., NOT_ANSWERED),
    ],
)
def test_check_large_enough(answer, said: str) -> None:
    verdict = lesson_03.check_large_enough(answer)
    assert said in repr(verdict)
    assert verdict.right is (said == "Right")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (512.0, "Right"),
        (2.0**20, "reduction='sum'"),
        (1000, "largest_fit"),
        (256, "not what the tool returns"),
        (..., NOT_ANSWERED),
    ],
)
def test_check_sum(answer, said: str) -> None:
    verdict = lesson_03.check_sum(answer)
    assert said in repr(verdict)
    assert verdict.right is (answer == 512.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (scaled, "Right"),
        (plain, "no scale"),
        (forgets_to_unscale, "too far"),
        (forgets_to_scale, "too little"),
        (forgets_the_step, "optimizer.step()"),
        (lambda *step: scaled(*step, factor=3.0), "0.33 times"),
        (divides_the_learning_rate, "other gradients"),
        (divides_by_1024, "wrong for 4,096"),
        (lambda: None, "TypeError"),
        (3, "not a function"),
        (..., NOT_ANSWERED),
    ],
)
def test_check_scaled_step(answer, said: str) -> None:
    verdict = lesson_03.check_scaled_step(answer)
    assert said in repr(verdict)
    assert verdict.right is (answer is scaled)
