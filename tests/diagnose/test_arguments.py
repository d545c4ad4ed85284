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
        ({"model": [nn.Linear(1, 1)]}, "model=list of Linear: expected a torch.nn.Module"),
        ({"loss_fn": 3}, "loss_fn=int: expected a function"),
        ({"loss_fn": torch.ones(2)}, "loss_fn=Tensor: expected a function"),
        ({"train_step": 3}, "train_step=int: expected a function"),
        ({"optimizers": 3}, "optimizers=int: expected a torch optimizer"),
        ({"optimizers": [3]}, "optimizers=list of int: expected"),
        ({"run": 3}, "run=int: expected an amplab.diagnose.Observation"),
        ({"stateful": [3]}, "stateful=list of int: expected a list"),
        ({"stateful": 3}, "stateful=int: expected a list"),
        ({"loss_scale": "a"}, "loss_scale='a': expected a number"),
    ],
)
def test_another_type_is_refused_in_one_sentence(given, words):
    model, loss_fn, _ = patient()
    with pytest.raises(TypeError) as refusal:
        doctor(**({"model": model, "loss_fn": loss_fn} | given))
    assert str(refusal.value).startswith(words)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_a_loss_scale_is_positive(scale):
    with pytest.raises(ValueError, match="expected a finite number > 0"):
        doctor(*patient()[:2], loss_scale=scale)


@pytest.mark.parametrize("error", [AssertionError("hey"), ValueError("hey"), KeyError("hey"), IndexError("hey")])
def test_what_the_users_step_raises_is_a_finding(error):
    model, loss_fn, optimizer = patient()

    def fails():
        raise error

    for found in (doctor(model, fails), doctor(model, loss_fn, train_step=fails, optimizers=optimizer)):
        assert (found[0].name, type(error).__name__ in found[0].symptom) == ("step-raised", True)


def test_a_loss_that_is_no_number_is_not_the_steps_error():
    model, *_ = patient()
    with pytest.raises(ValueError, match="reduce it"):
        doctor(model, lambda: model(torch.ones(3, 4)))


@pytest.mark.parametrize(
    "given",
    [
        {"loss_fn": list},
        {"train_step": list},
        {"amp": 3},
        {"batch": torch.ones(2)},
        {"loss_scale": 2.0},
        {"optimizers": torch.optim.SGD([torch.ones(1)], lr=0.1)},
        {"stateful": [3]},
    ],
)
def test_arguments_without_a_model(given):
    (name,) = given
    with pytest.raises(TypeError, match=rf"^doctor got no model, but {name}: pass the model first"):
        doctor(**given)


@pytest.mark.parametrize("name", ["loss_fn", "train_step"])
def test_a_function_of_something(name):
    with pytest.raises(
        TypeError, match=rf"^{name} is called with no argument, and lambda\(batch\) is missing a required"
    ):
        doctor(patient()[0], **{name: lambda batch: batch})


def test_a_batch_in_the_place_of_the_loss():
    with pytest.raises(TypeError, match=r"^loss_fn=Tensor: expected a function .*; a batch goes to batch="):
        doctor(patient()[0], torch.ones(3, 4))


def test_a_compiled_model_has_no_ops_but_a_loop():
    """Its loop can be rehearsed, its step cannot be looked at."""
    model, _, optimizer = patient()
    model.compile(backend="eager")

    def train():
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    assert [each.name for each in doctor(model, train_step=train, optimizers=optimizer)] == []
    with pytest.raises(ValueError, match="Linear is compiled"):
        doctor(model, lambda: model(torch.ones(3, 4)).mean())
