"""What all fused optimizers do around their rule: scalers, clipping, skips, groups, hooks, the apex face."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amplab import amp
from amplab.amp import GradScaler
from amplab.optimizers import FusedAdam, FusedAdamW, FusedSGD

LIMIT = 4e-6
MAKES = {
    "sgd": lambda params, **options: FusedSGD(params, lr=0.01, momentum=0.9, **options),
    "adamw": lambda params, **options: FusedAdamW(params, lr=0.01, **options),
    "adam": lambda params, **options: FusedAdam(params, lr=0.01, adam_w_mode=False, weight_decay=0.1, **options),
}
TWINS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
}
SCALERS = {"torch": torch.amp.GradScaler, "amplab": GradScaler}


def everything(model, optimizer):
    """Weights, and all state that is there."""
    states = optimizer.state_dict()["state"].values()
    return [*model.parameters(), *(value for state in states for value in state.values())]


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Calls(TorchDispatchMode):
    """Counts the calls of every operator of amplab."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "amplab":
            self.names.append(func._schema.name.removeprefix("amplab::"))
        return func(*args, **(kwargs or {}))


# -- scalers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("name", MAKES)
def test_a_scaled_run_with_overflows_is_torchs(serving, model_of, train, gap, name, scaler):
    mine, theirs = model_of(), model_of()
    ours, twin = SCALERS[scaler]("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    train(MAKES[name](mine.parameters()), list(mine.parameters()), 20, spoil=(3, 4, 11), scaler=ours)
    train(TWINS[name](theirs.parameters()), list(theirs.parameters()), 20, spoil=(3, 4, 11), scaler=twin)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT
    assert ours.get_scale() == twin.get_scale() == 1.0


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", MAKES)
def test_a_skip_leaves_every_bit(serving, model_of, train, name, dtype, master_weights, scaler):
    model = model_of(dtype)
    optimizer = MAKES[name](model.parameters(), max_grad_norm=1.0, master_weights=master_weights)
    scaler = SCALERS[scaler]("cpu", init_scale=8.0)
    train(optimizer, list(model.parameters()), 2, scaler=scaler)
    before = copies(everything(model, optimizer))
    train(optimizer, list(model.parameters()), 1, spoil=(0,), scaler=scaler)
    assert same(before, everything(model, optimizer))
    train(optimizer, list(model.parameters()), 1, scaler=scaler)
    assert not same(before, everything(model, optimizer))


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("name", MAKES)
def test_clipping_is_clip_grad_norm(serving, model_of, gap, name, scaler, unscale_first):
    mine, theirs = model_of(), model_of()
    optimizer, twin = MAKES[name](mine.parameters(), max_grad_norm=0.5), TWINS[name](theirs.parameters())
    scaler = SCALERS[scaler]("cpu", init_scale=512.0)
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        scaler.scale(torch.zeros(()))
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            b.grad = torch.randn(a.shape, generator=generator) * (0.01 if step % 2 else 1.0)
            a.grad = b.grad * 512
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        twin.step()
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


@pytest.mark.parametrize("name", MAKES)
def test_clipping_without_a_scaler(serving, model_of, train, gap, name):
    mine, theirs = model_of(), model_of()
    train(MAKES[name](mine.parameters(), max_grad_norm=1e-3), list(mine.parameters()), 1)
    twin = TWINS[name](theirs.parameters())
    handle = twin.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(theirs.parameters(), 1e-3) and None)
    train(twin, list(theirs.parameters()), 1)
    handle.remove()
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_amplabs_scaler_reads_once_and_steps_once(model_of, max_grad_norm):
    model = model_of()
    optimizer, scaler = FusedAdamW(model.parameters(), max_grad_norm=max_grad_norm), GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 7)).sum()).backward()
    with Calls() as calls:
        scaler.step(optimizer)
    assert calls.names == ["multi_tensor_unscale_", "multi_tensor_adam_"]


def test_a_norm_is_used_only_by_the_step_after_its_check(model_of, train, gap):
    """A check whose step never came, of gradients that are long gone."""
    runs = []
    for checks in (False, True):
        model = model_of()
        optimizer = FusedSGD(model.parameters(), lr=0.1, max_grad_norm=1.0)
        if checks:
            train(optimizer, list(model.parameters()), 1, factor=0.0)
            for param in model.parameters():
                param.grad = torch.full_like(param, 1e6)
            assert all(found.item() == 0.0 for found in optimizer.check_gradients().values())
        train(optimizer, list(model.parameters()), 1, scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
        runs.append(list(model.parameters()))
    assert same(*runs)


def test_no_gradients_are_no_checks(model_of):
    optimizer, scaler = FusedAdamW(model_of().parameters(), max_grad_norm=1.0), GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}


# -- lists that change -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKES)
def test_parameters_that_join_leave_and_come_back(serving, model_of, gap, name):
    """Some without a gradient now and then, a group that is added, state that is thrown away."""
    runs = []
    for make in (MAKES[name], TWINS[name]):
        model, late = model_of(), nn.Parameter(torch.ones(5))
        params = list(model.parameters())
        optimizer = make(params)
        generator = torch.Generator().manual_seed(0)
        for step in range(12):
            if step == 5:
                optimizer.add_param_group({"params": [late], "lr": 0.1})
            if step == 8:
                optimizer.state[params[0]].clear()
            if step == 10:
                optimizer.state.clear()
            for index, param in enumerate([*params, late]):
                grad = torch.randn(param.shape, generator=generator)
                param.grad = None if (step + index) % 4 == 0 else grad
            optimizer.step()
        runs.append([*params, late])
    assert gap(*runs) < LIMIT


