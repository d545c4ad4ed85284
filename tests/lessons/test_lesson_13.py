"""Lesson 13: bits of combined gradients, what breaks a view, and the checks of the exercises."""

import pytest
import torch

from amplab.lessons import lesson_13 as lesson
from amplab.optimizers import NpuFusedAdam, merge_groups


@pytest.mark.parametrize(("check", "answer"), [(lesson.check_buffer_size, 1088), (lesson.check_safe_actions, "bdef")])
def test_the_solution_is_right(check, answer):
    assert check(answer).right


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (lesson.check_buffer_size, ..., "Not answered"),
        (lesson.check_buffer_size, 1010, "also rounded up and padded"),
        (lesson.check_buffer_size, 1024, "32 more elements"),
        (lesson.check_buffer_size, 1040, "the bias has one, too"),
        (lesson.check_buffer_size, 7, "add the parts"),
        (lesson.check_safe_actions, ..., "Not answered"),
        (lesson.check_safe_actions, "abdef", "a, model.zero_grad(), is not safe"),
        (lesson.check_safe_actions, "bd", "2 more of the list"),
        (lesson.check_safe_actions, "bz", "'bz': ['z'] are not letters of the list"),
        (lesson.check_safe_actions, None, "None is not a string or a list or a set: write the letters"),
        (lesson.check_buffer_size, "1088", "'1088' is not a whole number"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(check, answer, said):
    verdict = check(answer)
    assert not verdict.right
    assert said in repr(verdict)


def weights_and_biases(model):
    named = list(model.named_parameters())
    return [[p for name, p in named if name.endswith(kind)] for kind in ("weight", "bias")]


def test_two_groups_are_right():
    model = lesson.network(hidden=1)
    weights, biases = weights_and_biases(model)
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}]
    assert lesson.check_groups(groups, model).right
    assert lesson.check_groups([groups[0], {"params": biases}], model).right  # the default of SGD and Adam
    assert lesson.check_groups(merge_groups(lesson.group_for_each(model)), model).right


def test_wrong_groups_are_told_what_is_wrong():
    model = lesson.network(hidden=1)
    weights, biases = weights_and_biases(model)
    for groups, said in (
        (..., "Not answered"),
        (lesson.group_for_each(model), "6 groups; 2 are enough"),
        ([{"params": [*weights, *biases], "weight_decay": 1e-4}], "0.bias would get a weight decay of 0.0001"),
        ([{"params": weights, "weight_decay": 1e-4}], "0.bias is in no group"),
        ([{"params": weights}, {"params": weights}], "in two groups"),
        (weights, "is not a dict: write a list of groups"),
        (None, "None is not a list: write a list of groups"),
        ([{"parameters": weights}], "answer[0] lacks 'params'"),
        ([{"params": weights, "decay": 1e-4}], "answer[0] has the key 'decay'"),
        ([{"params": None}], "answer[0]['params'] = None is not a list"),
        ([{"params": ["0.weight"]}], "answer[0]['params'][0] = '0.weight' is no parameter"),
        ([{"params": weights, "weight_decay": "1e-4"}], "answer[0]['weight_decay'] = '1e-4' is not a number"),
    ):
        verdict = lesson.check_groups(groups, model)
        assert not verdict.right
        assert said in repr(verdict)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_combined_gradients_train_the_same_bits(opt_level):
    combined, separate = (lesson.trained(opt_level, combine_grad=combine) for combine in (True, False))
    assert all(map(torch.equal, combined, separate))
    assert not torch.equal(combined[0], lesson.network()[0].weight)  # they were trained


def test_first_updates_are_those_of_the_formulas():
    updates = lesson.first_updates()
    assert updates["SGD"] == pytest.approx(0.5)
    assert updates["Adam"] == pytest.approx(1.0)
    assert updates["BertAdam"] == pytest.approx((1 - 0.9) / (1 - 0.99) ** 0.5, rel=1e-4)  # no bias correction
    assert updates["Lamb"] == pytest.approx((1 - 0.9) / (1 - 0.999) ** 0.5, rel=1e-4)


def test_a_fused_step_calls_as_many_operators_for_more_tensors():
    few, many = (repr(lesson.draw_step(hidden)) for hidden in (0, 4))
    assert few.split("NpuFusedAdam")[1] == many.split("NpuFusedAdam")[1]
    assert few.split("foreach=False)")[1] != many.split("foreach=False)")[1]


def test_padding_is_drawn():
    assert "8): 144 elements" in repr(lesson.draw_padding(3))
    assert "padding 50 %" in repr(lesson.draw_padding(3))
    assert lesson.draw_padding(3)._repr_html_()


def test_the_network_has_the_layers_that_it_says():
    assert sum(1 for _ in lesson.network(hidden=8).parameters()) == 20
    assert NpuFusedAdam(lesson.network(hidden=0).parameters()).param_groups[0]["lr"] == 1e-3
