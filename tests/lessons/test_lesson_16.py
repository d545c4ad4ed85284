"""The patients of lesson 16 have what their checks say, and are healthy after the remedy."""

import pytest
import torch

from amplab.amp import Session
from amplab.lessons import lesson_16 as lesson

RIGHT = {
    1: "a sum overflows in forward",
    2: "gradients are clipped while they are scaled",
    3: "gradients underflow",
    4: "the loss scale grows too often",
    5: "the data has an inf or NaN",
    6: "forward uses old half copies of the weights",
}
CHECKS = (lesson.check_1, lesson.check_2, lesson.check_3, lesson.check_4, lesson.check_5, lesson.check_6)


@pytest.fixture
def admitted():
    """A function like `patient`, whose sessions end with the test."""
    made = []

    def admit(number, broken=True):
        made.append(lesson.patient(number, broken))
        return made[-1]

    yield admit
    for each in made:
        if isinstance(each.scaler, Session):
            each.scaler.reset()


@pytest.mark.parametrize("number", RIGHT)
def test_the_diagnosis_is_accepted(number):
    assert str(CHECKS[number - 1](RIGHT[number])).startswith("Right.")


@pytest.mark.parametrize("number", RIGHT)
def test_another_diagnosis_is_refused_with_a_next_step(number):
    verdict = CHECKS[number - 1](RIGHT[number % 6 + 1])
    assert not verdict.right
    assert "does not find it" in str(verdict)
    assert "Not answered yet" in str(CHECKS[number - 1](...))


def test_a_diagnosis_that_is_no_diagnosis():
    assert "no diagnosis of the list" in str(lesson.check_1("it is broken"))


def test_gradients_that_underflow_at_a_dynamic_scale_are_no_finding():
    assert "looks for 'gradients underflow' in this run and does not find it" in str(
        lesson.check_6("gradients underflow")
    )


def test_what_the_run_alone_looks_like_is_not_the_diagnosis():
    assert "fits what the run shows" in str(lesson.check_6("the learning rate is too large"))


def test_a_smaller_learning_rate_helps_the_sixth_patient_less_than_new_copies_of_its_weights(admitted):
    broken, slower, renewed = admitted(6), admitted(6), admitted(6)
    slower.optimizer.param_groups[0]["lr"] = 0.2
    renewed.optimizer.register_step_post_hook(lambda *_: torch.clear_autocast_cache())
    for each in (broken, slower, renewed):
        each.run()
    assert broken.score() + 0.2 < slower.score() < renewed.score()


@pytest.mark.parametrize("number", RIGHT)
def test_findings_of_the_run_alone_are_right_for_four_patients(number, admitted):
    names = [each.name for each in admitted(number).run().findings()]
    assert names[:1] == {5: [], 6: ["diverging"]}.get(number, [lesson.DIAGNOSES[RIGHT[number]]])


@pytest.mark.parametrize("number", RIGHT)
def test_the_mended_run_is_healthy_and_better(number, admitted):
    broken, mended = admitted(number), admitted(number, broken=False)
    skips, none = broken.run().history.skip_count, mended.run().history.skip_count
    assert not mended.examined().harmful
    assert none == 0
    assert mended.score() > 0.8
    assert skips > 0 or broken.score() < mended.score() - 0.2


def test_a_number_out_of_range_is_refused():
    with pytest.raises(ValueError, match="number=7"):
        lesson.patient(7)