@pytest.mark.parametrize("name", MAKES)
def test_state_that_is_thrown_away_begins_anew(model_of, train, gap, name):
    """While the same parameters have gradients, so that only the state says that something has changed."""
    runs = []
    for make in (MAKES[name], TWINS[name]):
        model = model_of()
        params = list(model.parameters())
        optimizer = make(params)
        train(optimizer, params, 3)
        optimizer.state[params[0]].clear()
        train(optimizer, params, 3)
        optimizer.state[params[1]] = {}
        train(optimizer, params, 3)
        optimizer.state.clear()
        train(optimizer, params, 3)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, params, 3)
        runs.append(params)
    assert gap(*runs) < LIMIT


@pytest.mark.parametrize("name", MAKES)
def test_schedules_and_groups(serving, model_of, train, gap, name):
    runs = []
    for make in (MAKES[name], TWINS[name]):
        model = model_of()
        optimizer = make([{"params": model[0].parameters(), "weight_decay": 0.2}, {"params": model[2].parameters()}])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=20)
        train(optimizer, [*model[0].parameters(), *model[2].parameters()], 20, schedule=schedule)
        runs.append(list(model.parameters()))
    assert gap([each for each in runs[0] if each.dim() > 1], [each for each in runs[1] if each.dim() > 1]) < LIMIT


@pytest.mark.parametrize("name", MAKES)
def test_layouts(serving, train, gap, name):
    """Channels last, transposed, misaligned and strided weights, with gradients in another layout."""
    runs = []
    for make in (MAKES[name], TWINS[name]):
        torch.manual_seed(0)
        base = torch.randn(601)
        weights = [
            torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
            torch.randn(20, 30).T,
            base[1:],
            torch.randn(10, 20)[:, ::2],
            torch.randn(()),
            torch.randn(0),
        ]
        params = [nn.Parameter(weight) for weight in weights]
        train(make(params), params, 5)
        runs.append([param for param in params if param.numel()])
    assert gap(*runs) < LIMIT


def test_a_closure_is_evaluated_with_gradients(model_of):
    model = model_of()
    optimizer = FusedSGD(model.parameters(), lr=1e-3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 7)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[2] < losses[0]


def test_accumulated_gradients_are_one_step(model_of, gap):
    mine, theirs = model_of(), model_of()
    for model, optimizer, scaler in (
        (mine, FusedAdamW(mine.parameters(), lr=0.01), GradScaler("cpu", init_scale=64.0)),
        (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=64.0)),
    ):
        for batch in range(2):
            scaler.scale(model(torch.full((2, 7), 1.0 + batch)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


def test_hooks_run_once_and_a_copy_has_none_of_the_kept_lists(model_of, train):
    model = model_of()
    optimizer, ran = FusedAdamW(model.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    train(optimizer, list(model.parameters()), 2)
    assert ran == ["pre", "post"] * 2
    other, twin = copy.deepcopy((model, optimizer))
    train(twin, list(other.parameters()), 1)
    assert not same(list(model.parameters()), list(other.parameters()))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_gradients_that_no_kernel_takes(make):
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    weight.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="grad 0 is not strided"):
        optimizer.step()
    number = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    number.grad = torch.ones(3, dtype=torch.cfloat)
    with pytest.raises(RuntimeError, match="expected float16"):
        make([number]).step()


# -- the apex face ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", MAKES)
def test_every_opt_level_is_that_of_torchs_optimizer(model_of, gap, name, opt_level):
    runs = []
    for make in (MAKES[name], TWINS[name]):
        model = model_of()
        model, optimizer = amp.initialize(
            model, make(model.parameters()), opt_level=opt_level, loss_scale="dynamic", verbosity=0
        )
        torch.manual_seed(1)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 7)
            factor = float("inf") if step == 2 else 1.0
            with amp.scale_loss(model(x).float().square().mean() * factor, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        runs.append([each.detach().float() for each in amp.master_params(optimizer)])
        amp.reset()
    if opt_level == "O3" and name != "sgd":  # where torch's eps is 0 in half, and its weights are NaN
        assert all(each.isfinite().all() for each in runs[0])
    else:
        assert gap(*runs) < {"O3": 2e-2, "O2": 1e-3}.get(opt_level, LIMIT)


# -- without kernels -------------------------------------------------------------------------------------------------

WITHOUT_COMPILER = """
import warnings, torch
from amplab.optimizers import FusedAdamW
weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
optimizer = FusedAdamW([weight], lr=0.5, weight_decay=0.0, max_grad_norm=100.0, master_weights=True)
weight.grad = torch.ones(3, dtype=torch.float16)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    optimizer.step()
print(weight.tolist(), [str(each.message) for each in seen])
"""


def test_without_a_compiler_the_reference_steps_and_one_warning_says_so(tmp_path):
    environment = {**os.environ, "PATH": "", "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    environment["AMPLAB_KERNELS"] = "auto"
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[0.5, 0.5, 0.5] [")
    assert "no C++ compiler" in done.stdout
    assert done.stdout.count("amplab kernels") == 1
