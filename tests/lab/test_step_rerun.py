"""Where nothing skips, a step is run again before it is taken: its batch and its weights are as they were."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.diagnose import run_findings
from amplab.lab import watch


def batches(bad, value=math.nan):
    """Batches of eight rows, that of step `bad` with a value in it."""
    torch.manual_seed(1)
    for number in range(8):
        x = torch.randn(8, 4)
        x[3, 2] = value if number == bad else 0.0
        yield x


def trained(bad, *, level=None, step=True, seed=0, scale=1.0, loss_of=None, value=math.nan):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if level:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    loss_of = loss_of or (lambda x: model(x).float().square().mean())
    try:
        with watch(model, optimizer, scaler=amp if level else None, step=loss_of if step else None) as w:
            for x in w.batches(batches(bad, value)):
                optimizer.zero_grad()
                loss = loss_of(x) if level else w.loss(loss_of(x))
                if level:
                    with amp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
                optimizer.step()
        return w, [each.detach().clone() for each in model.state_dict().values()]
    finally:
        amp.reset()


@pytest.mark.parametrize(("level", "scale"), [(None, 1.0), ("O1", 128.0), ("O2", 128.0)])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_step_with_a_bad_batch_is_named_if_no_scaler_skips(level, scale, bad):
    w, _ = trained(bad, level=level, scale=scale)
    found = w.findings()
    assert (found[0].name, found[0].severity) == ("nonfinite-batch", "error")
    assert w.failures == ()
    healthy, _ = trained(-1, level=level, scale=scale)
    assert not healthy.findings().harmful


@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [0, 3])
def test_a_forward_that_overflows_in_half_is_named_if_the_step_is_taken_too(level, scale, bad):
    """The optimizer's step, in which it runs again then, casts nothing at O1."""
    w, _ = trained(bad, level=level, scale=scale, value=1e6)
    found = w.findings()
    assert "overflow-in-half" in [each.name for each in found]
    assert bad in w.history.explanations
    assert w.failures == ()


@pytest.mark.parametrize("level", [None, "O1"])
def test_the_look_changes_nothing(level):
    """The run with it ends bit by bit as the run without."""
    (_, looked_at), (_, left_alone) = (trained(3, level=level, step=step, scale=128.0) for step in (True, False))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(looked_at, left_alone, strict=True))


@pytest.mark.parametrize(("scale", "name"), [(2.0**40, "scale-too-large"), (128.0, None)])
def test_a_static_scale_that_overflows_is_named_before_it_is_in_the_weights(scale, name):
    w, _ = trained(-1, level="O2", scale=scale)
    found = w.findings().harmful
    assert [each.name for each in found[:1]] == ([name] if name else [])


def test_without_a_step_the_advice_is_to_look_while_it_happens():
    w, _ = trained(3, step=False)
    (found,) = run_findings(w.observation)
    assert "step 3 was taken" in found.symptom
    assert found.remedy.startswith("amplab.watch(model, optimizer, step=lambda batch:")


@pytest.mark.parametrize("scaling", ["apex", "torch", "amplab"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_any_batch_of_a_step_that_accumulates_is_found(scaling, bad):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"init_scale": 128.0}
    scaler = {"torch": torch.amp.GradScaler, "amplab": amplab.GradScaler}.get(scaling)
    scaler = scaler and scaler("cpu", **options)
    if scaler is None:
        amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)

    def loss_of(x):
        return model(x).float().square().mean() / 3

    given = [x.nan_to_num(nan=math.inf) for x in batches(3 + bad)][:6]
    with watch(model, optimizer, scaler=scaler, step=loss_of) as w:
        for number, x in enumerate(w.batches(given)):
            last = number % 3 == 2
            if scaler is None:
                with amp.scale_loss(loss_of(x), optimizer, delay_unscale=not last) as scaled:
                    scaled.backward()
            else:
                scaler.scale(w.loss(loss_of(x))).backward()
            if last:
                optimizer.step() if scaler is None else scaler.step(optimizer)
                if scaler is not None:
                    scaler.update()
                optimizer.zero_grad()
    amp.reset()
    assert [record.skipped for record in w.history.records()] == [False, True]
    assert (w.findings()[0].name, w.failures) == ("nonfinite-batch", ())


