"""Lesson 07: the folder of the build, the hard cases, counting operators, and the checks of the exercises."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from amplab.kernels.unscale import multi_tensor_unscale__reference
from amplab.lessons import lesson_07 as lesson

SCHEMA = "(Tensor[] inputs, Tensor(a!)[] outputs, Tensor(b!) found_inf, Tensor inv_scale) -> ()"


def unscale_copy(inputs, outputs, found_inf, inv_scale):
    """The solution of the third exercise."""
    for source, output in zip(inputs, outputs, strict=True):
        output.copy_(source.float() * inv_scale)
        if not output.isfinite().all():
            found_inf.fill_(1.0)


def rounded_to_half(inputs, outputs, found_inf, inv_scale):
    for source, output in zip(inputs, outputs, strict=True):
        output.copy_(source * inv_scale.half())


def unchecked(inputs, outputs, found_inf, inv_scale):
    for source, output in zip(inputs, outputs, strict=True):
        output.copy_(source.float() * inv_scale)


def in_place(inputs, outputs, found_inf, inv_scale):
    unscale_copy(inputs, outputs, found_inf, inv_scale)
    inputs[0].zero_()


def unscaled_twice(inputs, outputs, found_inf, inv_scale):
    for source, output in zip(inputs, outputs, strict=True):
        output.copy_(source.float() * inv_scale * 2)


def only_the_last(inputs, outputs, found_inf, inv_scale):
    unchecked(inputs, outputs, found_inf, inv_scale)
    found_inf.fill_(float(not outputs[-1].isfinite().all()))


def only_inf(inputs, outputs, found_inf, inv_scale):
    unchecked(inputs, outputs, found_inf, inv_scale)
    if any(output.isinf().any() for output in outputs):
        found_inf.fill_(1.0)


def forgets_an_earlier_call(inputs, outputs, found_inf, inv_scale):
    found_inf.zero_()
    unscale_copy(inputs, outputs, found_inf, inv_scale)


def asks_the_sum(inputs, outputs, found_inf, inv_scale):
    unchecked(inputs, outputs, found_inf, inv_scale)
    if not all(torch.isfinite(output.sum()) for output in outputs):
        found_inf.fill_(1.0)


def asks_the_inputs(inputs, outputs, found_inf, inv_scale):
    """Another right answer: halves that are finite are finite as float32, too."""
    unchecked(inputs, outputs, found_inf, inv_scale)
    if not all(source.isfinite().all() for source in inputs):
        found_inf.fill_(1.0)


def asks_the_largest(inputs, outputs, found_inf, inv_scale):
    unchecked(inputs, outputs, found_inf, inv_scale)
    if not all(output.max().isfinite() for output in outputs):
        found_inf.fill_(1.0)


def asks_the_last_number(inputs, outputs, found_inf, inv_scale):
    unchecked(inputs, outputs, found_inf, inv_scale)
    if not all(output[-1].isfinite() for output in outputs):
        found_inf.fill_(1.0)


def takes_two(inputs, outputs, found_inf, inv_scale):
    unscale_copy(inputs[:2], outputs[:2], found_inf, inv_scale)


def other_tensors(inputs, outputs, found_inf, inv_scale):
    """Slices of a list are copies: the caller's tensors stay as they were."""
    copies = [torch.empty_like(output) for output in outputs]
    unscale_copy(inputs, copies, found_inf, inv_scale)
    outputs[:] = copies


