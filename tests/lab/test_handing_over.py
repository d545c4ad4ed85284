"""All tools take a step in the same ways, and a call in another way names the right one."""

import re
from inspect import signature

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.lab import load_run

X, Y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
ONE_STEP = ("xray", "gradient_range", "first_nonfinite", "doctor")
TRAINING = ("twin", "ladder")


def net():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def wide():
    """A model whose output leaves half's range."""
    model = net()
    with torch.no_grad():
        model.weight.fill_(40000.0)
    return model


def seen(tool, model, *args, **options):
    """What a tool reports of a step, as a value that can be compared."""
    found = getattr(amplab, tool)(model, *args, **options)
    of = {
        "xray": lambda: [(record.op, record.dtypes) for record in found.trace if record.op not in ("", "ones")],
        "gradient_range": found.rows if tool == "gradient_range" else None,
        "first_nonfinite": lambda: str(found),
        "doctor": lambda: [(each.name, each.symptom) for each in found],
    }
    return of[tool]()


@pytest.fixture(autouse=True)
def no_session():
    yield
    amp.reset()


@pytest.mark.parametrize("tool", ONE_STEP)
def test_a_batch_and_a_loss_are_the_same_step_as_a_function(tool):
    model = net()
    expected = seen(tool, model, (X, Y), loss=F.cross_entropy)
    for way in (
        {"step": lambda: F.cross_entropy(model(X), Y)},
        {"batch": (X, Y), "step": lambda: F.cross_entropy(model(X), Y)},
        {"batch": (X, Y), "step": lambda batch: F.cross_entropy(model(batch[0]), batch[1])},
        {"batch": (X, Y), "step": lambda given, batch: F.cross_entropy(given(batch[0]), batch[1])},
        {"batch": (X, Y), "step": lambda *given: F.cross_entropy(model(given[0][0]), given[0][1])},
        {"batch": (X, Y), "step": lambda model=model: F.cross_entropy(model(X), Y)},
    ):
        assert seen(tool, model, **way) == expected


@pytest.mark.parametrize("tool", ONE_STEP)
def test_several_models_need_a_step(tool):
    models = [net(), net()]
    seen(tool, models, X, step=lambda both, batch: (both[0](batch) + both[1](batch)).square().mean())
    with pytest.raises(TypeError, match=rf"amplab\.{tool}\(models, batch, step=loss_of\)"):
        seen(tool, models, X, loss=F.cross_entropy)


CALLS = {
    "xray": "amplab.xray(model, step=loss_of)",
    "gradient_range": "amplab.gradient_range(model, step=loss_of)",
    "first_nonfinite": "amplab.first_nonfinite(model, step=loss_of, scaler=scaler)",
    "doctor": "amplab.doctor(model, step=loss_of, optimizer=optimizer, scaler=scaler)",
    "twin": "amplab.twin(model, batch, step=lambda model, batch: criterion(model(batch)))",
    "ladder": "amplab.ladder(make_model, data, step=lambda model, batch: criterion(model(batch)))",
    "watch": "amplab.watch(model, optimizer, scaler=scaler, step=loss_of)",
}
OTHER_NAMES = {
    "amp": "scaler=",
    "scaler_or_amp": "scaler=",
    "grad_scaler": "scaler=",
    "loss_fn": "step= for a function that runs the forward",
    "criterion": "loss=",
    "closure": "step=",
    "optimizers": "optimizer=",
    "anything": "",
}


@pytest.mark.parametrize("name", OTHER_NAMES)
@pytest.mark.parametrize("tool", CALLS)
def test_another_name_of_an_argument_shows_the_call(tool, name):
    with pytest.raises(TypeError, match=re.escape(CALLS[tool])) as refusal:
        getattr(amplab, tool)(net(), X, **{name: 3})
    assert f"{tool}() got an unexpected keyword argument {name!r}" in str(refusal.value)
    use = OTHER_NAMES[name]
    taken = signature(getattr(amplab, tool)).parameters
    if use.split("=")[0] in taken:
        assert use in str(refusal.value)
    else:
        assert "; use" not in str(refusal.value)


@pytest.mark.parametrize("name", ["amp", "session"])
@pytest.mark.parametrize("tool", CALLS)
def test_a_level_in_the_place_of_a_scaler(tool, name):
    with pytest.raises(TypeError, match="unexpected keyword argument") as refusal:
        getattr(amplab, tool)(net(), X, **{name: "O1"})
    takes = "opt_level" in signature(getattr(amplab, tool)).parameters
    assert ("; use opt_level=" in str(refusal.value)) == takes
    assert "scaler=. " not in str(refusal.value)


