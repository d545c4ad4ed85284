"""FusedLAMB, its mixed-precision sibling and Ascend's: the formulas of apex, of the paper and of Ascend in float64."""

import copy
import math

import pytest
import torch
from torch import nn

from amplab.optimizers import FusedLAMB, FusedMixedPrecisionLamb, Lamb, NpuFusedLamb

LIMIT = 1e-5  # of the largest weight of a tensor


def norm(x):
    return math.sqrt((x * x).sum().item())


def apex_lamb(*, lr=1e-3, decay=0.01, corrects=True, l2=False, averaging=True, limit=1.0, nvlamb=False, eps=1e-6):
    """apex's ``multi_tensor_lamb``, its two stages one after the other."""

    def rule(t, grads, params, states):
        total = math.sqrt(sum(norm(g) ** 2 for g in grads))
        clip = total / limit if limit and total > limit else 1.0
        c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if corrects else (1.0, 1.0)
        beta3 = 0.1 if averaging else 1.0
        for i, (raw, p, state) in enumerate(zip(grads, params, states, strict=True)):
            g = raw / clip + (decay * p if l2 else 0.0)
            state["m"] = 0.9 * state.get("m", 0.0) + beta3 * g
            state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g * g
            update = (state["m"] / c1) / ((state["v"] / c2).sqrt() + eps) + (0.0 if l2 else decay * p)
            ratio = 1.0
            if (nvlamb or decay != 0) and norm(p) != 0 and norm(update) != 0:
                ratio = norm(p) / norm(update)
            params[i] = p - lr * ratio * update

    return rule


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, {}),
        ({"weight_decay": 0.0}, {"decay": 0.0}),
        ({"weight_decay": 0.0, "use_nvlamb": True}, {"decay": 0.0, "nvlamb": True}),
        ({"adam_w_mode": False, "weight_decay": 0.1}, {"l2": True, "decay": 0.1}),
        ({"bias_correction": False, "lr": 1e-2}, {"corrects": False, "lr": 1e-2}),
        ({"grad_averaging": False, "max_grad_norm": 0.3}, {"averaging": False, "limit": 0.3}),
        ({"max_grad_norm": 1e6, "eps": 1e-3}, {"limit": 1e6, "eps": 1e-3}),
    ],
)
def test_lamb_is_apexs(check, options, formula):
    check(lambda params: FusedLAMB(params, **options), apex_lamb(**formula))


def test_lamb_is_the_papers(check):
    """Algorithm 2 of You et al., 2019, with the identity for phi; no clipping."""
    lr, decay, eps = 1e-2, 0.1, 1e-6

    def rule(t, grads, params, states):
        for i, (g, x, state) in enumerate(zip(grads, params, states, strict=True)):
            state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
            state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
            r = state["m"] / (1 - 0.9**t) / ((state["v"] / (1 - 0.999**t)).sqrt() + eps)
            length = norm(x)
            params[i] = x - lr * (length if length else norm(r + decay * x)) / norm(r + decay * x) * (r + decay * x)

    def make(params):
        return FusedLAMB(params, lr, weight_decay=decay, max_grad_norm=0.0, use_nvlamb=True)

    check(make, rule)


def npu_lamb(*, lr=1e-3, decay=0.0, adam=False, clips=False):
    def rule(_t, grads, params, states):
        total = math.sqrt(sum(norm(g) ** 2 for g in grads))
        for i, (raw, p, state) in enumerate(zip(grads, params, states, strict=True)):
            g = raw / total if clips and total > 1 else raw
            state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
            state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
            update = state["m"] / (state["v"].sqrt() + 1e-6) + decay * p
            weight, length = min(norm(p), 10.0), norm(update)
            ratio = 1.0 if adam or weight == 0 or length == 0 else weight / length
            params[i] = p - lr * ratio * update

    return rule


@pytest.mark.parametrize(
    ("ours", "options", "formula"),
    [
        (NpuFusedLamb, {}, {}),
        (NpuFusedLamb, {"weight_decay": 0.1, "lr": 1e-2}, {"decay": 0.1, "lr": 1e-2}),
        (NpuFusedLamb, {"adam": True}, {"adam": True}),
        (NpuFusedLamb, {"use_global_grad_norm": True}, {"clips": True}),
        (Lamb, {"weight_decay": 0.1}, {"decay": 0.1}),
    ],
)
def test_ascends_lamb_is_its_own(check, ours, options, formula):
    check(lambda params: ours(params, **options), npu_lamb(**formula))


def test_a_long_weight_counts_as_ten():
    lengths = []
    for start in (50.0, 100.0):
        weight = nn.Parameter(torch.full((4,), start))
        weight.grad = torch.ones(4)
        NpuFusedLamb([weight], lr=0.1).step()
        lengths.append(start - weight[0].item())
    assert lengths[0] == pytest.approx(0.1 * 10.0 / 2.0, rel=1e-4)  # a step of norm lr * 10, shared by 4 elements
    assert lengths[1] == pytest.approx(lengths[0], rel=1e-4)


def test_mixed_precision_lamb_keeps_masters_and_begins_at_its_step(model_of, train, gap):
    half = model_of(torch.float16)
    exact = copy.deepcopy(half).float()
    mixed = FusedMixedPrecisionLamb(half.parameters(), lr=1e-2, step=10)
    twin = FusedLAMB(exact.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        for mine, theirs in zip(half.parameters(), exact.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator).half()
            theirs.grad = mine.grad.float()
        mixed.step()
        twin.step()
        if step == 0:
            assert {mixed.state[param]["step"].item() for param in half.parameters()} == {11.0}
            for state, other in zip(mixed.state.values(), twin.state.values(), strict=True):
                assert not torch.equal(state["master"], other["exp_avg"])
                state["step"].fill_(1.0)
            for param, theirs in zip(half.parameters(), exact.parameters(), strict=True):
                theirs.data.copy_(mixed.state[param]["master"])
    masters = [mixed.state[param]["master"] for param in half.parameters()]
    assert gap(masters, exact.parameters()) < LIMIT
    assert all(torch.equal(a.half(), b) for a, b in zip(masters, half.parameters(), strict=True))


def test_states_of_apex_count_steps_in_the_group(model_of, train):
    first, second = model_of(), model_of()
    optimizer = FusedLAMB(first.parameters())
    train(optimizer, list(first.parameters()), 5)
    second.load_state_dict(first.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0]["step"] = 5
    twin = FusedLAMB(second.parameters())
    twin.load_state_dict(saved)
    for each, model in ((optimizer, first), (twin, second)):
        train(each, list(model.parameters()), 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
