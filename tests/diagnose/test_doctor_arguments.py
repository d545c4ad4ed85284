"""Each argument of another type gets one sentence; what the step itself raises is a finding."""

import pytest
import torch
from torch import nn

from amplab.diagnose import doctor


def patient():
    model = nn.Linear(4, 2)
    return model, lambda: model(torch.ones(3, 4)).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "a"}, "model=str: expected a torch.nn.Module"),
        ({"model": []}, "no model in the list: expected a torch.nn.Module"),
        ({"step": 3}, "step=int: expected a function"),
        ({"step": torch.ones(2)}, "step=Tensor: expected a function"),
        ({"step": list}, "step=list is a class: expected a function"),
        ({"train_step": list}, "train_step=list is a class: expected a function"),
        ({"train_step": 3}, "train_step=int: expected a function"),
        ({"optimizer": 3}, "optimizer=int: expected a torch.optim.Optimizer"),
        ({"optimizer": [3]}, "optimizer=list of int: expected"),
        ({"run": 3}, "run=int: expected an amplab.diagnose.Observation"),
        ({"stateful": [3]}, "stateful=list of int: expected a list"),
        ({"stateful": 3}, "stateful=int: expected a list"),
        ({"loss_scale": "a"}, "loss_scale='a': expected a number"),
    ],
)
def test_another_type_is_refused_in_one_sentence(given, words):
    model, loss_fn, _ = patient()
    with pytest.raises(TypeError) as refusal:
        doctor(**({"model": model, "step": loss_fn} | given))
    assert str(refusal.value).startswith(words)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_a_loss_scale_is_positive(scale):
    with pytest.raises(ValueError, match="expected a finite number > 0"):
        doctor(patient()[0], step=patient()[1], loss_scale=scale)


@pytest.mark.parametrize("error", [AssertionError("hey"), ValueError("hey"), KeyError("hey"), IndexError("hey")])
def test_what_the_users_step_raises_is_a_finding(error):
    model, loss_fn, optimizer = patient()

    def fails():
        raise error

    for found in (doctor(model, step=fails), doctor(model, step=loss_fn, train_step=fails, optimizer=optimizer)):
        assert (found[0].name, type(error).__name__ in found[0].symptom) == ("step-raised", True)


def test_a_loss_that_is_no_number_is_not_the_steps_error():
    model, *_ = patient()
    with pytest.raises(ValueError, match="reduce it"):
        doctor(model, step=lambda: model(torch.ones(3, 4)))


@pytest.mark.parametrize(
    "given",
    [
        {"step": list},
        {"train_step": list},
        {"scaler": 3},
        {"batch": torch.ones(2)},
        {"loss_scale": 2.0},
        {"optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1)},
        {"stateful": [3]},
    ],
)
def test_arguments_without_a_model(given):
    (name,) = given
    with pytest.raises(TypeError, match=rf"^doctor got {name}, but no model"):
        doctor(**given)


@pytest.mark.parametrize("name", ["step", "train_step"])
def test_a_function_of_something(name):
    with pytest.raises(TypeError, match=rf"^{name} requires \(batch\)"):
        doctor(patient()[0], **{name: lambda batch: batch})


def test_a_batch_and_a_loss_are_a_step():
    """The same findings, whichever way the step is given."""
    model, step, optimizer = patient()
    with torch.no_grad():
        model.weight.fill_(torch.inf)
    x = torch.ones(3, 4)
    ways = [
        {"step": step},
        {"batch": x, "loss": lambda out: out.square().mean()},
        {"batch": (x, x[:, :2]), "loss": lambda out, _target: out.square().mean()},
        {"batch": x, "step": lambda batch: model(batch).square().mean()},
        {"batch": x, "step": lambda given, batch: given(batch).square().mean()},
    ]
    found = [doctor(model, **way, optimizer=optimizer) for way in ways]
    assert [each.name for each in found[0]] == ["nonfinite-parameter"]
    assert all([(each.name, each.tensor) for each in other] == [("nonfinite-parameter", "weight")] for other in found)


def test_a_train_step_may_take_the_batch():
    model, _, optimizer = patient()
    seen = []

    def train(batch):
        seen.append(batch)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    x = torch.ones(3, 4)
    assert not doctor(model, x, train_step=train, optimizer=optimizer)
    assert all(each is x for each in seen)


def test_a_compiled_model_has_no_ops_but_a_loop():
    """Its loop can be rehearsed, its step cannot be looked at."""
    model, _, optimizer = patient()
    model.compile(backend="eager")

    def train():
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    assert [each.name for each in doctor(model, train_step=train, optimizer=optimizer)] == []
    with pytest.raises(ValueError, match="Linear is compiled"):
        doctor(model, step=lambda: model(torch.ones(3, 4)).mean())