@pytest.mark.parametrize("tool", TRAINING)
@pytest.mark.parametrize("way", [{"step": lambda model, batch: 0, "loss": len}, {"batch": None}])
def test_tools_that_train_copies_show_their_own_calls(tool, way):
    way = {"batch": (X, Y), **way}
    batch = way.pop("batch")
    if batch is None and tool == "ladder":  # data is required there
        return
    with pytest.raises(TypeError, match=r"step=lambda model, batch: criterion") as refusal:
        getattr(amplab, tool)(net(), batch, **way)
    assert "loss_of" not in str(refusal.value)


@pytest.mark.parametrize("tool", TRAINING)
def test_a_step_of_copies_without_a_loss(tool):
    with pytest.raises(TypeError, match="step returned NoneType") as refusal:
        getattr(amplab, tool)(net(), (X, Y), step=lambda model, batch: None)
    assert "train_step" not in str(refusal.value)


@pytest.mark.parametrize("tool", [tool for tool in CALLS if tool != "doctor"])
def test_a_whole_train_step_goes_to_the_doctor(tool):
    with pytest.raises(TypeError, match=r"amplab\.doctor takes a whole train_step"):
        getattr(amplab, tool)(net(), X, train_step=lambda: None)


@pytest.mark.parametrize("tool", CALLS)
def test_too_many_arguments_show_the_call(tool):
    with pytest.raises(TypeError, match=re.escape(CALLS[tool])):
        getattr(amplab, tool)(net(), X, "O0", "O1", None)


