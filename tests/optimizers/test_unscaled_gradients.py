"""After a fused step ``.grad`` is unscaled under every scaler, as after torch's fused optimizers."""

import copy

import pytest
import torch
from torch import nn

from amplab import amp, optimizers
from amplab.amp import GradScaler

RULES = ["FusedSGD", "FusedAdam", "FusedAdamW", "FusedAdagrad", "FusedAdadelta", "FusedRMSprop", "FusedLAMB"]
RULES = pytest.mark.parametrize("name", [*RULES, "FusedNovoGrad", "FusedAdamP", "FusedBertAdam", "NpuFusedLamb"])
SCALERS = pytest.mark.parametrize("scaler_of", [GradScaler, torch.amp.GradScaler])
SCALE = 2.0**16


@pytest.fixture(autouse=True)
def amp_is_reset():
    yield
    amp.reset()


def a_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def a_loss(model):
    inputs = torch.linspace(-1, 1, 64).reshape(8, 8).to(model[0].weight.dtype)
    return (model(inputs).float() - inputs[:, :1].float()).square().mean()


def exact_grads(model):
    model = copy.deepcopy(model)
    model.zero_grad()
    a_loss(model).backward()
    return [param.grad for param in model.parameters()]


def step_with(scaler, model, optimizer, factor=1.0):
    optimizer.zero_grad()
    scaler.scale(a_loss(model) * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def make(name, params, **settings):
    return getattr(optimizers, name)(params, lr=1e-3, **settings)


@RULES
@SCALERS
def test_a_logged_norm_is_the_unscaled_one(name, scaler_of):
    model = a_model()
    optimizer = make(name, model.parameters())
    scaler = scaler_of("cpu", init_scale=SCALE)
    for _ in range(3):
        exact = exact_grads(model)
        step_with(scaler, model, optimizer)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), exact, strict=True))


@SCALERS
@pytest.mark.parametrize("twin", [torch.optim.SGD, torch.optim.AdamW])
def test_it_is_what_torchs_fused_optimizers_leave(scaler_of, twin):
    left = []
    for cls, fused in ((getattr(optimizers, f"Fused{twin.__name__}"), {}), (twin, {"fused": True})):
        model = a_model()
        optimizer, scaler = cls(model.parameters(), lr=1e-3, **fused), scaler_of("cpu", init_scale=SCALE)
        for factor in (1.0, float("inf")):
            step_with(scaler, model, optimizer, factor)
            left.append([param.grad.clone() for param in model.parameters()])
    for mine, theirs in zip(left[:2], left[2:], strict=True):
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(mine, theirs, strict=True))
        assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(mine, theirs, strict=True))


@RULES
@SCALERS
@pytest.mark.parametrize("keeps", [False, True])
def test_a_skipped_step_changes_no_weight_and_writes_gradients_in_the_check_alone(name, scaler_of, keeps):
    model = a_model()
    optimizer = make(name, model.parameters())
    optimizer.keeps_grads_scaled = keeps
    scaler = scaler_of("cpu", init_scale=SCALE)
    scaler.scale(a_loss(model)).backward()
    model[0].bias.grad[0] = float("inf")
    weights = [param.detach().clone() for param in model.parameters()]
    factor = 1.0 if keeps or scaler_of is torch.amp.GradScaler else 1 / SCALE
    expected = [param.grad * factor for param in model.parameters()]
    scaler.step(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert all(map(torch.equal, model.parameters(), weights))
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


@SCALERS
def test_gradients_that_were_unscaled_before_the_step_stay(scaler_of):
    model = a_model()
    optimizer, scaler = make("FusedAdam", model.parameters()), scaler_of("cpu", init_scale=SCALE)
    exact = exact_grads(model)
    scaler.scale(a_loss(model)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), exact, strict=True))


@SCALERS
def test_a_clip_of_the_step_changes_the_step_alone(scaler_of):
    model = a_model()
    optimizer = make("FusedSGD", model.parameters(), max_grad_norm=1e-3)
    exact = exact_grads(model)
    step_with(scaler_of("cpu", init_scale=SCALE), model, optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), exact, strict=True))


@SCALERS
@pytest.mark.parametrize("name", ["FusedSGD", "FusedAdam", "FusedLAMB"])
def test_steps_are_to_the_bit_those_that_leave_gradients_scaled(name, scaler_of):
    weights = []
    for keeps in (False, True):
        model = a_model()
        optimizer, scaler = make(name, model.parameters()), scaler_of("cpu", init_scale=SCALE)
        optimizer.keeps_grads_scaled = keeps
        for _ in range(5):
            step_with(scaler, model, optimizer)
        weights.append([*model.parameters(), *(param.grad * (1.0 if keeps else SCALE) for param in model.parameters())])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_rounded_for_the_reader_and_not_for_the_step(dtype):
    weights = []
    for keeps in (False, True):
        weight = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = optimizers.FusedSGD([weight], lr=1e6, master_weights=True)
        optimizer.keeps_grads_scaled = keeps
        scaler = GradScaler("cpu", init_scale=SCALE)
        scaler.scale(torch.zeros(()))
        weight.grad = torch.tensor([1e-3, 1.0, 100.0, 3e4]).to(dtype)  # 1.5e-8 and more, unscaled
        grad = weight.grad.clone()
        scaler.step(optimizer)
        assert torch.equal(weight.grad, grad if keeps else (grad.float() / SCALE).to(dtype))
        weights.append(optimizer.state[weight]["master"])
    assert torch.equal(*weights)
    assert weights[0][0] != 1.0


def test_two_optimizers_that_share_a_parameter_unscale_it_once():
    model = a_model()
    first, second = (optimizers.FusedSGD(model.parameters(), lr=1e-3) for _ in range(2))
    scaler = GradScaler("cpu", init_scale=SCALE)
    exact = exact_grads(model)
    scaler.scale(a_loss(model)).backward()
    scaler.step(first)
    scaler.step(second)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), exact, strict=True))


def _by_scaler(optimizer):
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


def _directly(optimizer):
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(SCALE), torch.zeros(())
    optimizer.step()


@pytest.mark.parametrize("step", [_by_scaler, _directly])
def test_gradients_in_shared_and_expanded_memory(step):
    weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    shared = torch.full((4,), SCALE)
    weights[0].grad, weights[1].grad = shared[:3], shared[1:]
    weights[2].grad = torch.full((), SCALE).expand(3)
    step(optimizers.FusedSGD(weights, lr=0.5))
    for weight in weights:
        assert weight.grad.tolist() == [1.0, 1.0, 1.0]
        assert weight.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_under_scale_loss_gradients_are_unscaled_before_the_step_and_after_it(opt_level):
    model = a_model()
    optimizer = make("FusedAdam", model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, loss_scale=1024.0)
    with amp.scale_loss(a_loss(model), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = [param.grad.clone() for param in amp.master_params(optimizer)]
    assert 1e-4 < torch.stack([grad.float().norm() for grad in before]).norm() < 10
    grads = [param.grad for param in amp.master_params(optimizer)]
    optimizer.step()
    assert all(map(torch.equal, grads, before))


def test_a_step_that_fails_after_the_check_may_be_repeated():
    """A scaler that has unscaled does not unscale again."""
    model = a_model()
    optimizer, scaler = make("FusedAdam", model.parameters()), GradScaler("cpu", init_scale=SCALE)
    exact = exact_grads(model)
    scaler.scale(a_loss(model)).backward()

    def fail(*_):
        raise ValueError("no step yet")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="no step yet"):
        scaler.step(optimizer)
    handle.remove()
    scaler.step(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), exact, strict=True))
