"""GradScaler with a scale for each loss: float32 to the bit, one overflow moves one scale, checkpoints, refusals."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.amp import GradScaler
from amplab.scalers import DeepSpeedScale, DynamicScale

INF = float("inf")
SCALES = (2.0**12, 2.0**5, 2.0**9)


class CountReads(TorchDispatchMode):
    """How often the host reads a number from a tensor."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 + step))


def scaler_with(num_losses=2, scales=SCALES, **options):
    """A scaler whose losses start from different scales."""
    scaler = GradScaler("cpu", num_losses=num_losses, **options)
    state = scaler.state_dict()
    for saved, scale in zip([state, *state.get("losses", [])], scales, strict=False):
        saved["scale"] = scale
    scaler.load_state_dict(state)
    return scaler


def scales_of(scaler, num_losses=2):
    return [scaler.get_scale(loss_id) for loss_id in range(num_losses)]


def one_parameter(value=1.0, **options):
    parameter = nn.Parameter(torch.tensor([value]))
    return parameter, torch.optim.SGD([parameter], lr=0.5, **options)


def backward(scaler, optimizers, loss, loss_id=0):
    with scaler.scale_loss(loss, optimizers, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()


def fail_after_backward(scaler, optimizers, loss):
    with scaler.scale_loss(loss, optimizers, loss_id=1) as scaled_loss:
        scaled_loss.backward()
        raise KeyError


def two_losses(model, step):
    return model(batch(step)).square().mean(), model(batch(step)).abs().sum() * 0.37


def train(model, optimizer, scaler, steps, fault=None):
    for step in steps:
        optimizer.zero_grad()
        for loss_id, finite in enumerate(two_losses(model, step)):
            loss = finite * INF if (step, loss_id) == fault else finite
            if scaler is None:
                loss.backward()
            else:
                backward(scaler, optimizer, loss, loss_id)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_two_losses_of_one_optimizer_train_as_in_float32(options):
    plain, scaled = network(), network()
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.01, **options), None, range(6))
    scaler = scaler_with(growth_interval=4)
    train(scaled, torch.optim.Adam(scaled.parameters(), lr=0.01, **options), scaler, range(6))
    assert all(map(torch.equal, plain.parameters(), scaled.parameters()))
    assert scales_of(scaler) == [2.0**13, 2.0**6]


def gan_step(nets, optimizers, step, run_backward, run_step):
    generator, judge = nets
    of_generator, of_judge = optimizers
    fake = generator(batch(step))
    of_judge.zero_grad()
    run_backward(judge(batch(step + 50)[:, :3]).square().mean(), of_judge, 0)
    run_backward((judge(fake.detach()) - 1.0).square().mean(), of_judge, 1)
    run_step(of_judge)
    of_generator.zero_grad()
    run_backward(judge(fake).square().mean(), of_generator, 2)
    run_step(of_generator)


def gan():
    nets = network(1), nn.Linear(3, 1)
    return nets, [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]


def test_three_losses_and_two_optimizers_of_a_gan_train_as_in_float32():
    plain, plain_optimizers = gan()
    scaled, optimizers = gan()
    scaled[1].load_state_dict(plain[1].state_dict())
    scaler = scaler_with(3)
    for step in range(5):
        gan_step(plain, plain_optimizers, step, lambda loss, _, __: loss.backward(), lambda each: each.step())
        gan_step(
            *(scaled, optimizers, step),
            lambda loss, optimizer, loss_id: backward(scaler, optimizer, loss, loss_id),
            scaler.step,
        )
        scaler.update()
    for net, other in zip(plain, scaled, strict=True):
        assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_an_optimizer_whose_losses_are_finite_steps_beside_one_that_skips():
    (first, of_first), (second, of_second) = one_parameter(), one_parameter()
    scaler = scaler_with(3)
    backward(scaler, of_first, first.sum(), 0)
    backward(scaler, of_second, second.sum(), 1)
    backward(scaler, of_second, second.sum() * INF, 2)
    scaler.step(of_first)
    scaler.step(of_second)
    scaler.update()
    assert (first.item(), second.item()) == (0.5, 1.0)
    assert scales_of(scaler, 3) == [2.0**12, 2.0**5, 2.0**8]