@pytest.mark.parametrize("tool", ONE_STEP)
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ({"step": len, "loss": len}, "both loss= and step=:"),
        ({"step": lambda batch: 0}, "step requires (batch), but no batch was given"),
        ({"step": lambda a, b, c: 0, "batch": X}, "lambda(a, b, c) is missing a required argument: 'c'"),
        ({"step": nn.MSELoss}, "step=MSELoss is a class"),
        ({"step": 3}, "step=int:"),
        ({"loss": F.cross_entropy}, "loss= takes the model's output, so it needs a batch as well"),
        ({"step": lambda: None}, "amplab.doctor(model, train_step=fn)"),
    ],
)
def test_no_step(tool, way, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        seen(tool, net(), **way)


@pytest.mark.parametrize("tool", ["first_nonfinite", "doctor"])
def test_who_scales(tool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    huge = {"batch": X, "loss": lambda out: (out * 1e6).sum(), "loss_scale": None}
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    session = amp.default_session()
    found = [str(seen(tool, model, scaler=scaler, **huge)) for scaler in (None, amp, session)]
    assert found[0] == found[1] == found[2]
    for wrong in ("O1", optimizer, torch):
        with pytest.raises(TypeError, match="expected a GradScaler"):
            seen(tool, model, scaler=wrong, **huge)


@pytest.mark.parametrize("precision", [{"opt_level": "O1"}, {"policy": "apex/float16"}, {"opt_level": "O2"},
                                       {"autocast": {"dtype": torch.float16}}])  # fmt: skip
@pytest.mark.parametrize("tool", ["first_nonfinite", "doctor"])
def test_a_precision_for_the_step(tool, precision):
    model = wide()
    before = [(weight.dtype, weight.detach().clone()) for weight in model.parameters()]
    finite, broken = (seen(tool, model, X, **options) for options in ({}, precision))
    if tool == "doctor":
        assert [name for name, _ in finite] == []
        assert "overflow-in-half" in [name for name, _ in broken]
    else:
        assert (finite, "linear" in broken) == ("None", True)
    for weight, (dtype, value) in zip(model.parameters(), before, strict=True):
        assert weight.dtype is dtype
        assert torch.equal(weight, value)


def test_a_scaler_and_autocast_go_together():
    found = amplab.first_nonfinite(
        net(), X, loss=lambda out: out.sum() * 4, scaler=torch.amp.GradScaler("cpu"), autocast={"dtype": torch.float16}
    )
    assert (found.cause, found.setting.api_style.value, found.setting.loss_scale) == ("scale", "torch", 2.0**16)


@pytest.mark.parametrize("tool", ["first_nonfinite", "doctor"])
def test_a_session_has_a_precision_of_its_own(tool):
    model = net()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    with pytest.raises(ValueError, match="scaler= is a Session"):
        seen(tool, model, X, scaler=amp, opt_level="O1")


@pytest.mark.parametrize("tool", ["first_nonfinite", "doctor"])
@pytest.mark.parametrize(("scaler", "remedy"), [
    (amp, r"scaler=amp .*amp\.initialize\(model, optimizer\)"),
    (amp.Session(), r"scaler=Session .*session\.initialize\(model, optimizer\)"),
])  # fmt: skip
def test_a_scaler_before_initialize(tool, scaler, remedy):
    with pytest.raises(RuntimeError, match=remedy):
        seen(tool, net(), X, scaler=scaler)


@pytest.mark.parametrize(("precision", "words"), [
    (nn.CrossEntropyLoss(), ["=CrossEntropyLoss:", "as loss="]),
    (F.cross_entropy, ["=cross_entropy:", "as loss="]),
    (3, ["=3:"]),
    ({"opt": "O1"}, ["'opt'", "opt_level", "loss_scale"]),
    ({"models": None}, ["'models'"]),
])  # fmt: skip
def test_what_is_not_a_precision(precision, words):
    """The message names the argument that was given it."""
    model = net()
    calls = {
        "left": lambda: amplab.twin(model, (X, Y), precision),
        "right": lambda: amplab.twin(model, (X, Y), right=precision),
        "rungs['a']": lambda: amplab.ladder(model, (X, Y), rungs={"a": precision}, tell=str),
    }
    for argument, call in calls.items():
        with pytest.raises(TypeError) as refusal:
            call()
        assert str(refusal.value).startswith(f"{argument}=")
        assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("models", [list, tuple])
def test_a_ladder_of_several_models(models):
    with pytest.raises(
        TypeError, match=rf"make_model={models.__name__}: expected one torch\.nn\.Module, or a function"
    ):
        amplab.ladder(models([net()]), (X, Y), tell=str)


@pytest.mark.parametrize("tool", [*ONE_STEP, *TRAINING, "watch"])
def test_a_criterion_in_the_place_of_a_step(tool):
    model = net()
    args = (torch.optim.SGD(model.parameters(), lr=0.1),) if tool == "watch" else ((X, Y),)
    with pytest.raises(TypeError, match=r"CrossEntropyLoss.*as loss="):
        getattr(amplab, tool)(model, *args, step=nn.CrossEntropyLoss())


class WithLoss(nn.Module):
    """A model that returns its loss, as those of other libraries do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])


@pytest.mark.parametrize("tool", ONE_STEP)
def test_a_module_that_contains_the_model_is_a_step(tool):
    model = net()
    expected = seen(tool, model, (X, Y), loss=F.cross_entropy)
    assert seen(tool, model, (X, Y), step=WithLoss(model)) == expected


def test_a_precision_without_a_step_to_run_in_it():
    with pytest.raises(TypeError, match="without a step"):
        amplab.doctor(net(), opt_level="O1")


@pytest.mark.parametrize("tool", TRAINING)
def test_models_that_are_trained_are_given_to_the_step(tool):
    given = []

    def step(model, batch):
        given.append(model)
        return F.cross_entropy(model(batch[0]), batch[1])

    model = net()
    before = [weight.detach().clone() for weight in model.parameters()]
    options = {"steps": 8} if tool == "twin" else {"steps": 8, "tell": str, "rungs": {"O1": "O1", "fp32": "fp32"}}
    by_step, by_loss = (
        getattr(amplab, tool)(model, (X, Y), **way, **options) for way in ({"step": step}, {"loss": F.cross_entropy})
    )
    assert len({id(each) for each in given}) == 2
    assert model not in given
    assert all(torch.equal(weight, value) for weight, value in zip(model.parameters(), before, strict=True))
    if tool == "twin":
        assert by_step.text() == by_loss.text()
    else:
        assert [rung.loss for rung in by_step.rungs] == [rung.loss for rung in by_loss.rungs]
    with pytest.raises(TypeError, match=rf"amplab\.{tool}\(.*, step=lambda model, batch"):
        getattr(amplab, tool)(model, (X, Y), step=lambda: 0, **options)


@pytest.mark.parametrize("way", ["loss", "step", "step of both"])
def test_a_watch_runs_a_step_again_in_each_way(way):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ways = {
        "loss": {"loss": lambda out, target: F.cross_entropy(out * 1e30, target)},
        "step": {"step": lambda batch: F.cross_entropy(model(batch[0]) * 1e30, batch[1])},
        "step of both": {"step": lambda given, batch: F.cross_entropy(given(batch[0]) * 1e30, batch[1])},
    }
    scaler = torch.amp.GradScaler("cpu")
    with amplab.watch(model, optimizer, scaler=scaler, **ways[way]) as w:
        for x, y in w.batches([(X, Y)] * 2):
            optimizer.zero_grad()
            loss = w.loss(F.cross_entropy(model(x) * 1e30, y))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.failures == ()
    assert [each.name for each in w.findings() if each.op] != []


def six_skips(**options):
    """A watch of six steps whose gradients overflow."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with amplab.watch(model, optimizer, scaler=scaler, **options) as w:
        for x, y in w.batches([(X, Y)] * 6):
            optimizer.zero_grad()
            scaler.scale(w.loss(F.cross_entropy(model(x) * 1e38, y) * 1e30)).backward()
            scaler.step(optimizer)
            scaler.update()
    return w


def raises_key_error(_batch):
    return {}["loss"]


@pytest.mark.parametrize(("step", "words"), [
    (lambda _batch: None, "TypeError: step returned NoneType"),
    (raises_key_error, "KeyError: 'loss'"),
])  # fmt: skip
def test_a_watch_reports_that_a_step_cannot_run_again(step, words, tmp_path):
    with pytest.warns(RuntimeWarning, match="could not run again") as warned:
        w = six_skips(step=step, log=tmp_path)
    assert len(warned) == 1
    assert w.history.skip_count == 6
    for found in (w.findings(), load_run(w.log_path).findings()):
        assert words in found.named("step-not-explained")[0].symptom
    assert all(words in failure for failure in w.failures)


@pytest.mark.parametrize("path", ["taken.txt", "taken.txt/run.jsonl", "taken.txt/folder"])
def test_a_log_that_cannot_be_written_is_refused_at_once(path, tmp_path):
    (tmp_path / "taken.txt").write_text("no log")
    model = net()
    with pytest.raises(ValueError, match=re.escape(f"log={tmp_path / path}: cannot write there")):
        amplab.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), log=tmp_path / path)


