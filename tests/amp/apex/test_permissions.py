"""``_amp_state.allow_incoming_model_not_fp32`` and ``hard_override``: half models and senseless overrides get in."""

import threading

import pytest
import torch

from amplab import amp

LEVELS = pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])


def train(problem, model, steps=60, **options):
    """Train under ``options`` of initialize; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, verbosity=0, **options)
    losses = []
    for step in range(steps):
        loss = problem.loss(model, step)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@LEVELS
@pytest.mark.parametrize("permission", ["allow_incoming_model_not_fp32", "hard_override"])
def test_a_half_model_trains_at_every_level_as_a_float32_one(problem, opt_level, permission):
    exact = train(problem, problem.model(), opt_level="O0")
    setattr(amp._amp_state, permission, True)
    assert getattr(amp._amp_state, permission) is True
    model = problem.model().half()
    losses = train(problem, model, opt_level=opt_level)
    assert losses[-1] == pytest.approx(exact[-1], rel=0.1)
    linear, norm = model[0].weight.dtype, model[1].weight.dtype
    kept = {"O0": (torch.float32, torch.float32), "O2": (torch.float16, torch.float32)}
    assert (linear, norm) == kept.get(opt_level, (torch.float16, torch.float16))


def test_masters_of_a_half_model_are_float32(problem):
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = problem.model().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert {param.dtype for param in amp.master_params(optimizer)} == {torch.float32}
    assert model[1].running_mean.dtype == torch.float32


@LEVELS
def test_without_permission_the_message_names_it(problem, opt_level):
    with pytest.raises(RuntimeError, match=r"param 0.weight .* amp._amp_state.allow_incoming_model_not_fp32 = True"):
        amp.initialize(problem.model().half(), opt_level=opt_level, verbosity=0)


SENSELESS = [
    {"opt_level": "O1", "cast_model_type": torch.float16},
    {"opt_level": "O1", "cast_model_type": torch.float16, "keep_batchnorm_fp32": True, "master_weights": True},
    {"opt_level": "O1", "keep_batchnorm_fp32": "False"},
    {"opt_level": "O1", "master_weights": True},
    {"opt_level": "O2", "patch_torch_functions": True},
    {"opt_level": "O3", "patch_torch_functions": True, "loss_scale": "dynamic"},
    {"opt_level": "O0", "patch_torch_functions": True, "loss_scale": "dynamic"},
]


@pytest.mark.parametrize("options", SENSELESS, ids=str)
def test_a_hard_override_is_taken_with_a_warning_and_trains(problem, options, capsys):
    with pytest.raises(RuntimeError):
        amp.initialize(problem.model(), verbosity=0, **options)
    amp._amp_state.hard_override = True
    amp.initialize(problem.model(), **options)
    said = capsys.readouterr().out
    assert said.startswith("Warning:  ")
    properties = amp._amp_state.opt_properties
    for name, value in options.items():
        assert getattr(properties, name) == {"False": False}.get(value, value)
    exact = train(problem, problem.model(), opt_level="O0")
    assert train(problem, problem.model(), **options)[-1] == pytest.approx(exact[-1], rel=0.1)


def test_a_value_that_is_no_value_is_refused_all_the_same(problem):
    amp._amp_state.hard_override = True
    with pytest.raises(AssertionError):
        amp.initialize(problem.model(), opt_level="O1", keep_batchnorm_fp32="maybe", verbosity=0)
    with pytest.raises(TypeError):
        amp.initialize(problem.model(), opt_level="O1", cast_model_type="half", verbosity=0)


def test_warn_or_err_warns(capsys):
    amp._amp_state.hard_override = True
    amp._amp_state.warn_or_err("odd")
    assert capsys.readouterr().out == "Warning:  odd\n"


def test_permissions_hold_in_all_threads_and_end_with_reset(problem):
    amp.initialize(problem.model(), verbosity=0)  # the main thread owns the program's session
    amp._amp_state.allow_incoming_model_not_fp32 = True
    dtypes = []

    def run():
        model = problem.model().half()
        amp.initialize(model, opt_level="O3", verbosity=0)
        dtypes.append(model[0].weight.dtype)
        amp.initialize(problem.model(), enabled=False)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert dtypes == [torch.float16]
    amp.reset()
    assert not amp._amp_state.allow_incoming_model_not_fp32
    assert not amp._amp_state.hard_override
