"""The patients of lesson 16 have what their checks say, and are healthy after the remedy."""

import re

import pytest
import torch
from course import FOLDER, read, sections, text_of

from amplab.amp import Session
from amplab.lessons import lesson_16 as lesson
from amplab.scalers import DynamicScale

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


def text_of_section(start):
    """The text of the section whose heading starts so, on one line."""
    parts = sections(read(FOLDER / "16_the_clinic.ipynb"))
    (name,) = (each for each in parts if each.startswith(start))
    return " ".join(" ".join(map(text_of, parts[name])).split())


def test_the_lesson_counts_the_skips_of_the_fourth_patient_as_its_run_and_its_replay_do(admitted):
    history, mended = admitted(4).run().history, admitted(4, broken=False).run().history
    down = history.column("loss_scale").tolist().index(2.0**18)
    first = [step for step in history.skipped_steps() if step < down]
    number = {4: "four", 5: "five", 6: "six", 7: "seven"}[len(first)]
    assert f"The first {number} skips" in text_of_section("16.6")
    assert f"{number} steps are skipped with the longest window" in text_of_section("16.9")
    longest = history.replay(DynamicScale(init_scale=2.0**24, growth_interval=2**11))
    assert (len(longest.skips), longest.scales[-1]) == (len(first), 2.0**18)
    assert set(mended.column("loss_scale").tolist()) == {2.0**16}  # both arguments are the defaults


def test_the_tools_of_the_lesson_can_be_used_after_its_last_cell():
    names = {}
    for cell in read(FOLDER / "16_the_clinic.ipynb")["cells"]:
        if cell["cell_type"] == "code":
            exec(text_of(cell), names)
    lines = re.findall(r"\| `((?:amplab|watches|p)\b[^`]+)` \|", "".join(map(text_of, tools())))
    assert len(lines) == 7
    for number, p in names["patients"].items():
        for line in lines:
            found = eval(line.replace("[1]", f"[{number}]"), names | {"p": p, "batch": p.batches[-1]})
        assert next(iter(found)).name == lesson.DIAGNOSES[RIGHT[number]]  # what the doctor says is the last one
    for each in (*names["patients"].values(), *names["mended"].values()):
        if isinstance(each.scaler, Session):
            each.scaler.reset()


def tools():
    """The cells of section 16.2."""
    parts = sections(read(FOLDER / "16_the_clinic.ipynb"))
    return next(cells for name, cells in parts.items() if name.startswith("16.2"))


def test_the_lesson_says_how_an_answer_is_written():
    (example,) = re.findall(r"`answer = \"([^\"]+)\"`", text_of_section("Exercises").partition("16.3 Patient")[0])
    assert example in lesson.DIAGNOSES.keys() - set(RIGHT.values())
    assert "None is not a string: write one of the ten diagnoses" in str(lesson.check_1(None))
    assert len(lesson.DIAGNOSES) == 10