@pytest.mark.parametrize(("options", "words"), [
    ({"loss": 3}, "loss=int:"),
    ({"step": 3}, "step=int:"),
    ({"step": nn.MSELoss}, "step=MSELoss is a class"),
    ({"step": len, "loss": len}, "both loss= and step="),
    ({"step": lambda a, b, c: 0}, "missing a required argument: 'c'"),
])  # fmt: skip
def test_what_a_watch_cannot_run_again(options, words):
    model = net()
    with pytest.raises(TypeError, match=re.escape(words)):
        amplab.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def backward_and_loss(model):
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    return loss


@pytest.mark.parametrize("tool", ONE_STEP)
def test_a_step_that_calls_backward(tool):
    model = net()
    with pytest.raises(ValueError, match=r"step called backward\(\)"):
        seen(tool, model, step=lambda: backward_and_loss(model))
    assert model.weight.grad is None


@pytest.mark.parametrize("tool", TRAINING)
def test_a_step_of_copies_that_calls_backward(tool):
    options = {} if tool == "twin" else {"tell": str, "rungs": {"fp32": "fp32"}}
    with pytest.raises(ValueError, match=r"step called backward\(\)"):
        getattr(amplab, tool)(net(), (X, Y), step=lambda model, _batch: backward_and_loss(model), **options)


@pytest.mark.parametrize("tool", ONE_STEP)
def test_a_loss_of_another_model(tool):
    other = net()
    with pytest.raises(ValueError, match="depends on no parameter of Linear"):
        seen(tool, net(), step=lambda: F.cross_entropy(other(X), Y))


@pytest.mark.parametrize("tool", ONE_STEP)
def test_a_loss_whose_graph_does_not_show_the_parameters(tool):
    """A reentrant checkpoint builds the graph of its block in backward."""
    model = net()
    x = X.clone().requires_grad_()
    seen(tool, model, step=lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum())


def test_the_name_of_an_optimizer():
    with pytest.raises(TypeError, match="optimizer='adam': expected"):
        amplab.doctor(net(), X, optimizer="adam")
