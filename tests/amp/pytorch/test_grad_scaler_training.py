"""Training under GradScaler: the cases that PyTorch tests its own with, both classes through the same steps."""

import warnings

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from amplab.amp import GradScaler

INF, NAN = float("inf"), float("nan")
BOTH = [torch.amp.GradScaler, GradScaler]

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "Adam fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adagrad fused": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
}


class Run:
    """A small model, its optimizer, and a scaler; batches from a seed."""

    def __init__(self, scaler_type, make_optimizer, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer = make_optimizer(list(self.model.parameters()))
        self.scaler = scaler_type("cpu", **settings)
        self.generator = torch.Generator().manual_seed(1)
        self.scales = []

    def loss(self, fault=1.0):
        inputs = torch.randn(4, 6, generator=self.generator)
        return self.model(inputs).square().mean() * fault

    def step(self, fault=1.0, *, between=None):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(fault)).backward()
        if between is not None:
            between(self)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())

    def everything(self):
        tensors = [*self.model.parameters()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return tensors


def assert_same_run(ours, theirs):
    assert ours.scales == theirs.scales
    assert ours.scaler.state_dict() == theirs.scaler.state_dict()
    mine, torchs = ours.everything(), theirs.everything()
    assert len(mine) == len(torchs)
    assert all(map(torch.equal, mine, torchs))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"init_scale": 1000.1, "growth_factor": 1.7}], ids=["defaults", "odd"])
def test_a_run_is_torchs_to_the_bit(name, settings):
    faults = [1.0, INF, 1.0, 1.0, NAN, 1.0, 1.0, 1.0, 3e38, 1.0]
    ours, theirs = (Run(each, OPTIMIZERS[name], growth_interval=2, **settings) for each in (GradScaler, BOTH[0]))
    for fault in faults:
        ours.step(fault)
        theirs.step(fault)
    assert_same_run(ours, theirs)
    assert len(set(ours.scales)) > 1


def clip(run):
    run.scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


def unscale_only(run):
    run.scaler.unscale_(run.optimizer)


def penalize(run):
    run.optimizer.zero_grad()
    params = list(run.model.parameters())
    scaled = torch.autograd.grad(run.scaler.scale(run.loss()), params, create_graph=True)
    inverse = 1.0 / run.scaler.get_scale()
    penalty = sum((grad * inverse).square().sum() for grad in scaled).sqrt()
    run.scaler.scale(run.loss() + penalty).backward()


def accumulate(run):
    run.scaler.scale(run.loss()).backward()
    run.scaler.scale(run.loss()).backward()


@pytest.mark.parametrize("between", [clip, unscale_only, penalize, accumulate])
@pytest.mark.parametrize("name", ["SGD momentum", "SGD fused", "Adam", "AdamW fused"])
def test_clipping_penalty_and_accumulation_are_torchs_to_the_bit(between, name):
    ours, theirs = (Run(each, OPTIMIZERS[name], growth_interval=2) for each in (GradScaler, BOTH[0]))
    for fault in (1.0, INF, 1.0, 1.0, 1.0):
        ours.step(fault, between=between)
        theirs.step(fault, between=between)
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("overflowing", [None, 0, 1], ids=["clean", "first overflows", "second overflows"])
def test_several_models_losses_and_optimizers(overflowing):
    results = []
    for scaler_type in BOTH:
        torch.manual_seed(0)
        models = [nn.Linear(4, 4), nn.Linear(4, 4)]
        optimizers = [
            torch.optim.SGD(models[0].parameters(), lr=0.1),
            torch.optim.Adam(models[1].parameters(), lr=0.1, fused=True),
        ]
        scaler = scaler_type("cpu", init_scale=128.0, growth_interval=2)
        for iteration in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            out = [model(torch.ones(2, 4)) for model in models]
            losses = [2 * out[0].sum() + 3 * out[1].sum(), 0.6 * out[0].sum() - 0.1 * out[1].square().sum()]
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            if iteration == 1 and overflowing is not None:
                models[overflowing].weight.grad[1, 2] = INF
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        results.append([scaler.get_scale(), *(param for model in models for param in model.parameters())])
    ours, theirs = results[1], results[0]
    assert ours[0] == theirs[0] == (512.0 if overflowing is None else 128.0)
    assert all(map(torch.equal, ours[1:], theirs[1:]))


# -- gradients of every layout ---------------------------------------------------------------------


