"""Fused optimizers without a twin in torch: their published formulas, written out in float64, over fifty steps."""

import copy
import math

import pytest
import torch
from torch import nn

from amplab.optimizers import FusedAdamP, FusedBertAdam, FusedLAMB, FusedNovoGrad, FusedRMSpropTF

LIMIT = 1e-5  # of the largest weight of a tensor


def norm(x):
    return math.sqrt((x * x).sum().item())


# -- NovoGrad --------------------------------------------------------------------------------------------------------


def apex_novograd(*, lr=1e-3, decay=0.0, corrects=True, inside=False, averaging=True, maximum=False, zero=False):
    """apex's ``multi_tensor_novograd``."""

    def length(g):
        return g.abs().max().item() if maximum else norm(g)

    def rule(t, grads, params, states):
        c1, c2 = (1 - 0.95**t, math.sqrt(1 - 0.98**t)) if corrects else (1.0, 1.0)
        for i, (g, p, state) in enumerate(zip(grads, params, states, strict=True)):
            past = state.get("n", 0.0 if zero else length(g))
            mixed = 0.98 * past + 0.02 * length(g)
            state["n"] = mixed if maximum else math.sqrt(0.98 * past**2 + 0.02 * length(g) ** 2)
            denominator = state["n"] / c2 + 1e-8
            share = g / denominator + decay * p if inside else g
            state["m"] = 0.95 * state.get("m", 0.0) + (0.05 if averaging else 1.0) * share
            update = state["m"] / c1 if inside else state["m"] / c1 / denominator + decay * p
            params[i] = p - lr * update

    return rule


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, {}),
        ({"weight_decay": 0.1, "lr": 1e-2}, {"decay": 0.1, "lr": 1e-2}),
        ({"bias_correction": False, "init_zero": True}, {"corrects": False, "zero": True}),
        ({"reg_inside_moment": True, "weight_decay": 0.1}, {"inside": True, "decay": 0.1}),
        ({"grad_averaging": False}, {"averaging": False}),
        ({"norm_type": 0, "weight_decay": 0.1}, {"maximum": True, "decay": 0.1}),
        ({"norm_type": 0, "init_zero": True}, {"maximum": True, "zero": True}),
    ],
)
def test_novograd_is_apexs(check, options, formula):
    check(lambda params: FusedNovoGrad(params, betas=(0.95, 0.98), **options), apex_novograd(**formula))


def test_novograd_is_the_papers(check):
    """Algorithm 1 of Ginsburg et al., 2019."""
    lr, decay = 1e-3, 0.1

    def rule(t, grads, params, states):
        for i, (g, w, state) in enumerate(zip(grads, params, states, strict=True)):
            if t == 1:
                state["v"] = norm(g) ** 2
                state["m"] = g / math.sqrt(state["v"]) + decay * w
            else:
                state["v"] = 0.98 * state["v"] + 0.02 * norm(g) ** 2
                state["m"] = 0.95 * state["m"] + (g / (math.sqrt(state["v"]) + 1e-8) + decay * w)
            params[i] = w - lr * state["m"]

    def make(params):
        settings = {"bias_correction": False, "reg_inside_moment": True, "grad_averaging": False}
        return FusedNovoGrad(params, lr, betas=(0.95, 0.98), weight_decay=decay, **settings)

    check(make, rule)


def test_novograds_saved_state_goes_on_to_the_bit(model_of, train):
    model = model_of()
    optimizer = FusedNovoGrad(model.parameters())
    train(optimizer, list(model.parameters()), 5)
    other = copy.deepcopy(model)
    twin = FusedNovoGrad(other.parameters())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, params in ((optimizer, model), (twin, other)):
        train(each, list(params.parameters()), 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# -- AdamP -----------------------------------------------------------------------------------------------------------


def published_adamp(*, lr, decay, delta, ratio, nesterov, projected):
    """The paper's own code; ``projected`` collects how often each tensor was, by which view."""

    def view_of(p, whole):
        return p.reshape(1 if whole else p.shape[0], -1)

    def project(p, g, u, whole):
        rows, grads, steps = (view_of(each, whole) for each in (p, g, u))
        cosine = (rows * grads).sum(1).abs() / (grads.norm(dim=1) + 1e-8) / (rows.norm(dim=1) + 1e-8)
        if cosine.max() >= delta / math.sqrt(rows.shape[1]):
            return None
        unit = rows / (rows.norm(dim=1, keepdim=True) + 1e-8)
        return (steps - unit * (unit * steps).sum(1, keepdim=True)).reshape_as(p)

    def rule(t, grads, params, states):
        for i, (g, p, state) in enumerate(zip(grads, params, states, strict=True)):
            state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
            state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g * g
            denominator = state["v"].sqrt() / math.sqrt(1 - 0.999**t) + 1e-8
            u = ((0.9 * state["m"] + 0.1 * g) if nesterov else state["m"]) / denominator
            share = 1.0
            for whole in (False, True) if p.dim() > 1 else ():
                found = project(p, g, u, whole)
                if found is not None:
                    u, share = found, ratio
                    projected.append(whole)
                    break
            params[i] = p * (1 - lr * decay * share) - lr / (1 - 0.9**t) * u

    return rule


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("delta", "by_view"), [(0.1, {True}), (1.0, {True, False}), (12.0, {False})])
def test_adamp_is_the_papers(check, nesterov, delta, by_view):
    projected = []
    settings = {"lr": 1e-2, "weight_decay": 0.5, "delta": delta, "wd_ratio": 0.2, "nesterov": nesterov}
    formula = {"lr": 1e-2, "decay": 0.5, "delta": delta, "ratio": 0.2, "nesterov": nesterov}
    rule = published_adamp(**formula, projected=projected)
    check(lambda params: FusedAdamP(params, **settings), rule)
    assert set(projected) == by_view  # False: row by row, True: as a whole


