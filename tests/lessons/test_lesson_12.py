"""The recipe of torch.amp without one of its lines, and the checks of lesson 12."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

from amplab.lessons import lesson_12

RIGHT_ORDER = ["scale", "backward", "unscale_", "clip", "step", "update"]


def train_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    """The solution of exercise 2."""
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(batch.images), batch.labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def changed_step(*, autocast_on: bool = True, zero_grad: bool = True, max_norm: float = 1.0) -> Callable[..., None]:
    """Return the solution of exercise 2 with a mistake that gives no error."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
        with autocast("cpu", dtype=torch.float16, enabled=autocast_on):
            loss = F.cross_entropy(model(batch.images), batch.labels)
        if zero_grad:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def without_unscale(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(batch.images), batch.labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def without_scaler(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _scaler: GradScaler) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch.images), batch.labels).backward()
    optimizer.step()


def test_a_model_is_the_same_for_the_same_seed_and_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    first, second = lesson_12.new_model(3).model, lesson_12.new_model(3).model
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_whole_recipe_learns() -> None:
    run = lesson_12.recipe_without("nothing")
    assert run.losses[-1] < 0.5 * run.losses[0]
    assert (run.skipped, run.error) == ([], "")


@pytest.mark.parametrize("name", ["zero_grad", "unscale_"])
def test_without_these_lines_nothing_is_learned_and_nothing_is_said(name: str) -> None:
    run = lesson_12.recipe_without(name, first_scale=24)
    assert run.error == ""
    assert run.losses[-1] > 0.95 * run.losses[0]


@pytest.mark.parametrize(("name", "step"), [("scale", 0), ("update", 1)])
def test_without_these_lines_the_scaler_refuses(name: str, step: int) -> None:
    run = lesson_12.recipe_without(name)
    assert (len(run.losses), bool(run.error)) == (step, True)
    assert run.error in run._repr_html_()


def test_one_overflow_without_zero_grad_is_found_in_each_later_step() -> None:
    run = lesson_12.recipe_without("zero_grad", first_scale=24)
    assert run.skipped == list(range(lesson_12.STEPS))
    assert math.log2(run.scales[-1]) == 24 - lesson_12.STEPS


def test_the_explorer_shows_the_line_that_is_left_out() -> None:
    explorer = lesson_12.recipe_explorer()
    explorer.set(left_out="unscale_", first_scale=16)
    assert "<s>scaler.unscale_(optimizer)</s>" in explorer.payload["html"]
    assert "without unscale_" in repr(explorer)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RIGHT_ORDER, "Right"),
        (..., "Not answered yet"),
        (["scale", "backward", "clip", "unscale_", "step", "update"], "still multiplied by the loss scale"),
        (["backward", "scale", "unscale_", "clip", "step", "update"], "without a scale"),
        (["scale", "unscale_", "backward", "clip", "step", "update"], "no gradient yet"),
        (["scale", "backward", "unscale_", "step", "clip", "update"], "nothing limits"),
        (["update", "scale", "backward", "unscale_", "clip", "step"], "update is not last"),
        (["scale", "backward"], "not the six names"),
    ],
)
def test_check_order(answer: Any, said: str) -> None:
    assert said in repr(lesson_12.check_order(answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (train_step, "Right"),
        (changed_step(), "Right"),
        (changed_step(autocast_on=False), "inside autocast"),
        (changed_step(zero_grad=False), "set to zero before backward"),
        (changed_step(max_norm=2.0), "to a norm of 1.0"),
        (changed_step(max_norm=math.nan), "the weights differ by nan"),
        (..., "Not answered yet"),
        (without_unscale, "unscale_ is missing"),
        (without_scaler, "scaler.scale was called 0 times"),
        (changed_step(max_norm=math.inf), "clipped to a norm of 1.0"),
        (lambda _model: None, "your function raised TypeError"),
    ],
)
def test_check_train_step(answer: Callable[..., object], said: str) -> None:
    assert said in repr(lesson_12.check_train_step(answer))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale": 32768.0, "_growth_tracker": 12}, "Right"),
        ({"scale": 32768.0}, "_growth_tracker"),
        ({"_growth_tracker": 12}, "expected 32768"),
        ({"scale": 32768.0, "_growth_tracker": 12, "growth_interval": 12}, "growth_interval is 12, expected 2000"),
        ({"scale": 32768.0, "_growth_tracker": 12, "unskipped": 12}, "has the key 'unskipped', which is none of"),
        ({"scale": "32768"}, "answer['scale'] = '32768' is not a number: start from a whole state"),
        ({"scale": None}, "answer['scale'] = None is not a number"),
        ({"scale": 32768.0, "_growth_tracker": 12.0}, "Right"),
    ],
)
def test_check_loaded_scale(changes: dict[str, Any], said: str) -> None:
    assert said in repr(lesson_12.check_loaded_scale({**GradScaler("cpu").state_dict(), **changes}))


def test_check_loaded_scale_of_no_state() -> None:
    assert "Not answered yet" in repr(lesson_12.check_loaded_scale(...))  # type: ignore[arg-type]
    assert "Start from a whole state" in repr(lesson_12.check_loaded_scale({"scale": 32768.0}))
    assert "None is not a dict: start from a whole state" in repr(lesson_12.check_loaded_scale(None))  # type: ignore[arg-type]
