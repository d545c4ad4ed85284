"""GradScaler under every rule, its floor, what it says of its steps, and what it never waits for."""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.amp import GradScaler, ScaleRecord, StepOutcome
from amplab.scalers import (
    PUBLISHED_RULES,
    ApexScale,
    DeepSpeedScale,
    DynamicScale,
    KerasScale,
    MegatronScale,
    ScaleState,
    StaticScale,
    floored,
)

INF, NAN, TINY = float("inf"), float("nan"), torch.finfo(torch.float32).tiny


@dataclasses.dataclass(frozen=True)
class Creeping:
    """A rule of a user's own: a tenth down, a thousandth up."""

    skips_on_overflow: bool = True

    def start(self):
        return ScaleState(1024.0)

    def next(self, state, found_inf):
        return ScaleState(state.scale * (0.1 if found_inf else 1.001), 0 if found_inf else state.clean_steps + 1)


RULES = {**PUBLISHED_RULES, "own": Creeping(), "static": StaticScale(128.0)}
RULES["DeepSpeed"] = DeepSpeedScale(raises_at_floor=False)
QUICK = {
    name: dataclasses.replace(rule, growth_interval=3)
    for name, rule in RULES.items()
    if "growth_interval" in {field.name for field in dataclasses.fields(rule)}
} | {name: RULES[name] for name in ("own", "static")}