# -- BertAdam and RMSpropTF ------------------------------------------------------------------------------------------

SCHEDULES = {
    "warmup_linear": lambda x, w: max((x - 1) / (w - 1), 0),
    "warmup_cosine": lambda x, _: 0.5 * (1 + math.cos(math.pi * x)),
    "warmup_constant": lambda *_: 1.0,
    "warmup_poly": lambda x, _: (1 - x) ** 0.5,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total", "limit"), [(0.1, 60, -1), (-1, 60, 0.5), (-1, -1, 1.0)])
def test_bert_adam_is_its_formula(check, schedule, warmup, total, limit):
    def rule(t, grads, params, states):
        x = (t - 1) / total
        rate = 1e-2
        if total != -1:
            rate *= x / warmup if x < warmup else SCHEDULES[schedule](x, warmup)
        length = math.sqrt(sum(norm(g) ** 2 for g in grads))
        for i, (raw, p, state) in enumerate(zip(grads, params, states, strict=True)):
            g = raw * min(1.0, limit / length) if limit > 0 else raw
            state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
            state["v"] = 0.99 * state.get("v", 0.0) + 0.01 * g * g
            params[i] = p - rate * (state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * p)

    def make(params):
        return FusedBertAdam(params, 1e-2, warmup, total, schedule, max_grad_norm=limit)

    check(make, rule)


def test_bert_adam_gives_parameters_that_come_later_their_own_rate(gap):
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedBertAdam(weights, 0.1, warmup=0.5, t_total=8, weight_decay=0.0)
    exact, moments = [torch.ones(3).double() for _ in weights], [[0.0, 0.0] for _ in weights]
    for step in range(4):
        for index, weight in enumerate(weights[: 1 + (step > 1)]):
            weight.grad = torch.full((3,), 0.5 + step)
            m, v = moments[index]
            m, v = 0.9 * m + 0.1 * (0.5 + step), 0.99 * v + 0.01 * (0.5 + step) ** 2
            moments[index] = [m, v]
            exact[index] = exact[index] - 0.1 * (step - 2 * index) / 8 / 0.5 * m / (math.sqrt(v) + 1e-6)
        optimizer.step()
    assert gap([weight.detach() for weight in weights], exact) < LIMIT


def test_bert_adam_says_its_rate(model_of, train):
    model = model_of()
    optimizer = FusedBertAdam(model.parameters(), 0.1, warmup=0.5, t_total=10)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert optimizer.get_lr() == [0]
    train(optimizer, list(model.parameters()), 2)
    assert optimizer.get_lr() == pytest.approx([0.1 * 0.2 / 0.5] * len(list(model.parameters())))


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("momentum", "inside"), [(0.0, True), (0.9, True), (0.9, False)])
def test_rmsprop_tf_is_timms(check, start, decoupled, centered, momentum, inside):
    lr, decay, eps = 1e-3, 1e-2, 1e-3

    def rule(_t, grads, params, states):
        for i, (raw, before, state) in enumerate(zip(grads, params, states, strict=True)):
            p, g = ((1 - decay) * before, raw) if decoupled else (before, raw + decay * before)
            v = state.get("v", torch.full_like(p, start))
            state["v"] = v + 0.1 * (g * g - v)
            a = state["a"] = state.get("a", 0.0) + 0.1 * (g - state.get("a", 0.0))
            u = g / ((state["v"] - a * a if centered else state["v"]) + eps).sqrt()
            if momentum:
                state["b"] = momentum * state.get("b", 0.0) + (lr * u if inside else u)
                params[i] = p - (state["b"] if inside else lr * state["b"])
            else:
                params[i] = p - lr * u

    def make(params):
        settings = {"weight_decay": decay, "momentum": momentum, "centered": centered, "decoupled_decay": decoupled}
        return FusedRMSpropTF(params, lr, eps=eps, lr_in_momentum=inside, initial_square_avg=start, **settings)

    check(make, rule)


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: FusedLAMB(p, amsgrad=True), RuntimeError, "FusedLAMB does not support the AMSGrad variant"),
        (lambda p: FusedNovoGrad(p, amsgrad=True), RuntimeError, "FusedNovoGrad does not support the AMSGrad variant"),
        (lambda p: FusedNovoGrad(p, norm_type=1), RuntimeError, "norm_type=1: FusedNovoGrad expected"),
        (lambda p: FusedLAMB(p, betas=(0.9, 1.0)), ValueError, r"betas=\(0.9, 1.0\): FusedLAMB expected"),
        (lambda p: FusedLAMB(p, lr=-1.0), ValueError, "lr=-1.0: FusedLAMB expected"),
        (lambda p: FusedAdamP(p, delta=-1.0), ValueError, "delta=-1.0: FusedAdamP expected"),
        (
            lambda p: FusedBertAdam(p, 0.1, schedule="warm"),
            ValueError,
            "schedule='warm': FusedBertAdam expected",
        ),
        (
            lambda p: FusedBertAdam(p, 0.1, warmup=2.0),
            ValueError,
            "warmup=2.0: FusedBertAdam expected",
        ),
        (FusedBertAdam, ValueError, "lr"),
    ],
)
def test_wrong_arguments_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make([nn.Parameter(torch.ones(1))])


def test_a_state_of_apexs_novograd_with_other_norms_is_refused(model_of):
    optimizer = FusedNovoGrad(model_of().parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["exp_avg_sq"] = [torch.ones(3), torch.ones(2)]
    with pytest.raises(RuntimeError, match="apex's FusedNovoGrad"):
        FusedNovoGrad(model_of().parameters()).load_state_dict(saved)
