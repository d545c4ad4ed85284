"""Lesson 08: what half loses, clipping at both places, and the checks of the exercises."""

import pytest
import torch
from torch import nn

from amplab.lessons import lesson_08 as lesson


def answer_of(*after, in_block=()):
    """An answer to the third exercise: calls in the block of `scale_loss`, after the backward, and after the block."""

    def answer(session, loss, optimizer):
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            for call in in_block:
                call(session, optimizer)
        for call in after:
            call(session, optimizer)

    return answer


def step(_session, optimizer):
    optimizer.step()


def clip_to(limit):
    return lambda session, optimizer: nn.utils.clip_grad_norm_(session.master_params(optimizer), limit)


def clip_by_the_session(session, optimizer):
    session.clip_grad_norm_(optimizer, 1.0)


def clip_model_params(session, optimizer):
    nn.utils.clip_grad_norm_(session.model_params(optimizer), 1.0)


def clip_what_the_backward_wrote(session, optimizer):
    """In the block gradients are half and scaled."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    half = [each for each in session.model_params(optimizer) if each.grad is not None]
    nn.utils.clip_grad_norm_(half or params, 1.0)


def normalize(session, optimizer):
    """Make the norm 1 also where it is below 1."""
    for master in session.master_params(optimizer):
        master.grad /= master.grad.norm()


CLIP = clip_to(1.0)


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (lesson.check_smallest_rate, 2**-11),
        (lesson.check_bytes_per_parameter, 14),
        (lesson.check_clipped_step, answer_of(CLIP, step)),
        (lesson.check_clipped_step, answer_of(clip_by_the_session, step)),
    ],
)
def test_the_solution_is_right(check, answer):
    assert check(answer).right
    assert repr(check(answer)).startswith("Right")


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (lesson.check_smallest_rate, ..., "Not answered"),
        (lesson.check_smallest_rate, 2**-12, "0.5 of the spacing"),
        (lesson.check_smallest_rate, 2**-10, "moves it, too"),
        (lesson.check_smallest_rate, 0.001, "not a power of two"),
        (lesson.check_bytes_per_parameter, ..., "Not answered"),
        (lesson.check_bytes_per_parameter, 12, "half weights"),
        (lesson.check_bytes_per_parameter, 10, "one part is missing"),
        (lesson.check_bytes_per_parameter, 6, "two moments"),
        (lesson.check_bytes_per_parameter, 18, "gradients are not asked"),
        (lesson.check_bytes_per_parameter, 99, "add 2, 4 or 8"),
        (lesson.check_clipped_step, ..., "Not answered"),
        (lesson.check_clipped_step, 1.0, "is not a function: write def answer"),
        (lesson.check_clipped_step, answer_of(step, in_block=[clip_what_the_backward_wrote]), "1024 times too short"),
        (lesson.check_clipped_step, answer_of(clip_model_params, step), "not the parameters of the model"),
        (lesson.check_clipped_step, answer_of(step), "nothing clips them"),
        (lesson.check_clipped_step, answer_of(step, in_block=[CLIP]), "was called inside the block"),
        (lesson.check_clipped_step, answer_of(clip_to(10.0), step), "the limit of the clip has to be 1.0"),
        (lesson.check_clipped_step, answer_of(step, CLIP), "was called after optimizer.step(): clip after the block"),
        (lesson.check_clipped_step, answer_of(CLIP), "did not change"),
        (lesson.check_clipped_step, answer_of(clip_to(0.25), step), "norm 0.25; expected 1"),
        (lesson.check_clipped_step, answer_of(normalize, step), "norm 0.5, which is below the limit, became 1"),
        (lesson.check_clipped_step, answer_of(in_block=[step]), "raised RuntimeError"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(check, answer, said):
    verdict = check(answer)
    assert not verdict.right
    assert said in repr(verdict)


@pytest.mark.parametrize("rate", [2**-3, 2**-10])
def test_lost_updates_are_counted_as_torch_rounds_them(rate):
    torch.manual_seed(0)
    model = nn.Linear(32, 16, bias=False)
    model.weight.grad = torch.randn(16, 32) * 1e-2
    before = model.weight.detach().half()
    after = (before.double() - (rate * model.weight.grad).double()).half()
    assert lesson.lost_updates(model, rate) == {"weight": (after == before).double().mean().item()}


def test_half_without_masters_falls_behind():
    losses = {level: lesson.losses_of(level, 2**-15, steps=60) for level in ("O0", "O2", "O3")}
    fall = {level: run[0] - run[-1] for level, run in losses.items()}
    assert fall["O2"] == pytest.approx(fall["O0"], rel=0.1)
    assert fall["O3"] < 0.8 * fall["O2"]


def test_the_scale_changes_only_the_run_that_clips_late():
    right = pytest.approx(lesson.clipped_losses(lesson.RIGHT, 1.0), rel=1e-3)  # at 1 a few gradients underflow
    assert lesson.clipped_losses(lesson.RIGHT, 2.0**16) == right
    assert lesson.clipped_losses(lesson.LATE, 1.0) == right
    assert lesson.clipped_losses(lesson.LATE, 2.0**16)[-1] > 0.99 * lesson.clipped_losses(lesson.LATE, 1.0)[0]


def test_drawings_name_what_is_moved():
    assert "rate 2⁻⁸" in repr(lesson.draw_lost_updates(-8))
    assert "Adam, scale 2⁴" in repr(lesson.draw_clipping(4, lesson.LATE, "Adam"))
