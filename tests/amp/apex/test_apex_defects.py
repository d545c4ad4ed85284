"""What apex is known to get wrong, one test each, in the order in which a script meets it.

More of them stand where their part is tested: resumed runs and late loads (test_master_hooks), copies and containers
(test_forward_hooks), accumulation and exceptions (test_gradients), skips, schedulers and closures
(test_hooked_optimizer), cells that run twice (test_level_switch), vanishing scales
(test_loss_scale_collapse), decorators (test_function_decorators), the cache itself and recurrent layers (tests of the
policies).
"""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from amplab import amp

LEVELS = ("O0", "O1", "O2", "O3")


def o1(model=None, optimizer=None, **options):
    model = nn.Linear(1, 1) if model is None else model
    arguments = (model,) if optimizer is None else (model, optimizer)
    return amp.initialize(*arguments, opt_level="O1", verbosity=0, **options)


# -- O1: functions -------------------------------------------------------------------------------------


def test_a_weight_is_used_twice_in_one_iteration(problem):
    """apex on torch >= 1.10: IndexError, tuple index out of range."""
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    o1(model, optimizer)
    losses = problem.train(amp.default_session(), model, optimizer, range(10))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("edit", ["load_state_dict", "copy_", "data", "add_"])
def test_a_weight_edited_between_two_evaluations_is_seen(edit):
    """apex: the cast of a weight lives until the next backward."""
    model = o1(nn.Linear(2, 2, bias=False).eval())
    inputs = torch.eye(2)
    with torch.no_grad():
        model(inputs)
        if edit == "load_state_dict":
            model.load_state_dict({"weight": torch.full((2, 2), 3.0)})
        elif edit == "copy_":
            model.weight.copy_(torch.full((2, 2), 3.0))
        elif edit == "data":
            model.weight.data = torch.full((2, 2), 3.0)
        else:
            model.weight.zero_().add_(3.0)
        assert torch.equal(model(inputs), torch.full((2, 2), 3.0).half())


def test_a_weight_cast_without_gradients_still_gets_one():
    model = o1(nn.Linear(2, 2))
    with torch.no_grad():
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_no_half_weights_stay_alive_between_iterations():
    model = nn.Linear(43, 47)
    o1(model)
    with torch.no_grad():
        model(torch.ones(1, 43))
    amp.default_session().engine.clear_cache()
    kept = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (47, 43)]
    assert not [each for each in kept if each.dtype is torch.float16]


def test_attention_works_in_every_build_of_torch():
    """apex on a build without CUDA: bmm is on no list, and nn.MultiheadAttention fails."""
    attention = o1(nn.MultiheadAttention(8, 2))
    inputs = torch.randn(3, 2, 8)
    assert attention(inputs, inputs, inputs)[0].dtype == torch.float16
    assert torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2)).dtype == torch.float16
    assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3).dtype == torch.float16
    assert torch.einsum("ij,jk", torch.ones(2, 2), torch.ones(2, 2).half()).dtype == torch.float16


def test_doubles_are_not_narrowed():
    """apex: torch.sum of a double is float32, torch.mm of doubles is half, promotion refuses them."""
    o1()
    double, half = torch.full((2, 2), 0.1, dtype=torch.float64), torch.ones(2, 2).half()
    assert torch.equal(torch.sum(double), torch.tensor(0.4, dtype=torch.float64))
    assert torch.mm(double, double).dtype == (double + half).dtype == torch.float64


def test_augmented_assignment_writes_into_its_tensor():
    """apex binds x to a new float32 tensor."""
    o1()
    x = torch.ones(2).half()
    alias = x
    x += torch.full((2,), 2.0)
    assert x is alias
    assert torch.equal(alias, torch.full((2,), 3.0).half())


def test_refusals_are_off_where_casts_are():
    """apex refuses inside disable_casts too."""
    o1()
    half = torch.ones(2).half()
    with pytest.raises(NotImplementedError, match="exp_"):
        half.exp_()
    with amp.disable_casts():
        half.exp_()
    assert half[0].item() == torch.tensor(2.7182817).half().item()


def test_disable_casts_nests_and_survives_exceptions():
    o1()
    ones = torch.ones(2, 2)
    with amp.disable_casts():
        with amp.disable_casts():
            pass
        assert (ones @ ones).dtype == torch.float32
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        _ = 1 / 0
    assert (ones @ ones).dtype == torch.float16


