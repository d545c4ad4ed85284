"""What cannot be looked at is answered with one sentence: what was given, what is expected, what to do next.

The same odd model, loss or scale goes to every public entry that runs a step, so that none of them fails deep inside.
"""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amplab
from amplab.diagnose import doctor, first_nonfinite, followed_step, twin
from amplab.diagnose.reruns import probe
from amplab.trace import GradientRange, trace_step
from amplab.trace.argument_checks import accepts

X = torch.ones(5, 4)


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 2))
        self.requires_grad_(False)


class WithoutGradient(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 2))

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


def made_for_inference():
    with torch.inference_mode():
        return net()


def followed(model, loss_fn):
    with followed_step(model) as step:
        step.loss(loss_fn()).backward()


def nonfinite(model, step, **options):
    return first_nonfinite(model, step=step, **options)


def examined(model, step, **options):
    return doctor(model, step=step, **options)


LOOKS = [trace_step, nonfinite, probe, examined, followed]
BATCHED = [amplab.xray, amplab.gradient_range, lambda model, batch: twin(model, batch, "O0", "O1", steps=1)]
NO_MODEL = {
    "None": (None, "NoneType"),
    "a string": ("net", "str"),
    "an optimizer": (torch.optim.SGD([torch.ones(1)], lr=0.1), "SGD"),
    "a function": (len, "builtin_function_or_method"),
}
ODD_MODELS = {
    "scripted part": (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))), "0 is scripted"),
    "scripted": (lambda: torch.jit.script(nn.Linear(4, 4)), "is scripted"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "0 has uninitialized parameters"),
    "of inference": (made_for_inference, "0 was created in torch.inference_mode()"),
}
WITHOUT_GRADIENT = {
    "frozen": (Frozen, "Frozen has parameters, all frozen"),
    "no parameters": (nn.ReLU, "ReLU has no parameters"),
    "no_grad inside": (WithoutGradient, "depends on the model's parameters"),
}


scripting = pytest.mark.filterwarnings("ignore:`torch.jit")


def ids(table):
    return {"argvalues": list(table.values()), "ids": list(table)}


@pytest.mark.parametrize("look", [trace_step, nonfinite, probe, followed])
@pytest.mark.parametrize(("given", "kind"), **ids(NO_MODEL))
def test_no_module(look, given, kind):
    with pytest.raises(TypeError, match=f"^model={kind}:"):
        look(given, net)


@pytest.mark.parametrize("look", [*LOOKS[:3], followed, amplab.xray, amplab.gradient_range])
def test_a_class_in_the_place_of_a_module(look):
    with pytest.raises(TypeError, match=r"^model=Linear is a class"):
        look(nn.Linear, X)


@scripting
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(("make", "words"), **ids(ODD_MODELS))
def test_models_that_cannot_be_looked_at(look, make, words):
    model = make()
    with pytest.raises(ValueError, match=re.escape(words)):
        look(model, lambda: model(X).sum())