@pytest.mark.parametrize("region", [torch.autocast, amplab.autocast])
@pytest.mark.parametrize("scaling", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize("seed", range(6))
def test_an_explanation_is_about_all_batches_of_a_step(scaling, region, seed, with_budget):
    """Against every scale: steps of one to four batches, one of which is large or holds NaN."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    number = 1 + (seed + 3) % 4
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = scaling("cpu", init_scale=2.0 ** draw.choice([20, 24]))
    given = [(torch.randn(5, 8), torch.randn(5, 4)) for _ in range(2 * number)]
    bad, has_nan = draw.randrange(number), seed % 2
    given[bad][1].mul_(draw.choice([30.0, 300.0, 3000.0]))
    given[number + bad][0][0, 0] = math.nan if has_nan else 1.0

    def loss_of(pair):
        with region("cpu", torch.float16):
            return F.mse_loss(model(pair[0]), pair[1]) / number

    scales = []
    with watch(model, optimizer, scaler=scaler, step=loss_of) as w:
        for place, pair in enumerate(w.batches(given)):
            scaler.scale(w.loss(loss_of(pair))).backward()
            if place % number == number - 1:
                scales.append(scaler.get_scale())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    explanations = w.history.explanations
    assert w.failures == ()
    assert [*explanations] == [record.step for record in w.history.records() if record.skipped]
    for step, why in explanations.items():
        batches_of_step = given[step * number : (step + 1) * number]
        fits = largest_finite(loss_of, batches_of_step, [*model.parameters()], below=scales[step])
        assert (why.fits, why.kind == "data", "holds NaN" in why.sentence) == (fits, fits is None, fits is None)
    assert (1 in explanations and explanations[1].kind == "data") == has_nan


def largest_finite(loss_of, given, parameters, below):
    """The largest power of two at which the gradients of every batch, and their sum, are finite; None if none is."""
    for scale in (2.0**k for k in range(int(math.log2(below)) - 1, -1, -1)):
        grads = [torch.autograd.grad(loss_of(each) * scale, parameters) for each in given]
        if all(sum(several).isfinite().all() for several in zip(*grads, strict=True)):
            return scale
    return None


def test_a_step_without_gradients_is_not_a_skipped_one():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with watch(model, optimizer) as w:
        for x in batches(None):
            with amp.scale_loss(1e-3 * model(x).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.zero_grad()  # too early
            optimizer.step()
    amp.reset()
    assert w.history.skip_count == 0
    assert "scale-collapse" not in {each.name for each in w.findings()}


class Graph(nn.Module):
    """A layer over the neighbours in a graph, whose adjacency is a buffer that does not store every element."""

    def __init__(self, adjacency):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("adjacency", adjacency)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs):
        self.calls += 1
        return self.layer(torch.matmul(self.adjacency, inputs))


def overflowing(model, steps):
    """Watch steps that all overflow, and can run again."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amplab.GradScaler("cpu", init_scale=2.0**126)

    def step(batch):
        return model(batch).square().mean() * 1e4

    with amplab.watch(model, optimizer, scaler=scaler, step=step) as w:
        for batch in w.batches([torch.full((3, 4), 1e4)] * steps):
            optimizer.zero_grad()
            scaler.scale(step(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    return w


ADJACENCIES = {"sparse": lambda: torch.eye(3).to_sparse(), "expanded": lambda: torch.ones(3, 1).expand(3, 3)}
BATCH = torch.ones(3, 4), torch.ones(3, 4)
TOOLS = {
    "xray": lambda model: amplab.xray(model, BATCH[0], opt_level="O1"),
    "ladder": lambda model: amplab.ladder(model, BATCH, loss=nn.functional.mse_loss, steps=20),
    "twin": lambda model: amplab.twin(model, BATCH, loss=nn.functional.mse_loss),
    "doctor": lambda model: amplab.doctor(model, BATCH, loss=nn.functional.mse_loss),
    "gradient_range": lambda model: amplab.gradient_range(model, BATCH, loss=nn.functional.mse_loss),
    "first_nonfinite": lambda model: amplab.first_nonfinite(model, BATCH, loss=nn.functional.mse_loss),
}


@pytest.mark.parametrize("kind", ADJACENCIES)
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_run_a_model_over_a_graph_and_leave_it_as_it_was(kind, tool):
    model = Graph(ADJACENCIES[kind]())
    before, dense = model.adjacency, model.adjacency.to_dense().clone()
    TOOLS[tool](model)
    assert model.adjacency is before
    assert torch.equal(before.to_dense(), dense)
    assert model.calls.item() == 0


@pytest.mark.parametrize("kind", ADJACENCIES)
def test_a_skipped_step_of_a_model_over_a_graph_is_explained(kind, with_budget):
    model = Graph(ADJACENCIES[kind]())
    w = overflowing(model, steps=2)
    assert (w.history.skip_count, w.failures, sorted(w.history.explanations)) == (2, (), [0, 1])
    assert model.calls.item() == 2


class Resizes(nn.Module):
    """As torch's observers of quantization do, a forward gives a buffer its shape."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(4, 4), way
        self.register_buffer("low", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs):
        self.calls += 1
        if self.way == "resized":
            self.low.resize_(4)
        elif self.way == "data":
            self.low.data = inputs.detach().amin(0)
        elif self.way == "replaced":
            self.low = inputs.detach().amin(0)
        elif self.way == "added" and not hasattr(self, "more"):
            self.register_buffer("more", torch.zeros(2))
        self.low.copy_(inputs.detach().amin())
        return self.layer(inputs)


@pytest.mark.filterwarnings("ignore:amplab.watch. step 0 could not run again:RuntimeWarning")
@pytest.mark.parametrize("way", ["resized", "data", "replaced", "added"])
def test_a_loop_goes_on_whose_forward_changes_what_buffers_are(way, with_budget):
    model = Resizes(way)
    w = overflowing(model, steps=4)
    assert (w.history.skip_count, model.calls.item()) == (4, 4)
    assert sorted(w.history.explanations) == [0, 1, 2, 3]
    assert ["added or removed buffers" in each for each in w.failures] == [True] * (way == "added")