def test_one_backward_for_two_optimizers_that_share_a_parameter_unscales_it_once():
    shared, own = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    both = [torch.optim.SGD([shared], lr=0.5), torch.optim.SGD([shared, own], lr=0.5)]
    scaler = scaler_with()
    backward(scaler, both, (shared * own).sum(), 1)
    backward(scaler, both[0], shared.sum(), 0)
    assert (shared.grad.item(), own.grad.item()) == (2.0, 1.0)
    for optimizer in both:
        scaler.step(optimizer)
    assert (shared.item(), own.item()) == (-1.0, 0.5)


# -- overflows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused": True, "momentum": 0.9}], ids=str)
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_of_one_loss_skips_and_moves_its_scale_alone(bad, options):
    parameter, optimizer = one_parameter(**options)
    scaler = scaler_with()
    records = []
    for loss_id in (0, 1):
        backward(scaler, optimizer, parameter.sum() * (INF if loss_id == bad else 1.0), loss_id)
    scaler.subscribe(records.append)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 1.0
    expected = [scale * 0.5 if loss_id == bad else scale for loss_id, scale in enumerate(SCALES[:2])]
    assert scales_of(scaler) == expected
    assert f"gradient overflow at loss scale {SCALES[bad]}" in scaler.last_step.reason
    told = [(each.loss_id, each.loss_scale, each.next_loss_scale, each.found_inf, each.skipped) for each in records]
    assert told == [(each, SCALES[each], expected[each], each == bad, each == bad) for each in (0, 1)]


def test_a_loss_without_a_block_keeps_its_scale_and_its_count():
    parameter, optimizer = one_parameter()
    scaler = scaler_with()
    backward(scaler, optimizer, parameter.sum(), 1)
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    assert (state["_growth_tracker"], state["losses"][0]["_growth_tracker"]) == (0, 1)


@pytest.mark.parametrize(
    "rule", [DynamicScale(init_scale=64.0), DeepSpeedScale(init_scale=64.0, hysteresis=1)], ids=repr
)
def test_every_loss_has_the_rule(rule):
    parameter, optimizer = one_parameter()
    scaler = GradScaler("cpu", rule=rule, num_losses=2)
    backward(scaler, optimizer, parameter.sum(), 0)
    backward(scaler, optimizer, parameter.sum() * INF, 1)
    scaler.step(optimizer)
    scaler.update()
    assert scales_of(scaler) == [64.0, 32.0]


def test_the_host_reads_nothing_but_in_step():
    parameter, optimizer = one_parameter()
    scaler = scaler_with()
    with CountReads() as counted:
        for loss_id in (0, 1, 1):
            backward(scaler, optimizer, parameter.sum(), loss_id)
        assert counted.reads == 0
        scaler.step(optimizer)
        assert counted.reads == 1
        scaler.update()
        assert counted.reads == 1


# -- the block -------------------------------------------------------------------------------------


def test_a_block_that_raises_leaves_gradients_and_scaler_as_they_were():
    (parameter, optimizer), (fresh, of_fresh) = one_parameter(), one_parameter()
    scaler = scaler_with()
    backward(scaler, optimizer, parameter.sum() * 3.0, 0)
    before = parameter.grad
    with pytest.raises(KeyError):
        fail_after_backward(scaler, [optimizer, of_fresh], (parameter * fresh).sum() * INF)
    assert parameter.grad is before
    assert before.item() == 3.0
    assert fresh.grad is None
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), scales_of(scaler)) == (-0.5, list(SCALES[:2]))


def test_a_block_without_backward_checks_nothing():
    parameter, optimizer = one_parameter()
    scaler = scaler_with()
    parameter.grad = torch.ones(1)
    with scaler.scale_loss(parameter.sum(), optimizer, 1):
        pass
    assert parameter.grad.item() == 1.0
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.update()


def test_a_disabled_scaler_passes_the_loss_through():
    parameter, optimizer = one_parameter()
    scaler = GradScaler("cpu", enabled=False, num_losses=2)
    loss = parameter.sum()
    with scaler.scale_loss(loss, optimizer, 1) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), scaler.get_scale(1), scaler.state_dict()) == (0.5, 1.0, {})


def test_settings_are_those_of_all_losses():
    parameter, optimizer = one_parameter()
    scaler = scaler_with()
    scaler.set_backoff_factor(0.25)
    backward(scaler, optimizer, parameter.sum() * INF, 1)
    scaler.step(optimizer)
    scaler.update()
    assert scales_of(scaler) == [2.0**12, 2.0**3]
    scaler.follow(DynamicScale(backoff_factor=0.5))
    backward(scaler, optimizer, parameter.sum() * INF, 1)
    scaler.update()
    assert scales_of(scaler) == [2.0**12, 2.0**2]
    scaler.scale(parameter.sum())
    scaler.update(64.0)
    assert scales_of(scaler) == [64.0, 64.0]