@scripting
@pytest.mark.parametrize("look", BATCHED)
@pytest.mark.parametrize(("make", "words"), **ids(ODD_MODELS))
def test_the_same_with_a_batch(look, make, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        look(make(), X)


@pytest.mark.parametrize("look", [trace_step, nonfinite, probe, examined])
@pytest.mark.parametrize(("make", "words"), **ids(WITHOUT_GRADIENT))
def test_a_loss_without_a_gradient(look, make, words):
    model = make()
    with pytest.raises(ValueError, match=f"returned a tensor without a gradient: .*{re.escape(words)}"):
        look(model, lambda: model(X).sum())


@pytest.mark.parametrize("look", BATCHED[:2])
@pytest.mark.parametrize(("make", "words"), **ids(WITHOUT_GRADIENT))
def test_an_output_without_a_gradient(look, make, words):
    with pytest.raises(ValueError, match=f"^the model returned a tensor without a gradient: .*{re.escape(words)}"):
        look(make(), X)


@pytest.mark.parametrize("look", [nonfinite, probe, examined, followed])
def test_a_model_without_numbers(look):
    model = net().to("meta")
    with pytest.raises(ValueError, match=r"^model=Sequential .*meta device"):
        look(model, lambda: model(X.to("meta")).sum())


@pytest.mark.parametrize("look", [*BATCHED[1:], lambda model, batch: amplab.xray(model, batch, stats=True)])
def test_a_model_without_numbers_and_a_batch(look):
    with pytest.raises(ValueError, match="meta device"):
        look(net().to("meta"), X.to("meta"))


def test_shapes_alone_are_enough_without_statistics():
    """Ops, dtypes, casts and the bytes kept are those of a real model."""
    torch.manual_seed(0)
    real, shapes = amplab.xray(net(), X, opt_level="O1"), amplab.xray(net().to("meta"), X.to("meta"), opt_level="O1")
    assert [(row["op"], row["inputs"], row["outputs"]) for row in real.rows()] == [
        (row["op"], row["inputs"], row["outputs"]) for row in shapes.rows()
    ]
    assert real.kept.total == shapes.kept.total > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("look", [trace_step, nonfinite, probe, examined])
def test_gradients_are_off_around_the_call(look, mode):
    model = net()
    with mode(), pytest.raises(ValueError, match=rf"^torch\.{mode.__name__}\(\) is active"):
        look(model, lambda: model(X).sum())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("look", BATCHED)
def test_gradients_are_off_around_a_call_with_a_batch(look, mode):
    model = net()
    with mode(), pytest.raises(ValueError, match=rf"^torch\.{mode.__name__}\(\) is active"):
        look(model, X)


RETURNED = {
    "None": (lambda out: None, TypeError, "returned NoneType"),
    "a tuple": (lambda out: (out.sum(), 1), TypeError, "returned tuple"),
    "a dict": (lambda out: {"loss": out.sum()}, TypeError, r"returned dict: .*such as out\['loss'\]"),
    "a number": (lambda out: out.sum().item(), TypeError, r"returned float: .*\.item\(\)"),
    "a module": (lambda out: nn.MSELoss(), TypeError, r"returned MSELoss: .*MSELoss\(\)\(output, target\)"),
    "a vector": (lambda out: out, ValueError, r"returned torch.float32 of shape \(5, 2\): .*reduce it"),
    "nothing": (lambda out: out[:0], ValueError, r"returned torch.float32 of shape \(0, 2\)"),
    "whole numbers": (lambda out: out.argmax(), ValueError, "returned torch.int64 of shape"),
    "complex": (lambda out: out.sum() * 1j, ValueError, r"returned torch.complex64 of .*take its \.abs\(\) or \.real"),
    "no number": (lambda out: out.sum().to("meta"), ValueError, "returned a tensor on the meta device"),
    "detached": (
        lambda out: out.detach().sum(),
        ValueError,
        r"returned a tensor without a gradient: .*look for detach\(\)",
    ),
}


@pytest.mark.parametrize("look", [trace_step, nonfinite, probe, examined])
@pytest.mark.parametrize(("loss", "error", "words"), **ids(RETURNED))
def test_what_a_loss_function_returned(look, loss, error, words):
    model = net()
    with pytest.raises(error, match=f"^step {words}"):
        look(model, lambda: loss(model(X)))


@pytest.mark.parametrize("look", [amplab.xray, amplab.gradient_range, twin])
@pytest.mark.parametrize(("loss", "error", "words"), **ids(RETURNED))
def test_what_a_criterion_returned(look, loss, error, words):
    with pytest.raises(error, match=f"^loss {words}"):
        look(net(), X, loss=loss)


@pytest.mark.parametrize("look", [trace_step, probe])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "step=NoneType:"),
        (X, "step=Tensor:"),
        (nn.MSELoss, "step=MSELoss is a class: expected"),
        (lambda out: out, "lambda(out) is missing a required argument: 'out'"),
        (nn.MSELoss(), "MSELoss(input, target) is missing a required argument: 'input'"),
    ],
)
def test_no_function_of_no_arguments(look, given, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        look(net(), given)


@pytest.mark.parametrize("look", BATCHED[:2])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss, "loss=CrossEntropyLoss is a class:"),
        ("mse", "loss=str:"),
        (X, "loss=Tensor:"),
        (lambda: 0, "lambda() takes fewer"),
        (
            lambda a, b, c: a,
            "lambda(a, b, c) is missing a required argument: 'c'",
        ),
        (lambda out, *, target: out, "lambda(out, target) is missing a required "),
    ],
)
def test_no_criterion(look, loss, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        look(net(), X, loss=loss)


LOADER = DataLoader(TensorDataset(X), batch_size=5)


@pytest.mark.parametrize("look", BATCHED)
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (LOADER, "batch=DataLoader: expected one batch, not an object that yields many; pass next(iter(loader))"),
        (
            LOADER.dataset,
            "batch=TensorDataset: expected one batch, not an object that yields many; pass next(iter(DataL",
        ),
        (iter([X]), "batch=list_iterator: expected one batch, not an object that yields many; pass next(batch)"),
        ((), "batch=tuple without values:"),
        ({}, "batch=dict without values:"),
        ({"pixels": X}, "batch=dict with the keys 'pixels':"),
    ],
)
def test_no_batch(look, batch, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        look(net(), batch)


def test_a_function_is_not_a_batch():
    for tool in (amplab.xray, amplab.gradient_range, first_nonfinite, doctor):
        for given in (lambda: X, len, nn.MSELoss()):
            with pytest.raises(TypeError, match=rf"Write amplab\.{tool.__name__}\(model, step=loss_of\)"):
                tool(net(), given)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (X.double(), "amplab called Sequential(float64[5, 4] on cpu); its parameters are float32 on cpu."),
        (X.to("meta"), "amplab called Sequential(float32[5, 4] on meta); its parameters are float32 on cpu."),
        (
            X.numpy(),
            "amplab called Sequential(ndarray); its parameters are float32 on cpu. To call it in another way, pass "
            "step=, a function that calls the model and returns the loss.",
        ),
        ({"input": X.long()}, "amplab called Sequential(input=int64[5, 4] on cpu); its parameters are float32 on cpu."),
    ],
)
def test_what_the_model_raises_says_how_it_was_called(batch, words):
    with pytest.raises((RuntimeError, TypeError)) as raised:
        amplab.xray(net(), batch)
    assert raised.value.__notes__ == [words]


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, 10**400])
def test_a_scale_that_is_none(scale):
    model = net()
    for look in (trace_step, nonfinite, probe, examined):
        with pytest.raises(ValueError, match="expected a finite number > 0"):
            look(model, lambda: model(X).sum(), loss_scale=scale)
    for look in (amplab.xray, amplab.gradient_range):
        with pytest.raises(ValueError, match="expected a finite number > 0"):
            look(model, X, loss_scale=scale)


