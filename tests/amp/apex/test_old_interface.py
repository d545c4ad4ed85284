"""``amp.init``, its handle and its wrapped optimizers, in the lines of scripts from before ``amp.initialize``."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp

ONES = torch.ones(2, 2)


def train(problem, make_step, steps=60):
    """Train with ``make_step(model, optimizer)``, which returns a function of a loss that steps; the losses."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, losses = make_step(model, optimizer), []
    for number in range(steps):
        loss = problem.loss(model, number)
        step(loss)
        model.zero_grad()
        losses.append(loss.item())
    return losses


def plainly(_model, optimizer):
    def step(loss):
        loss.backward()
        optimizer.step()

    return step


def by_handle(_model, optimizer):
    handle = amp.init()

    def step(loss):
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step


def by_wrapper(_model, optimizer):
    optimizer = amp.init().wrap_optimizer(optimizer)

    def step(loss):
        with optimizer.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step


def by_initialize(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def step(loss):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("way", [by_handle, by_wrapper])
def test_it_trains_to_the_bit_as_o1_does_and_as_float32_does_nearly(problem, way):
    losses = train(problem, way)
    amp.reset()
    exact = train(problem, plainly)
    assert losses != exact
    assert losses[-1] == pytest.approx(exact[-1], rel=0.03)
    assert losses == train(problem, by_initialize)


def test_init_casts_as_o1_until_it_is_deactivated():
    handle = amp.init()
    assert handle.is_active()
    assert (ONES @ ONES).dtype == torch.float16
    assert nn.Linear(2, 2)(ONES).dtype == torch.float16
    assert F.softmax(ONES.half(), 0).dtype == torch.float32
    assert amp._amp_state.opt_properties.opt_level == "O1"
    assert amp._amp_state.handle.is_active()
    with handle._disable_casts():
        assert not handle.is_active()
        assert (ONES @ ONES).dtype == torch.float32
    assert (ONES @ ONES).dtype == torch.float16
    handle._deactivate()
    assert not handle.is_active()
    assert (ONES @ ONES).dtype == torch.float32


def test_recurrent_layers_take_what_half_layers_return():
    amp.init()
    hidden = nn.Linear(3, 4)(torch.ones(5, 2, 3))
    assert hidden.dtype == torch.float16
    assert nn.LSTM(4, 4)(hidden)[0].dtype == torch.float16


def test_a_deactivated_handle_scales_nothing():
    handle = amp.init()
    handle._deactivate()
    loss = torch.tensor(2.0)
    with handle.scale_loss(loss, None) as scaled_loss:
        assert scaled_loss is loss


def test_registered_and_decorated_functions_cast():
    amp.register_float_function(torch, "matmul")
    amp.init()
    assert (ONES.half() @ ONES.half()).dtype == torch.float32
    assert amp.half_function(lambda x: x)(ONES).dtype == torch.float16


def test_reset_and_a_later_level_end_it(problem):
    amp.init()
    amp.reset()
    assert (ONES @ ONES).dtype == torch.float32
    amp.init()
    amp.initialize(problem.model(), opt_level="O2", verbosity=0)
    assert (ONES @ ONES).dtype == torch.float32


def test_other_threads_do_not_cast():
    amp.init()
    seen = []
    thread = threading.Thread(target=lambda: seen.append((ONES @ ONES).dtype))
    thread.start()
    thread.join()
    assert seen == [torch.float32]


def test_disabled_it_changes_nothing(problem):
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    assert (ONES @ ONES).dtype == torch.float32
    model = problem.model()
    wrapped = handle.wrap_optimizer(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    loss = problem.loss(model, 0)
    for scaled in (handle.scale_loss(loss, optimizer), wrapped.scale_loss(loss)):
        with scaled as scaled_loss, handle._disable_casts():
            assert scaled_loss is loss
    loss.backward()
    wrapped.step()
    handle._clear_cache()
    handle._deactivate()
    with pytest.raises(RuntimeError, match="not been initialized"):
        amp.state_dict()


def test_a_static_scale_and_verbose(capsys):
    handle = amp.init(loss_scale="128.0", verbose=True)
    nn.Linear(2, 2)(ONES)
    assert "Float->Half (linear)" in capsys.readouterr().out
    weight = nn.Parameter(ONES.clone())
    with handle.scale_loss(weight.sum(), torch.optim.SGD([weight], lr=1.0)) as scaled_loss:
        assert scaled_loss.item() == 4 * 128.0
        scaled_loss.backward()
    assert torch.equal(weight.grad, ONES)
    with pytest.raises(ValueError, match="loss_scale='x'"):
        amp.init(loss_scale="x")


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_overflow_skips_the_step_and_halves_the_scale(capsys, wrapped):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = amp.init()
    if wrapped:
        optimizer = handle.wrap_optimizer(optimizer)
    scales = []
    for factor in (float("inf"), 0.25):
        loss = weight.sum() * factor
        scaled = optimizer.scale_loss(loss) if wrapped else handle.scale_loss(loss, optimizer)
        with scaled as scaled_loss:
            scales.append(scaled_loss.item())
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert scales == [float("inf"), 2 * 0.25 * 2.0**15]
    assert weight.tolist() == [0.75, 0.75]
    said = capsys.readouterr().out
    assert said == ("Gradient overflow, skipping update\n" if wrapped else said)
    assert "Gradient overflow" in said


def test_each_loss_of_a_wrapped_optimizer_has_its_scale_and_gradients_add_up():
    weight = nn.Parameter(torch.ones(2))
    optimizer = amp.init().wrap_optimizer(torch.optim.SGD([weight], lr=1.0), num_loss=2)
    for spoil in (True, False):
        for factor, spoiled in ((0.25, False), (0.5, spoil)):
            with optimizer.scale_loss(weight.sum() * factor) as scaled_loss:
                (scaled_loss * float("inf") if spoiled else scaled_loss).backward()
                last = scaled_loss.item()
        assert spoil or weight.grad.tolist() == [0.75, 0.75]
        before = weight.sum().item()
        optimizer.step()
        assert (weight.sum().item() == before) is spoil
        optimizer.zero_grad()
    assert last == 2 * 0.5 * 2.0**15  # the first loss has overflowed nowhere, the second one once
    with optimizer.scale_loss(weight.sum()) as scaled_loss:
        assert scaled_loss.item() == weight.sum().item() * 2.0**16


def test_a_wrapped_optimizer_is_the_optimizer_elsewhere():
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = amp.init().wrap_optimizer(inner)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state_dict() == inner.state_dict()
    assert repr(optimizer) == repr(inner)
    assert copy.copy(optimizer).param_groups is inner.param_groups
    with pytest.raises(AttributeError, match="nothing"):
        _ = optimizer.nothing


def test_misuse_of_a_wrapped_optimizer_is_refused():
    weight = nn.Parameter(torch.ones(2))
    handle = amp.init()
    optimizer = handle.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(NotImplementedError, match="`closure` argument is unsupported"):
        optimizer.step(lambda: None)
    with optimizer.scale_loss(weight.sum()) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match="2 losses since the last"), optimizer.scale_loss(weight.sum()):
        pass
    with pytest.raises(ValueError, match="num_losses=0"):
        handle.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), num_loss=0)