# -- checkpoints -----------------------------------------------------------------------------------


def by_state_dict(scaler):
    other = GradScaler("cpu", num_losses=2, rule=scaler.rule, **({} if scaler.rule else {"growth_interval": 3}))
    other.load_state_dict(scaler.state_dict())
    return other


def by_pickle(scaler):
    return pickle.loads(pickle.dumps(scaler))


@pytest.mark.parametrize("copied", [by_state_dict, by_pickle])
@pytest.mark.parametrize("rule", [None, DynamicScale(growth_interval=3)], ids=repr)
def test_a_run_goes_on_to_the_bit(copied, rule):
    whole, parts = network(), network()
    of_whole, of_parts = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (whole, parts))
    options = {"growth_interval": 3} if rule is None else {"rule": rule}
    scaler, first = scaler_with(**options), scaler_with(**options)
    train(whole, of_whole, scaler, range(8), fault=(2, 1))
    train(parts, of_parts, first, range(4), fault=(2, 1))
    second = copied(first)
    assert second.state_dict() == first.state_dict()
    train(parts, of_parts, second, range(4, 8))
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))
    assert second.state_dict() == scaler.state_dict()


def test_one_loss_is_saved_in_the_format_of_torch_and_taken_up_by_all():
    assert GradScaler("cpu").state_dict() == torch.amp.GradScaler("cpu").state_dict()
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler = scaler_with()
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.get_scale() == 2.0**12
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    assert scales_of(scaler) == [8.0, 8.0]


@pytest.mark.parametrize("num_losses", [1, 3])
def test_the_state_of_another_number_of_losses_is_refused(num_losses):
    scaler = GradScaler("cpu", num_losses=num_losses)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=f"has 2 losses, and this scaler has num_losses={num_losses}"):
        scaler.load_state_dict(scaler_with().state_dict())
    assert scaler.state_dict() == before


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_id", "error", "message"),
    [
        (2, IndexError, "loss_id=2: expected a number below num_losses=2"),
        (-1, IndexError, "loss_id=-1: expected a number below num_losses=2"),
        (True, TypeError, "loss_id=True: expected a whole number"),
        ("d", TypeError, "loss_id='d': expected a whole number"),
    ],
)
def test_a_wrong_loss_id_is_refused(loss_id, error, message):
    parameter, optimizer = one_parameter()
    scaler = scaler_with()
    with pytest.raises(error, match=message):
        scaler.get_scale(loss_id)
    with pytest.raises(error, match=message), scaler.scale_loss(parameter.sum(), optimizer, loss_id):
        pass


@pytest.mark.parametrize("num_losses", [0, -1, 1.5, True])
def test_a_wrong_number_of_losses_is_refused(num_losses):
    with pytest.raises(ValueError, match="expected a whole number >= 1"):
        GradScaler("cpu", num_losses=num_losses)


def test_what_is_no_loss_or_no_optimizer_or_half_is_refused():
    parameter, optimizer = one_parameter()
    half = nn.Parameter(torch.ones(1, dtype=torch.float16))
    scaler = scaler_with()
    for loss, optimizers, error, message in (
        ([parameter.sum()], optimizer, TypeError, "loss is a list"),
        (parameter.sum(), None, TypeError, "got a NoneType"),
        (parameter.sum(), [optimizer, parameter], TypeError, "got a Parameter"),
        (half.sum(), torch.optim.SGD([half], lr=0.5), ValueError, "Attempting to unscale FP16 gradients"),
    ):
        with pytest.raises(error, match=message), scaler.scale_loss(loss, optimizers):
            pass


def test_calls_in_the_wrong_order_are_refused():
    parameter, optimizer = one_parameter()
    scaler = scaler_with()
    backward(scaler, optimizer, parameter.sum(), 0)
    with pytest.raises(RuntimeError, match=r"scale_loss\(\) has unscaled its gradients"):
        scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"scale_loss\(\) with SGD after its unscale_\(\) or step\(\)"):
        backward(scaler, optimizer, parameter.sum(), 1)
    scaler.update()
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"scale_loss\(\) with SGD after its unscale_\(\) or step\(\)"):
        backward(scaler, optimizer, parameter.sum(), 1)