class Reads(TorchDispatchMode):
    """Count the tensors whose value is read on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


class Training:
    def __init__(self, **options):
        self.parameter = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0, **options)

    def iterate(self, scaler, gradient=1.0):
        self.optimizer.zero_grad()
        scaler.scale(torch.ones(()))
        self.parameter.grad = torch.full((2,), gradient)
        scaler.step(self.optimizer)
        scaler.update()


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The loss scale has collapsed")
@given(found=st.lists(st.booleans(), max_size=30), name=st.sampled_from(sorted(QUICK)), fused=st.booleans())
@settings(max_examples=100)
def test_every_rule_moves_the_scale_as_its_pure_form(found, name, fused):
    rule = QUICK[name]
    scaler, training = GradScaler("cpu", rule=rule), Training(fused=fused)
    pure = floored(rule, TINY)
    state = pure.start()
    assert scaler.get_scale() == state.scale
    for each in found:
        training.iterate(scaler, INF if each else 1.0)
        state = pure.next(state, each)
        assert scaler.get_scale() == torch.tensor(state.scale).item()
        assert scaler._get_growth_tracker() == state.clean_steps


@pytest.mark.filterwarnings("ignore:The loss scale has collapsed")
@given(
    found=st.lists(st.booleans(), max_size=24),
    init_scale=st.sampled_from([1.0, 2.0**16, 1000.1, 3e38]),
    growth_factor=st.floats(1.0625, 16.0),
    backoff_factor=st.floats(0.0625, 0.9375),
    growth_interval=st.integers(0, 4),
)
@settings(max_examples=60)
def test_without_a_rule_and_a_floor_the_scale_is_torchs(found, **numbers):
    ours, theirs, training = (
        GradScaler("cpu", floor=None, **numbers),
        torch.amp.GradScaler("cpu", **numbers),
        Training(),
    )
    for each in found:
        training.iterate(ours, INF if each else 1.0)
        training.iterate(theirs, INF if each else 1.0)
        assert ours.state_dict() == theirs.state_dict()


@pytest.mark.filterwarnings("ignore:The loss scale has collapsed")
@pytest.mark.parametrize("name", [None, *(name for name in RULES if name != "static")])
@pytest.mark.parametrize("gradient", [INF, NAN])
def test_ten_thousand_overflows_from_2_to_the_32_end_at_the_floor(name, gradient):
    scaler, training = (
        GradScaler("cpu", **({"init_scale": 2.0**32} if name is None else {"rule": RULES[name]})),
        Training(),
    )
    scaler.scale(torch.ones(()))
    scaler.update(2.0**32)
    for _ in range(10_000 if name is None and gradient is INF else 200):
        training.iterate(scaler, gradient)
    scale = scaler.get_scale()
    assert 0.0 < TINY <= scale <= 1.0
    training.iterate(scaler)
    assert torch.equal(training.parameter.grad, torch.ones(2) / scale)
    assert scaler.last_step.stepped


def test_a_collapse_is_said_once():
    scaler, training = GradScaler("cpu", init_scale=2.0**32), Training()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            training.iterate(scaler, NAN)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("The loss scale has collapsed")
    assert "scaler.last_step.first_nonfinite" in str(caught[0].message)
    scaler.get_scale()


def test_a_collapse_under_a_fused_optimizer_is_said_when_the_scale_is_read():
    scaler, training = GradScaler("cpu", init_scale=2.0**-20), Training(fused=True)
    for _ in range(20):
        training.iterate(scaler, INF)
    with pytest.warns(UserWarning, match="The loss scale has collapsed"):
        scaler.get_scale()


@pytest.mark.parametrize("floor", [1.0, 128.0])
def test_a_floor_that_the_user_sets_holds(floor):
    scaler, training = GradScaler("cpu", init_scale=1024.0, floor=floor), Training()
    for _ in range(20):
        training.iterate(scaler, INF)
    assert scaler.get_scale() == floor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"floor": 0.0}, "floor=0.0: expected a finite number > 0 or None for no floor"),
        ({"rule": DynamicScale(), "init_scale": 4.0}, "expected one of the two"),
        ({"rule": ApexScale(), "floor": 2.0**30}, "is above the ceiling of"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GradScaler("cpu", **arguments)


def test_a_static_rule_steps_over_overflows_without_reading_them():
    scaler, training = GradScaler("cpu", rule=StaticScale(128.0)), Training()
    with Reads() as reads:
        training.iterate(scaler, INF)
    assert reads.count == 0
    assert training.parameter.isnan().all()  # 1 - 0.0 * inf
    assert scaler.last_step.stepped


def test_under_a_rule_getters_answer_for_it_and_setters_refuse():
    scaler = GradScaler("cpu", rule=MegatronScale(growth_factor=4.0, growth_interval=9))
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.5, 9)
    for setter in (scaler.set_growth_factor, scaler.set_backoff_factor, scaler.set_growth_interval):
        with pytest.raises(RuntimeError, match=r"call scaler.follow\(dataclasses.replace\(rule, ...\)\)"):
            setter(3)


@pytest.mark.parametrize("live", [False, True])
def test_another_rule_goes_on_from_the_scale_in_force(live):
    scaler, training = GradScaler("cpu", init_scale=64.0, growth_interval=50), Training()
    if live:
        training.iterate(scaler)
    scaler.follow(KerasScale(growth_interval=3))
    assert scaler.rule.skips_on_overflow
    for _ in range(3 - live):
        assert scaler.get_scale() == 64.0
        training.iterate(scaler)
    assert scaler.get_scale() == 128.0
    scaler.follow(Creeping())
    training.iterate(scaler, INF)
    assert scaler.get_scale() == torch.tensor(12.8).item()


@pytest.mark.parametrize("name", sorted(QUICK))
def test_under_a_rule_update_takes_a_scale(name):
    scaler, training = GradScaler("cpu", rule=QUICK[name]), Training()
    for given_scale in (48.0, torch.tensor([24.0])):
        training.iterate(scaler)
        scaler.scale(torch.ones(()))
        scaler.update(given_scale)
        assert scaler.get_scale() == float(given_scale)
        assert scaler.state_dict()["scale"] == float(given_scale)


@pytest.mark.parametrize("live", [False, True], ids=["before scale", "after scale"])
@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_rule_is_where_it_was_after_a_checkpoint_and_in_a_copy(name, live):
    scaler, training = GradScaler("cpu", rule=QUICK[name]), Training()
    for gradient in (1.0, INF, 1.0, 1.0):
        training.iterate(scaler, gradient)
    loaded = GradScaler("cpu", rule=QUICK[name])
    if live:
        loaded.scale(torch.ones(()))
    loaded.load_state_dict(scaler.state_dict())
    torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())
    twins = [loaded, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]
    for gradient in (1.0, INF, INF, 1.0, 1.0, 1.0):
        training.iterate(scaler, gradient)
        for twin in twins:
            Training().iterate(twin, gradient)
            assert twin.state_dict() == scaler.state_dict()


# -- what it waits for -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *(name for name in QUICK if name not in ("DeepSpeed", "own"))])
@pytest.mark.parametrize("gradient", [1.0, INF])
def test_only_step_reads_and_only_once(name, gradient):
    scaler, training = GradScaler("cpu", rule=None if name is None else QUICK[name]), Training()
    training.iterate(scaler)
    loss = training.parameter.sum()
    with Reads() as reads:
        scaler.scale(loss)
        training.parameter.grad.fill_(gradient)
        scaler.unscale_(training.optimizer)
        scaler.update()
        scaler.update(8.0)
        scaler.update(torch.tensor(8.0))
    assert reads.count == 0
    training.parameter.grad.fill_(gradient)
    with Reads() as reads:
        scaler.step(training.optimizer)
    assert reads.count == (0 if name == "static" else 1)


def test_a_host_rule_adds_no_sync_to_that_of_step():
    scaler, training = GradScaler("cpu", rule=Creeping()), Training()
    for gradient in (1.0, INF):
        with Reads() as reads:
            training.iterate(scaler, gradient)
        assert reads.count == 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_step_reads_nothing_once_it_has_its_momentum(momentum):
    scaler, training = GradScaler("cpu"), Training(fused=True, momentum=momentum)
    training.iterate(scaler)
    for gradient in (1.0, INF, 1.0):
        with Reads() as reads:
            training.iterate(scaler, gradient)
        assert reads.count == 0


# -- what it says ----------------------------------------------------------------------------------


def named_run(**options):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.named_parameters(), lr=0.1, **options), GradScaler("cpu", init_scale=64.0)


@pytest.mark.parametrize("fused", [False, True])
def test_last_step_says_what_happened_and_which_gradient_was_first(fused):
    model, optimizer, scaler = named_run(fused=fused)
    assert scaler.last_step == StepOutcome(False, "no step yet")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert scaler.last_step == StepOutcome(True, "parameters updated")
    scaler.update()
    model[0].weight.grad.fill_(INF)
    model[0].bias.grad[1] = NAN
    scaler.step(optimizer)
    scaler.update()
    reason = "gradient overflow at loss scale 64.0, first in the gradient of 0.bias"
    assert scaler.last_step == StepOutcome(False, reason, "0.bias")
    optimizer.zero_grad()
    assert scaler.last_step.first_nonfinite == "0.bias"


def test_a_fused_step_read_after_its_gradients_are_gone_names_none():
    model, optimizer, scaler = named_run(fused=True)
    scaler.scale(model(torch.ones(1, 2)).sum() * INF).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    assert scaler.last_step == StepOutcome(False, "gradient overflow at loss scale 64.0")


def test_a_parameter_without_a_name_is_named_by_its_place():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale((first + second * INF).sum()).backward()
    scaler.step(optimizer)
    assert scaler.last_step.first_nonfinite == "param_groups[1]['params'][0]"


def test_subscribers_get_a_frozen_record_at_every_update():
    model, optimizer, scaler = named_run()
    records = []
    unsubscribe = scaler.subscribe(records.append)
    for fault in (1.0, INF):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * fault).backward()
        scaler.step(optimizer)
        scaler.update()
    unsubscribe()
    unsubscribe()
    scaler.update(3.0)
    assert records == [
        ScaleRecord(0, 64.0, 64.0, found_inf=False, skipped=False, backward_scales=(64.0,)),
        ScaleRecord(0, 64.0, 32.0, True, True, first_nonfinite="1.bias", backward_scales=(64.0,)),
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        records[0].loss_scale = 1.0


# -- unscale and clip ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_unscale_and_clip_is_the_two_calls_in_one(max_norm, norm_type):
    torch.manual_seed(0)
    grads = [torch.randn(size) for size in (1, 7, 100, 33)] + [torch.randn(5, 4).t()]
    norms, clipped = [], []
    for ours in (True, False):
        params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad * 8.0
        if ours:
            norms.append(scaler.unscale_and_clip_(optimizer, max_norm, norm_type))
        else:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(params, max_norm, norm_type))
        clipped.append([param.grad for param in params])
        scaler.step(optimizer)
        assert scaler.last_step.stepped
    torch.testing.assert_close(norms[0], norms[1])
    torch.testing.assert_close(clipped[0], clipped[1])


def test_unscale_and_clip_of_an_overflow_skips_and_of_nothing_is_zero():
    scaler, training = GradScaler("cpu"), Training()
    scaler.scale(torch.ones(()))
    assert scaler.unscale_and_clip_(training.optimizer, 1.0).item() == 0.0
    other = Training()
    other.parameter.grad = torch.tensor([1.0, INF])
    assert scaler.unscale_and_clip_(other.optimizer, 1.0).item() == INF
    scaler.step(other.optimizer)
    assert not scaler.last_step.stepped


@pytest.mark.parametrize("rule", [None, DynamicScale()])
def test_a_floor_above_the_first_scale_is_refused(rule):
    with pytest.raises(ValueError, match=r"^floor=131072\.0: .* the first scale, 65536\.0"):
        GradScaler("cpu", rule=rule, floor=2.0**17)