def test_the_wrapper_is_found_where_scripts_look_for_it():
    with amplab.as_apex():
        from apex.amp.opt import OptimWrapper
    assert isinstance(amp.init().wrap_optimizer(torch.optim.SGD([nn.Parameter(ONES)], lr=1.0)), OptimWrapper)


def test_an_exception_in_the_block_leaves_gradients_as_before():
    weight = nn.Parameter(torch.ones(2))
    optimizer = amp.init().wrap_optimizer(torch.optim.SGD([weight], lr=1.0))

    def fail():
        with optimizer.scale_loss(weight.sum()) as scaled_loss:
            scaled_loss.backward()
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fail()
        assert weight.grad is None


def test_amp_scale_loss_takes_any_optimizer_after_init():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    amp.init()
    with amp.scale_loss(weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("losses", [1, 2])
def test_an_error_between_backward_and_step_lets_the_next_step_begin_with_zero_grad(losses):
    model, x = nn.Linear(4, 2), torch.ones(2, 4)
    optimizer = amp.init(loss_scale="dynamic").wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), losses)

    def backward(times):
        for _ in range(times):
            with optimizer.scale_loss(model(x).float().square().mean()) as scaled_loss:
                scaled_loss.backward()

    def train(*, fails=False):
        optimizer.zero_grad()
        backward(losses)
        if fails:
            raise ArithmeticError
        optimizer.step()

    train()
    before = model.weight.detach().clone()
    with pytest.raises(ArithmeticError):
        train(fails=True)
    assert torch.equal(model.weight, before)
    train()
    assert not torch.equal(model.weight, before)
    with pytest.raises(RuntimeError, match=r"or call zero_grad\(\) to begin"):
        backward(losses + 1)