LAYOUTS = {
    "transposed": lambda: torch.randn(8, 6).t(),
    "every other column": lambda: torch.randn(8, 16)[:, ::2],
    "a slice": lambda: torch.randn(12, 12)[2:10, 3:11],
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "empty": lambda: torch.randn(0, 3),
    "no dimension": lambda: torch.randn(()),
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(3, dtype=torch.bfloat16),
}


def unscaled(scaler_type, layout, bad, where):
    torch.manual_seed(0)
    grad = LAYOUTS[layout]()
    if bad is not None and grad.numel():
        grad[(where,) * grad.dim()] = bad
    plain, awkward = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros_like(grad))
    plain.grad, awkward.grad = torch.full((3,), 6.0), grad
    optimizer = torch.optim.SGD([plain, awkward], lr=1.0)
    scaler = scaler_type("cpu", init_scale=3.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert awkward.grad.data_ptr() == grad.data_ptr()
    return scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item(), plain.grad, awkward.grad


@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
@pytest.mark.parametrize("where", [0, -1], ids=["first element", "last element"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unscale_on_awkward_layouts(layout, bad, where):
    ours, theirs = unscaled(GradScaler, layout, bad, where), unscaled(BOTH[0], layout, bad, where)
    assert ours[0] == theirs[0] == float(bad is not None and layout != "empty")
    tolerance = 0 if layout != "float64" else 1e-7  # there torch multiplies by a float32 reciprocal, too
    for mine, torchs in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=tolerance, atol=0, equal_nan=True)


def test_expanded_gradients_are_refused_before_anything_is_written():
    plain, expanded = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([plain, expanded], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    plain.grad, expanded.grad = torch.full((2,), 4.0), torch.ones(1).expand(2)
    with pytest.raises(RuntimeError, match="share one place in memory"):
        scaler.unscale_(optimizer)
    assert plain.grad.tolist() == [4.0, 4.0]


def sparse(values):
    indices = torch.tensor([[0, 1, 0], [0, 2, 0]])  # (0, 0) twice
    return torch.sparse_coo_tensor(indices, torch.tensor(values), (4, 4), check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.12
@pytest.mark.parametrize("scaler_type", BOTH, ids=["torch", "amplab"])
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_sparse_gradients_are_unscaled_and_checked(scaler_type, bad):
    table, dense = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([table, dense], lr=1.0)
    scaler = scaler_type("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    for _ in range(2):
        table.grad, dense.grad = sparse([1.0, 2.0, 3.0 if bad is None else bad]), torch.full((2,), 4.0)
        scaler.unscale_(optimizer)
        assert scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item() == float(bad is not None)
        assert dense.grad.tolist() == [4.0 / scaler.get_scale()] * 2
        if bad is None:
            expected = torch.zeros(4, 4)
            expected[0, 0], expected[1, 2] = 2.0, 1.0
            assert torch.equal(table.grad.to_dense(), expected)
        scaler.update()


def test_gradients_that_come_and_go_and_change_their_layout():
    first, second = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([first], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    first.grad = torch.full((4, 4), 2.0)
    scaler.unscale_(optimizer)
    scaler.update()
    optimizer.add_param_group({"params": [second], "lr": 2.0})
    first.grad, second.grad = sparse([2.0, 2.0, 2.0]), torch.full((2,), 2.0)
    scaler.unscale_(optimizer)
    assert (first.grad.to_dense()[0, 0].item(), second.grad.tolist()) == (2.0, [1.0, 1.0])
    scaler.update()
    first.grad, second.grad = None, torch.full((2,), INF)
    scaler.step(optimizer)
    assert second.tolist() == [0.0, 0.0]
    scaler.update()
    optimizer.param_groups[0]["params"][0] = replaced = nn.Parameter(torch.ones(1))
    replaced.grad, second.grad = torch.ones(1), None
    scaler.step(optimizer)
    assert replaced.item() == 0.0  # 1 - 1.0 * 1.0 / 1.0


def test_a_parameter_listed_twice_is_unscaled_once():
    parameter = nn.Parameter(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD([parameter, parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale((parameter * 2.0).sum()).backward()
    scaler.unscale_(optimizer)
    assert parameter.grad.item() == 2.0


# -- optimizers that take the scale ----------------------------------------------------------------


class TakesScale(torch.optim.Optimizer):
    """Notes what it is lent."""

    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, {})
        self.seen = []

    def step(self):
        self.seen.append((self.grad_scale, self.found_inf))
        return "stepped"


@pytest.mark.parametrize("scaler_type", BOTH, ids=["torch", "amplab"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("preset", [None, 3.0])
def test_what_such_an_optimizer_is_lent(scaler_type, dtype, overflow, unscale, preset):
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = TakesScale([parameter])
    scaler = scaler_type("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([8.0, INF if overflow else 1.0], dtype=dtype)
    if unscale and dtype is torch.float16:
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients."):
            scaler.unscale_(optimizer)
        return
    if unscale:
        scaler.unscale_(optimizer)
    if preset is not None:
        optimizer.grad_scale = torch.tensor(preset)
    assert scaler.step(optimizer) == "stepped"
    ((grad_scale, found_inf),) = optimizer.seen
    if unscale:
        assert grad_scale is None if preset is None else grad_scale.item() == preset
    else:
        assert grad_scale.item() == 4.0 * (preset or 1.0)
    assert (found_inf.item(), found_inf.shape, found_inf.dtype) == (float(overflow), (), torch.float32)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    assert parameter.grad[0].item() == (2.0 if unscale else 8.0)
    scaler.update()
    assert scaler.get_scale() == (2.0 if overflow else 4.0)


@pytest.mark.parametrize("scaler_type", BOTH, ids=["torch", "amplab"])
def test_an_optimizer_that_takes_the_scaler_is_given_it_with_a_warning(scaler_type):
    class TakesScaler(TakesScale):
        def step(self, *, grad_scaler=None):
            self.seen.append(grad_scaler)

    parameter = nn.Parameter(torch.ones(1))
    optimizer = TakesScaler([parameter])
    scaler = scaler_type("cpu")
    scaler.scale(parameter.sum()).backward()
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself") as caught:
        scaler.step(optimizer)
    assert caught[0].filename == __file__
    assert optimizer.seen == [scaler]
    assert "grad_scale" not in vars(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED


def test_what_was_lent_is_taken_back_after_a_step_that_raises():
    class Raises(TakesScale):
        def step(self):
            raise ArithmeticError("no")

    parameter = nn.Parameter(torch.ones(1))
    optimizer = Raises([parameter])
    scaler = GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(ArithmeticError):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


@pytest.mark.parametrize("name", ["Adam fused", "SGD fused", "Adagrad fused"])
def test_half_parameters_step_with_fused_optimizers(name):
    results = []
    for scaler_type in BOTH:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(8).half())
        optimizer = OPTIMIZERS[name]([parameter])
        scaler = scaler_type("cpu", init_scale=256.0, growth_interval=2)
        for fault in (1.0, INF, 1.0, 1.0):
            scaler.scale((parameter.square() * fault).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((parameter, scaler.get_scale()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert results[0][0].isfinite().all()


def two_players(scaler_type):
    torch.manual_seed(0)
    players = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in players]
    return players, optimizers, scaler_type("cpu", init_scale=1024.0, growth_interval=2)


@pytest.mark.parametrize("fault", [1.0, INF])
def test_a_loss_that_is_scaled_within_a_step_is_torchs(fault):
    """By a hook of the step, as of a loop that trains a second model there."""
    results = []
    for scaler_type in BOTH:
        players, (first, second), scaler = two_players(scaler_type)

        def train_second(*_arguments, player=players[1], optimizer=second, scaler=scaler):
            optimizer.zero_grad()
            scaler.scale(player(torch.ones(2, 4)).square().sum()).backward()
            scaler.step(optimizer)

        first.register_step_pre_hook(train_second)
        for number in range(5):
            scaler.scale(players[0](torch.ones(2, 4)).sum() * (fault if number == 2 else 1.0)).backward()
            scaler.step(first)
            scaler.update()
            first.zero_grad()
        results.append(([each for player in players for each in player.parameters()], scaler.get_scale()))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1]


def test_an_overflow_before_an_error_between_two_steps_counts_in_the_next_update():
    results = []
    for scaler_type in BOTH:
        players, optimizers, scaler = two_players(scaler_type)

        def play(number, factor, players=players, optimizers=optimizers, scaler=scaler):
            optimizers[number].zero_grad()
            scaler.scale(players[number](torch.ones(2, 4)).sum() * factor).backward()
            scaler.step(optimizers[number])
            if factor == INF:
                raise ArithmeticError("no batch")

        try:
            play(0, INF)
        except ArithmeticError:
            play(1, 1.0)
        scaler.update()
        results.append(([each for player in players for each in player.parameters()], scaler.get_scale()))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1] == 512.0