@pytest.mark.parametrize("level", [None, "O0", "O2", "O3"])
def test_disable_casts_does_nothing_if_nothing_casts(level):
    """apex: AttributeError, 'AmpState' object has no attribute 'handle'."""
    if level is not None:
        amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    with amp.disable_casts():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_a_second_initialize_casts_once_not_twice():
    """apex wraps the wrapped functions again; old wrappers heed disable_casts no more."""
    model = nn.Linear(2, 2)
    for _ in range(3):
        o1(model)
    assert len(torch.overrides._get_current_function_mode_stack()) == 1
    with amp.disable_casts():
        assert model(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_run_in_half_packed_or_not(kind):
    """apex: nn.RNN stays float32, weights outside one buffer fail, half inputs are refused by torch."""
    model = o1(nn.ModuleList([nn.Linear(3, 4), kind(4, 5, num_layers=2, bidirectional=True)]))
    inputs = model[0](torch.randn(6, 2, 3))
    assert inputs.dtype == torch.float16
    outputs, _ = model[1](inputs)
    packed, _ = model[1](pack_padded_sequence(inputs, [6, 4]))
    padded, _ = pad_packed_sequence(packed)
    assert outputs.dtype == padded.dtype == torch.float16
    outputs.float().sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


# -- O2 and O3: models -----------------------------------------------------------------------------------


def test_no_warning_for_inputs_on_the_cpu(recwarn, problem):
    amp.initialize(problem.model(), opt_level="O2", verbosity=0)(problem.inputs)
    assert not recwarn.list


def test_masters_are_there_from_the_beginning(problem):
    """apex makes them in the first backward; what master_params yields before that is half."""
    model = problem.model()
    _, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert {param.dtype for param in amp.master_params(optimizer)} == {torch.float32}


def test_a_static_scale_of_1_keeps_accumulated_gradients_of_batch_norm(problem):
    """apex since 2020: with masters and loss_scale=1.0 every backward but the last is lost for float32 parameters."""
    model = problem.model()
    _, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", loss_scale=1.0, verbosity=0
    )
    norm, grads = model[1], []
    for step in range(3):
        with amp.scale_loss(problem.loss(model, step), optimizer) as scaled_loss:
            scaled_loss.backward()
        grads.append(norm.weight.grad.clone())
    alone = []
    for step in range(3):
        optimizer.zero_grad()
        norm.weight.grad = None
        with amp.scale_loss(problem.loss(model, step), optimizer) as scaled_loss:
            scaled_loss.backward()
        alone.append(norm.weight.grad.clone())
    torch.testing.assert_close(grads[2], alone[0] + alone[1] + alone[2])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("arguments", [{}, {"set_to_none": True}, {"set_to_none": False}])
def test_zero_grad_takes_todays_arguments(problem, level, arguments):
    model = problem.model()
    _, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    for clear in (optimizer.zero_grad, model.zero_grad):
        with amp.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        clear(**arguments)
        assert all(param.grad is None or not param.grad.any() for param in model.parameters())
    assert clear == model.zero_grad


def test_a_scheduler_made_before_initialize_does_not_warn(problem, recwarn):
    """apex: "Seems like `optimizer.step()` has been overridden…", and a first step that is skipped warns too."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with amp.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    optimizer.step()
    scheduler.step()
    assert not recwarn.list


@pytest.mark.parametrize("group", ["list", "set", "tensor"])
def test_parameter_groups_come_in_any_form(problem, group):
    model = problem.model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    weight = model[3].weight
    added = {"list": [weight], "set": iter([weight]), "tensor": weight}[group]
    optimizer.add_param_group({"params": added})
    with amp.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert amp.last_step(optimizer).stepped
    assert optimizer.param_groups[1]["params"][0].dtype == torch.float32


def test_an_ema_copy_follows_its_own_weights(problem):
    """apex: the copy's forward runs the original's weights."""
    model = amp.initialize(problem.model().eval(), opt_level="O2", verbosity=0)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for param in average.parameters():
            param.zero_()
        assert not average(problem.inputs).any()
        assert model(problem.inputs).any()


# -- around the backward -----------------------------------------------------------------------------------


def test_bfloat16_gets_through_a_backward(problem):
    """apex: TypeError, parameters must be torch.cuda.FloatTensor or torch.cuda.HalfTensor."""
    for level in ("O2", "O3"):
        model = problem.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, cast_model_type=torch.bfloat16, verbosity=0)
        losses = problem.train(amp.default_session(), model, optimizer, range(20))
        assert losses[-1] < 0.5 * losses[0]


def test_a_static_scaler_keeps_its_scale_over_a_dynamic_checkpoint(problem, capsys):
    """apex loads a dynamic scale into a static scaler, and says nothing."""
    amp.initialize(problem.model(), opt_level="O2", loss_scale=128.0, verbosity=0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**20, "unskipped": 3}})
    assert amp.loss_scale() == 128.0
    assert "stays 128.0 (static)" in capsys.readouterr().out