def nothing(inputs, outputs, found_inf, inv_scale):
    pass


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (lesson.check_least_time, 5),
        (lesson.check_schema, SCHEMA),
        (lesson.check_unscale_copy, unscale_copy),
        (lesson.check_unscale_copy, asks_the_inputs),
    ],
)
def test_the_solution_is_right(check, answer):
    assert check(answer).right


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (lesson.check_least_time, ..., "Not answered"),
        (lesson.check_least_time, 2.5, "also written"),
        (lesson.check_least_time, 0.005, "in seconds"),
        (lesson.check_least_time, 10, "20 GB/s"),
        (lesson.check_least_time, 0, "0 is not a time"),
        (lesson.check_schema, ..., "Not answered"),
        (lesson.check_schema, "(Tensor", "cannot read"),
        (lesson.check_schema, SCHEMA.replace("(a!)", ""), "outputs is only read"),
        (lesson.check_schema, SCHEMA.replace("Tensor[]", "Tensor(c!)[]"), "inputs is written"),
        (lesson.check_schema, SCHEMA.replace("inv_scale", "scale"), "expected inputs"),
        (lesson.check_schema, SCHEMA.replace("Tensor inv", "float inv"), "inv_scale is float now"),
        (lesson.check_schema, SCHEMA.replace("[] inputs", " inputs"), "inputs is Tensor now"),
        (lesson.check_schema, SCHEMA.replace("b!", "a!"), "the same letter"),
        (lesson.check_schema, SCHEMA.replace("()", "Tensor"), "returns nothing"),
        (lesson.check_schema, SCHEMA.replace("Tensor inv", "Tensor(b) inv"), "Only add the marks"),
        (lesson.check_schema, SCHEMA.replace("Tensor[]", "Tensor(a)[]"), "Only add the marks"),
        (lesson.check_schema, SCHEMA.replace("Tensor inv_scale", "*, Tensor inv_scale=None"), "Only add the marks"),
        (lesson.check_unscale_copy, ..., "Not answered"),
        (lesson.check_unscale_copy, 3, "3 is not a function: write def answer"),
        (lesson.check_unscale_copy, rounded_to_half, "rounded to half"),
        (lesson.check_unscale_copy, unchecked, "found_inf is 0"),
        (lesson.check_unscale_copy, only_the_last, "found_inf is 0"),
        (lesson.check_unscale_copy, only_inf, "[[1.0, nan]]"),
        (lesson.check_unscale_copy, forgets_an_earlier_call, "found_inf is 0 for inputs [[1.0, 2.0]]. It was 1 before"),
        (lesson.check_unscale_copy, asks_the_sum, "found_inf is 1 for inputs [[65504.0, 65504.0]]. All of them are"),
        (lesson.check_unscale_copy, asks_the_largest, "-inf"),
        (lesson.check_unscale_copy, asks_the_last_number, "found_inf is 0"),
        (lesson.check_unscale_copy, takes_two, "an output did not change"),
        (lesson.check_unscale_copy, other_tensors, "an output did not change"),
        (lesson.check_unscale_copy, in_place, "changes the inputs"),
        (lesson.check_unscale_copy, nothing, "did not change"),
        (lesson.check_unscale_copy, unscaled_twice, "expected"),
        (lesson.check_unscale_copy, lambda: None, "TypeError"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(check, answer, said):
    verdict = check(answer)
    assert not verdict.right
    assert said in repr(verdict)


def test_the_two_references_agree_on_all_hard_cases():
    cases = lesson.hard_cases()
    assert all(lesson.agree(multi_tensor_unscale__reference, lesson.reference, grads) for grads in cases.values())


def one_block(grads, found_inf, inv_scale):
    """Treat each gradient as one block of memory, as a careless kernel does."""
    for grad in grads:
        torch.empty(0).set_(grad.untyped_storage())[: grad.numel()].mul_(inv_scale)
        if not grad.isfinite().all():
            found_inf.fill_(1.0)


def test_a_careless_kernel_fails_where_gradients_have_gaps():
    failed = [
        name for name, grads in lesson.hard_cases().items() if not lesson.agree(one_block, lesson.reference, grads)
    ]
    assert failed == ["every second column"]


def test_a_kernel_that_skips_the_last_element_is_found():
    def without_the_last(grads, found_inf, inv_scale):
        lesson.reference([grad.flatten()[:-1] for grad in grads if grad.is_contiguous()], found_inf, inv_scale)

    assert not lesson.agree(without_the_last, lesson.reference, lesson.hard_cases()["NaN in the last element"])


def test_a_schema_that_conceals_a_change_is_found():
    def operator(name, mutates):
        return torch.library.custom_op(f"test_lesson_07::{name}", lesson.reference, mutates_args=mutates)

    arguments = [torch.ones(3)], torch.zeros(1), torch.tensor(0.5)
    assert lesson.schema_fault(operator("true", ("grads", "found_inf")), *arguments) == ""
    assert "grads is not defined as mutable" in lesson.schema_fault(operator("silent", ("found_inf",)), *arguments)


def test_the_folder_of_a_build_is_the_same_again_and_free_of_old_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = os.environ["PATH"]
    with lesson.build_folder("int x;") as first:
        (Path(first) / "lock").touch()  # what a builder leaves that is killed
    with lesson.build_folder("int y;") as other:
        assert other != first
    with lesson.build_folder("int x;") as again:
        assert again == first
        assert not (Path(again) / "lock").exists()
    assert os.environ["PATH"] == path


def test_the_path_is_restored_when_a_build_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = os.environ["PATH"]
    with pytest.raises(ZeroDivisionError), lesson.build_folder("int x;"):
        raise ZeroDivisionError
    assert os.environ["PATH"] == path


def test_without_a_compiler_the_cause_and_the_remedy_are_told_and_the_environment_is_restored(monkeypatch):
    monkeypatch.setenv("CXX", "before")
    with lesson.without_compiler() as library, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = library.ensure()
    assert report.status == "failed"
    assert report.cause in str(caught[0].message)
    assert report.remedy in str(caught[0].message)
    assert os.environ["CXX"] == "before"


def test_times_are_drawn_as_multiples_of_the_bound():
    assert lesson.draw_times(4)._repr_html_()
