"""A step that cannot be run again is looked at: the first output and the first gradient that are not finite."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.lab import watch
from amplab.lab.step_check import StepCheck


@dataclass
class Output:
    logits: torch.Tensor


@pytest.mark.parametrize("pack", [lambda logits: {"logits": logits}, Output, lambda logits: [(logits,)]])
def test_a_step_is_examined_for_every_kind_of_output(pack):
    class Packing(nn.Linear):
        def forward(self, x):
            return pack(super().forward(x))

    model = nn.Sequential(nn.Linear(4, 4), Packing(4, 4))
    check = StepCheck(model, pytest.fail)
    with torch.no_grad():
        model[1].bias.fill_(torch.inf)
    model(torch.ones(2, 4))
    assert check.seen() == ("1", None)


@pytest.mark.parametrize("scaling", ["torch", "amplab", "apex"])
@pytest.mark.parametrize("bad", [True, False])
def test_without_a_step_the_first_bad_gradient_is_named(scaling, bad):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = {"torch": torch.amp.GradScaler("cpu"), "amplab": amplab.GradScaler("cpu")}.get(scaling)
    if scaler is None:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with watch(model, optimizer, scaler=scaler) as w:
        for _ in range(8):
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaling != "apex"):
                loss = w.loss(model(torch.randn(8, 16)).float().square().mean() * (1e6 if bad else 1))
            optimizer.zero_grad()
            if scaler is None:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    amp.reset()
    assert all(record.skipped == bad for record in w.history.records())
    found = [(each.name, each.severity, each.tensor.rpartition(".")[0]) for each in w.findings()]
    assert found == ([("nonfinite-gradient", "note", "gradient of 1")] if bad else [])


@pytest.mark.parametrize(("gives", "words"), [(True, "no loss scale fixes this"), (False, "loss scale is still too")])
def test_the_loss_scale_is_no_cause_of_a_loss_of_inf(gives, words):
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    with watch(model, optimizer, scaler=scaler) as w:
        for _ in range(7):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean() * torch.inf
            scaler.scale(w.loss(loss) if gives else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    (found,) = w.findings().named("nonfinite-gradient").found
    assert words in found.cause


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def overflowing(model, make_scaler=torch.amp.GradScaler, *, call=None, each_step=lambda: None):
    """Train for 7 steps that all overflow in backward; return the watch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = make_scaler("cpu")
    with watch(model, optimizer, scaler=scaler) as w:
        for _ in range(7):
            each_step()
            optimizer.zero_grad()
            loss = (call or model)(torch.ones(2, 4)).square().mean() * torch.inf
            scaler.scale(w.loss(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert len(w.history) == w.history.skip_count == 7
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters())
    return w


def named(w):
    kinds = "nonfinite-forward", "nonfinite-gradient"
    return [each.module or each.tensor for each in w.findings() if each.name in kinds]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize("bad", [True, False])
def test_scripted_modules_are_left_out(make_scaler, bad):
    model = mlp()
    model[1] = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    if bad:
        with torch.no_grad():
            model[1][0].bias.fill_(torch.inf)
    w = overflowing(model, make_scaler)
    assert named(w) == ["2" if bad else "gradient of 2.bias"]
    assert w.failures == ()


class EndlessOutput(nn.Linear):
    """Its output contains itself."""

    def forward(self, x):
        output = [super().forward(x)]
        output.append(output)
        return output


class WithoutHooks(EndlessOutput):
    """It takes no hooks, as some wrappers of modules."""

    def register_forward_hook(self, *_args, **_kwargs):
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize(("last", "error"), [(EndlessOutput, "RecursionError"), (WithoutHooks, "RuntimeError: no")])
def test_a_check_that_fails_is_told_once_and_the_loop_goes_on(last, error):
    model = mlp()
    model[2] = last(4, 1)
    with pytest.warns(RuntimeWarning, match=f"the check of a step after skipped ones failed: {error}") as warned:
        w = overflowing(model, call=lambda x: model(x)[0])
    assert len(warned) == len(w.failures) == 1
    assert named(w) == []


def per_sample(model, x):
    """Return the mean output and 0 times gradients of each sample."""
    weights = dict(model.named_parameters())
    grads = torch.func.vmap(torch.func.grad(lambda one: torch.func.functional_call(model, weights, (one,)).sum()))
    return model(x).mean() + grads(x).sum() * 0


@pytest.mark.parametrize("call", [lambda model, x: torch.func.vmap(model)(x), per_sample], ids=["vmap", "gradients"])
@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, amplab.GradScaler])
def test_outputs_in_a_transform_of_functions_are_left_out(call, make_scaler):
    model = mlp()
    w = overflowing(model, make_scaler, call=partial(call, model))
    assert named(w) == ["gradient of 2.bias"]
    assert w.failures == ()


@pytest.mark.parametrize("whole", [False, True], ids=["graphs", "one graph"])
def test_a_model_that_is_compiled_in_the_step_is_checked_by_its_gradients(whole):
    torch._dynamo.reset()
    model = mlp()
    check = StepCheck(model, pytest.fail)
    compiled = torch.compile(model, backend="eager", fullgraph=whole)
    (compiled(torch.ones(2, 4)) * torch.inf).sum().backward()
    assert check.seen() == (None, "2.bias")
    torch._dynamo.reset()


def test_an_export_in_the_step_is_no_part_of_it():
    model = mlp()
    w = overflowing(model, each_step=lambda: torch.export.export(model, (torch.ones(2, 4),)))
    assert named(w) == ["gradient of 2.bias"]
    assert w.failures == ()
