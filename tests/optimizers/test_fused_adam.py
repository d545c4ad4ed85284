"""FusedAdam and FusedAdamW: torch's rule over many steps, torch's state_dict, apex's arguments."""

import copy
import pickle

import pytest
import torch
from torch import nn

from amplab.optimizers import FusedAdam, FusedAdamW

LIMIT = 4e-6  # of the largest weight, after 50 steps in float32, each operation rounded by itself
OPTIONS = {
    "default": {},
    "decay": {"weight_decay": 0.1},
    "betas": {"betas": (0.5, 0.9), "eps": 1e-3, "lr": 1e-2},
    "maximize": {"maximize": True, "weight_decay": 0.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fifty_steps_of_adamw_are_torchs(serving, model_of, train, gap, options):
    mine, theirs, exact = model_of(), model_of(), model_of().double()
    train(FusedAdamW(mine.parameters(), **options), list(mine.parameters()), 50)
    train(torch.optim.AdamW(theirs.parameters(), fused=True, **options), list(theirs.parameters()), 50)
    train(torch.optim.AdamW(exact.parameters(), **options), list(exact.parameters()), 50)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT
    assert gap(mine.parameters(), exact.parameters()) < LIMIT
    assert gap(mine.parameters(), model_of().parameters()) > 1e-3


@pytest.mark.parametrize(("adam_w_mode", "twin"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_apexs_two_modes_are_torchs_two_optimizers(serving, model_of, train, gap, adam_w_mode, twin):
    mine, theirs = model_of(), model_of()
    train(FusedAdam(mine.parameters(), adam_w_mode=adam_w_mode, weight_decay=0.1), list(mine.parameters()), 50)
    train(twin(theirs.parameters(), weight_decay=0.1), list(theirs.parameters()), 50)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


@pytest.mark.parametrize("eps_inside_sqrt", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_apexs_own_settings_are_their_formula(serving, train, gap, bias_correction, eps_inside_sqrt):
    start = torch.linspace(-1, 1, 33)
    weight = nn.Parameter(start.clone())
    settings = {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}
    optimizer = FusedAdam([weight], bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt, **settings)
    train(optimizer, [weight], 10)
    generator = torch.Generator().manual_seed(1)
    p, m, v = start.double(), torch.zeros(33).double(), torch.zeros(33).double()
    for t in range(1, 11):
        g = torch.randn(33, generator=generator).double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if bias_correction else (1.0, 1.0)
        root = ((v + 1e-2) / c2).sqrt() if eps_inside_sqrt else (v / c2).sqrt() + 1e-2
        p = p - 0.01 * 0.1 * p - 0.01 * (m / c1) / root
    assert gap([weight.detach()], [p]) < LIMIT


# -- state_dict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("ours", [FusedAdamW, FusedAdam])
def test_state_goes_to_torch_and_training_goes_on(model_of, train, gap, ours, fused):
    mine, theirs = model_of(), model_of()
    first = ours(mine.parameters(), lr=0.01, weight_decay=0.1)
    train(first, list(mine.parameters()), 7)
    theirs.load_state_dict(mine.state_dict())
    second = torch.optim.AdamW(theirs.parameters(), fused=fused)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, list(mine.parameters()), 5, seed=2)
    train(second, list(theirs.parameters()), 5, seed=2)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT
    assert second.state_dict()["state"][0]["step"].item() == first.state_dict()["state"][0]["step"].item() == 12.0
    assert first.state_dict()["state"][0].keys() == second.state_dict()["state"][0].keys()


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize(("ours", "twin"), [(FusedAdamW, torch.optim.AdamW), (FusedAdam, torch.optim.Adam)])
def test_state_comes_from_torch_and_training_goes_on(model_of, train, gap, ours, twin, fused):
    mine, theirs = model_of(), model_of()
    first = twin(theirs.parameters(), lr=0.01, weight_decay=0.1, fused=fused)
    train(first, list(theirs.parameters()), 7)
    mine.load_state_dict(theirs.state_dict())
    second = ours(mine.parameters())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, list(theirs.parameters()), 5, seed=2)
    train(second, list(mine.parameters()), 5, seed=2)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


def test_state_of_apex_counts_steps_in_the_group(model_of, train, gap):
    mine, theirs = model_of(), model_of()
    first = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0)
    train(first, list(theirs.parameters()), 7)
    mine.load_state_dict(theirs.state_dict())
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        del state["step"]
    group = {"lr": 0.01, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 7}
    saved["param_groups"] = [{**group, "params": saved["param_groups"][0]["params"]}]
    second = FusedAdam(mine.parameters())
    second.load_state_dict(saved)
    train(first, list(theirs.parameters()), 5, seed=2)
    train(second, list(mine.parameters()), 5, seed=2)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)), "state_dict"])