@pytest.mark.parametrize("scale", ["dynamic", True, torch.amp.GradScaler("cpu"), [1.0]])
def test_a_scale_that_is_not_a_number(scale):
    model = net()
    for look in (trace_step, nonfinite, probe, examined):
        with pytest.raises(TypeError, match=r"^loss_scale=.*expected a number"):
            look(model, lambda: model(X).sum(), loss_scale=scale)
    with pytest.raises(TypeError, match="expected a number"):
        GradientRange((), scale)


def test_scales_of_numpy_and_of_tensors():
    assert amplab.xray(net(), X, loss_scale=np.float32(8.0)).loss_scale == 8.0
    with pytest.raises(TypeError, match=r"\.item\(\)"):
        amplab.xray(net(), X, loss_scale=torch.tensor(8.0))


def test_a_compiled_model_is_accepted_where_no_ops_are_recorded():
    """The compiler's backend runs eagerly, so that the gradients are the same ones bit for bit."""
    model = net()
    compiled = torch.compile(model, backend="eager")
    eager, fused = amplab.gradient_range(model, X), amplab.gradient_range(compiled, X)
    assert [histogram for _, histogram in eager.layers] == [histogram for _, histogram in fused.layers]
    assert probe(compiled, lambda: compiled(X).sum()).loss == probe(model, lambda: model(X).sum()).loss


@pytest.mark.parametrize("kind", [nn.Linear(4, 2, dtype=torch.complex64), nn.Embedding(5, 4, sparse=True)])
def test_complex_and_sparse_gradients_are_measured_by_their_numbers(kind):
    batch = X.to(torch.complex64) if isinstance(kind, nn.Linear) else torch.tensor([1, 2, 2])
    found = amplab.gradient_range(kind, batch, loss=lambda out: out.abs().sum())
    kind(batch).abs().sum().backward()
    grad = kind.weight.grad.coalesce().values() if kind.weight.grad.is_sparse else torch.view_as_real(kind.weight.grad)
    assert found.rows()[0]["total"] == grad.numel()
    assert found.rows()[0]["highest"] == math.floor(math.log2(grad.abs().max()))


def test_accepts():
    assert accepts(lambda a, b=1, *rest: 0, 1) is None
    assert accepts(nn.MSELoss(), 2) is None
    assert accepts(dict.fromkeys, 1) is None
    assert accepts(torch.optim.SGD, 0) is not None
    assert accepts(lambda: 0, 1) == "lambda() takes fewer"


def test_a_part_that_was_compiled_in_place_is_made_again():
    model = net()
    model[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"^0 is compiled: .*compiled in place"):
        amplab.xray(model, torch.ones(2, 4))
