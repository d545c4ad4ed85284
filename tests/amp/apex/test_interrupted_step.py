"""What begins with a step ends with it, by an exception and by an interrupt in any line of amplab too."""

import pytest
import torch
from interrupts import interrupted_everywhere
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.policies import casts_enabled

HALF = torch.float16


class Failing(torch.optim.SGD):
    """An optimizer whose next step raises."""

    error: BaseException | None = None

    def step(self, closure=None):
        if self.error is not None:
            raise self.error
        return super().step(closure)


@pytest.fixture(autouse=True)
def _ends_clean():
    yield
    amp.reset()


def made(kind=Failing, **options):
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters(), lr=1e-3, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **options)


def backward(model, optimizer, factor=1.0):
    with amp.scale_loss(factor * model(torch.ones(2, 8)).float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()


def product():
    return F.linear(torch.ones(2, 8), torch.ones(8, 8)).dtype


ERRORS = {"interrupt": KeyboardInterrupt(), "exception": ValueError("no"), "exit": SystemExit(1)}


@pytest.fixture(params=ERRORS.values(), ids=ERRORS)
def failed(request):
    """A session at O1 whose step has raised, and the traceback that keeps its frames alive, as IPython's does."""
    model, optimizer = made()
    backward(model, optimizer)
    optimizer.error = request.param
    with pytest.raises(type(request.param)) as raised:
        optimizer.step()
    optimizer.error = None
    return model, optimizer, raised


def test_the_same_thread_goes_on_to_cast(failed):
    model, _, _ = failed
    assert product() is HALF
    assert model(torch.ones(2, 8)).dtype is HALF


def test_questions_are_answered_as_before(failed):
    assert casts_enabled()
    assert amplab.is_autocast_enabled("cpu")
    assert amp._amp_state.handle.is_active()


def test_autocast_casts(failed):
    with amplab.autocast("cpu", dtype=torch.bfloat16):
        assert product() is torch.bfloat16
    assert product() is HALF


def test_autocast_casts_where_no_session_does(failed):
    with amplab.autocast("cpu", enabled=False):
        assert product() is torch.float32
        with amplab.autocast("cpu", dtype=HALF):
            assert product() is HALF


def test_a_fresh_session_and_a_new_model_cast(failed):
    session, model = amp.Session(), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with session.casting():
        assert model(torch.ones(2, 8)).dtype is HALF
    session.reset()


def test_a_cell_that_is_run_again_casts(failed):
    model, optimizer = made()
    assert model(torch.ones(2, 8)).dtype is HALF
    backward(model, optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).stepped


def test_a_checkpoint_casts_as_its_forward(failed):
    weight = torch.ones(8, 8, requires_grad=True)
    out = amplab.checkpoint(lambda: F.linear(torch.ones(2, 8), weight), use_reentrant=False)
    out.float().sum().backward()
    assert out.dtype is HALF


def test_training_goes_on(failed):
    model, optimizer, _ = failed
    before = model.weight.detach().clone()
    optimizer.step()
    assert amp.last_step(optimizer).stepped
    assert not torch.equal(model.weight, before)


def test_a_step_itself_is_not_cast():
    seen = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(product())
            super().step(closure)
            seen.append(product())

    model, optimizer = made(Looking)
    backward(model, optimizer)
    optimizer.step()
    assert seen == [torch.float32] * 2
    assert product() is HALF


def test_a_step_inside_of_a_step_ends_for_itself():
    seen = []
    _, inner = made()

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.error = ValueError("no")
            with pytest.raises(ValueError, match="no"):
                inner.step()
            seen.append(product())
            super().step(closure)

    model = nn.Linear(8, 8)
    optimizer = Outer(model.parameters(), lr=1e-3, momentum=0.9)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.step()
    assert seen == [torch.float32]
    assert product() is HALF


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped")
@pytest.mark.parametrize("factor", [1.0, 1e30], ids=["stepped", "skipped"])
def test_an_interrupt_in_any_line_of_a_step_leaves_the_casts_on(factor):
    model, optimizer = made(torch.optim.SGD, on_collapse="warn")
    optimizer.step()  # makes the plan without casts
    backward(model, optimizer, factor)
    for interrupt in interrupted_everywhere(optimizer.step):
        torch.set_grad_enabled(True)  # torch's own step leaves it off when it is interrupted as it ends
        assert product() is HALF, interrupt
        backward(model, optimizer, factor)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("clears", [True, False])
def test_an_overflow_whose_gradients_were_cleared_skips_no_later_step(opt_level, clears):
    """As after an interrupt between the overflow and the step: the next iteration begins with zero_grad."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    backward(model, optimizer, 1e30)
    if clears:
        optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).stepped is clears


def test_an_overflow_skips_the_step_of_an_optimizer_that_had_no_gradients_yet():
    """As in apex: the loss was passed to both optimizers."""
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
    backward(models[0], optimizers, 1e30)
    backward(models[1], optimizers[1])
    optimizers[1].step()
    assert not amp.last_step(optimizers[1]).stepped