def test_a_copy_of_16_bit_training_goes_on_to_the_bit(model_of, train, dtype, way, master_weights):
    model = model_of(dtype)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, master_weights=master_weights)
    train(optimizer, list(model.parameters()), 5, factor=1e-3)  # squares that half would round to 0
    if way == "state_dict":
        other = copy.deepcopy(model)
        twin = FusedAdamW(other.parameters(), max_grad_norm=1.0, master_weights=master_weights)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        other, twin = way((model, optimizer))
    train(optimizer, list(model.parameters()), 5, seed=2)
    train(twin, list(other.parameters()), 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == torch.float32


# -- masters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_are_float32_training_and_the_weights_their_rounding(serving, model_of, train, gap, dtype):
    half = model_of(dtype)
    exact = copy.deepcopy(half).float()
    optimizer = FusedAdam(half.parameters(), lr=1e-3, weight_decay=0.1, master_weights=True)
    generator = torch.Generator().manual_seed(1)
    twin = torch.optim.AdamW(exact.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(20):
        for mine, theirs in zip(half.parameters(), exact.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator).to(dtype)
            theirs.grad = mine.grad.float()
        optimizer.step()
        twin.step()
    masters = [optimizer.state[param]["master"] for param in half.parameters()]
    assert gap(masters, exact.parameters()) < LIMIT
    assert all(torch.equal(a.to(dtype), b) for a, b in zip(masters, half.parameters(), strict=True))


def test_float32_parameters_beside_masters_need_none(model_of, train):
    half, full = model_of(torch.float16), model_of()
    optimizer = FusedAdamW([*half.parameters(), *full.parameters()], master_weights=True)
    train(optimizer, [*half.parameters(), *full.parameters()], 2)
    assert all("master" in optimizer.state[param] for param in half.parameters())
    assert not any("master" in optimizer.state[param] for param in full.parameters())


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda params: FusedAdam(params, amsgrad=True), "AMSGrad"),
        (lambda params: FusedAdamW(params, amsgrad=True), "amsgrad=True:"),
        (lambda params: FusedAdamW(params, foreach=True), "foreach"),
        (lambda params: FusedAdamW(params, differentiable=True), "differentiable"),
        (lambda params: FusedAdamW(params, fused=False), "fused=False:"),
        (lambda params: FusedAdam(params).step(scale=128.0), r"scale.*amp\.scale_loss"),
        (lambda params: FusedAdamW([{"params": params, "amsgrad": True}]), "amsgrad=True"),
    ],
)
def test_unsupported_arguments_are_refused(make, words):
    with pytest.raises(RuntimeError, match=words):
        make([nn.Parameter(torch.ones(1))])


def test_a_state_with_amsgrad_is_refused(model_of):
    theirs = torch.optim.AdamW(model_of().parameters(), amsgrad=True)
    with pytest.raises(RuntimeError, match="amsgrad=True"):
        FusedAdamW(model_of().parameters()).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("max_grad_norm", [-1.0, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(max_grad_norm):
    with pytest.raises(ValueError, match="max_grad_norm"):
        FusedAdamW([nn.Parameter(torch.ones(1))], max_grad_norm=max_grad_norm)


def test_both_are_torchs_classes():
    weight = [nn.Parameter(torch.ones(1))]
    assert isinstance(FusedAdamW(weight), torch.optim.AdamW)
    assert isinstance(FusedAdam(weight, use_mt=True, capturable=True), torch.optim.Adam)


def test_what_zero_grad_leaves():
    for options, left in (({}, None), ({"set_grad_none": False}, 0.0)):
        weight = nn.Parameter(torch.ones(1))
        optimizer = FusedAdam([weight], **options)
        weight.grad = torch.ones(1)
        optimizer.zero_grad()
        assert (weight.grad if left is None else weight.grad.item()) == left
        optimizer.zero_grad(set_to_none=True)
        assert weight.grad is None


def test_a_learning_rate_in_a_tensor(model_of, train):
    mine, theirs = model_of(), model_of()
    train(FusedAdamW(mine.parameters(), lr=torch.tensor(0.01)), list(mine.parameters()), 3)
    train(FusedAdamW(theirs.parameters(), lr=torch.tensor(0.01).item()), list(theirs.parameters()), 3)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
