"""The ladder: the first rung that holds, with planted faults that only some rungs survive."""

import math
import random
import re
import sys
from contextlib import contextmanager
from io import StringIO

import pytest
import torch
from html_outline import outline
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import amplab
from amplab import amp
from amplab.diagnose.half_peaks import HalfPeaks
from amplab.diagnose.ladder import RUNGS, ladder

torch.manual_seed(7)
IMAGES = torch.randn(256, 16)
LABELS = (IMAGES @ torch.randn(16, 4)).argmax(1)


def batch(step):
    rows = torch.arange(64) + 64 * (step % 4)
    return IMAGES[rows], LABELS[rows]


def healthy():
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


class Overflows(nn.Module):
    """Squares of 300 leave half; bfloat16 and float32 hold them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.last((self.first(x) * 600).square() / 1e4) * 0.01


def climb(make_model, data=batch, **options):
    told = []
    report = ladder(make_model, data, **{"loss": F.cross_entropy, "steps": 30, "tell": told.append, **options})
    assert len(told) == len(options.get("rungs", RUNGS))
    return report


def test_a_healthy_model_stays_on_the_first_rung():
    report = climb(healthy)
    assert report.recommended.name == "O2 dynamic"  # the static scale, which holds as well, comes after it
    assert [rung.failure for rung in report.rungs] == [None] * 6
    said = " ".join(str(report).split())
    assert "Recommended: O2 dynamic. It holds in the 30 steps seen, the first of the ladder." in said
    assert re.search(r"Largest float16 activation [\d.]+ \([\d.]+ % of 65504\), .*; the activations did not rise", said)


def drifting(step):
    """Inputs that grow by 7 % a step: in float32 they never matter, in float16 they overflow near step 110."""
    x, y = batch(step)
    return x * 1.07**step, y


class Drifts(nn.Module):
    """A loss that does not depend on the size of the inputs, from products that do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32, bias=False), nn.Linear(32, 4)
        nn.init.normal_(self.first.weight, std=4.0)

    def forward(self, x):
        return self.last(F.normalize(self.first(x).float(), dim=-1).to(self.last.weight.dtype))


def test_a_rung_that_is_about_to_overflow_is_not_recommended():
    """At step 70 all is well; the oracle is a run that goes on, in float32 and in O2."""
    rungs = {"O2": {"opt_level": "O2", "loss_scale": 128.0}, "fp32": "fp32"}
    options = {"data": drifting, "rungs": rungs}
    short, long = (climb(Drifts, steps=steps, **options) for steps in (70, 160))
    assert short.rungs[0].finite
    assert not long.rungs[0].finite
    assert long.rungs[1].failure is None
    died = next(place for place, step in enumerate(long.rungs[0].steps) if not math.isfinite(step.loss))
    told = re.fullmatch(r"activations reach 65504 at about step (\d+)", short.rungs[0].failure)
    assert told
    assert abs(int(told[1]) - died) <= 15
    assert short.recommended.name == "fp32"


class Rises(nn.Module):
    """Its activations grow by about 4600 in each step, in half as in float32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 100.0))

    def forward(self, x):
        return self.weight * x.to(self.weight.dtype) * 100


def towards(target):
    return {
        "data": (torch.ones(4, 8), torch.zeros(4)),
        "loss": lambda out, _: ((out.float().mean() - target) * 1e-5) ** 2,
        "optimizer": lambda weights: torch.optim.SGD(weights, lr=3e5),
        "rungs": {"O2": {"opt_level": "O2"}, "bf16": "bf16", "fp32": "fp32"},
    }


def test_a_rung_whose_activations_rise_near_the_limit_holds_with_a_reservation():
    """The oracle is a run that goes on for a few steps: it overflows."""
    short, long = climb(Rises, steps=10, **towards(1e5)), climb(Rises, steps=20, **towards(1e5))
    assert long.rungs[0].failure is not None
    assert short.rungs[0].failure is None
    assert "from 1e+04 to 5.17e+04, 79 % of 65504" in short.rungs[0].reservation
    said = " ".join(str(short).split())
    assert said.startswith("Recommended with a reservation: O2. ")
    assert "The first without a reservation: bf16." in said


def test_activations_that_rise_far_below_the_limit_are_no_reservation():
    report = climb(Rises, steps=10, **towards(2e4))
    assert report.rungs[0].reservation is None
    assert "exceed it at about step" in " ".join(str(report).split())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_rung_whose_loss_is_infinite_does_not_hold(level):
    """The mean of float16 numbers that overflow is -inf in the loss; no weight becomes infinite."""
    options = towards(0) | {"loss": lambda out, _: -out.float().mean() * 1e-3 * 1e-5}
    options["rungs"] = {level: {"opt_level": level, "policy": None}, "fp32": "fp32"}

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, 8, bias=False)
            nn.init.constant_(self.out.weight, 900.0)

        def forward(self, x):
            return self.out(x.to(self.out.weight.dtype) * 10)

    report = climb(Grows, steps=10, **options)
    assert report.recommended.name == "fp32"
    assert "-inf" in report.rungs[0].failure


class Saturates(nn.Module):
    """Its largest square leaves half, and a tanh makes 1 of it."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        return self.out(torch.tanh((self.out(x.to(self.out.weight.dtype)).detach() + 300).square()))


def test_an_overflow_that_the_loss_does_not_show_is_a_reservation():
    report = climb(Saturates, **towards(1) | {"steps": 10, "optimizer": None})
    assert report.rungs[0].failure is None
    assert "activations overflow in step 0" in report.rungs[0].reservation


class Masked(nn.Module):
    """Scores that masks of each kind fill: of -inf, and of the most negative number of either format."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        scores = self.out(x.to(self.out.weight.dtype))
        future = torch.ones_like(scores).tril(-4).bool()
        added = torch.zeros(scores.shape).masked_fill(future, torch.finfo(torch.float32).min).to(scores.dtype)
        filled = scores.masked_fill(future, -math.inf).softmax(-1) + (scores + added).softmax(-1)
        lowest = torch.finfo(scores.dtype).min
        return filled + torch.where(future, torch.tensor(lowest, dtype=scores.dtype), scores).softmax(-1)


def test_masks_are_no_overflow():
    report = climb(Masked, **towards(1) | {"steps": 10, "optimizer": None})
    assert [rung.reservation for rung in report.rungs] == [None] * 3


def test_peaks_are_those_of_the_values_themselves():
    peaks = HalfPeaks()
    x = torch.tensor([3.0, -700.0, 65504.0, math.inf], dtype=torch.float16, requires_grad=True)
    with peaks.at(0):
        y = x[:2] * 2
        y.backward(torch.tensor([100.0, 0.5], dtype=torch.float16))
        x.detach().clone()
    assert (peaks.activation.largest, peaks.gradient.largest) == (1400.0, 200.0)
    assert peaks.activation.reaches is None


def test_memory_that_no_op_has_written_is_no_peak():
    """The dropout of the CPU allocates its mask with whatever was there before."""
    peaks, ones = HalfPeaks(), torch.ones(4, 512, dtype=torch.float16)
    for step in range(20):
        held = [torch.full((4, 512), 5.0e4, dtype=torch.float16) for _ in range(8)]
        del held  # what comes next gets its memory
        with peaks.at(step):
            torch.dropout(ones, 0.3, train=True)
    assert peaks.activation.largest < 2.0


def test_a_forward_that_leaves_half_climbs_to_bf16():
    report = climb(Overflows)
    assert report.recommended.name == "bf16"
    failures = {rung.name: rung.failure for rung in report.rungs}
    assert "LossScaleCollapse" in failures["O2 dynamic"]
    assert failures["O2 static 128"].startswith("weights are inf or NaN")
    assert "LossScaleCollapse" in failures["O1 dynamic"]
    assert "<table>" in report._repr_html_()


def test_gradients_that_vanish_climb_to_the_dynamic_scale():
    """A loss of 2^-20 has no gradients in half at 128; SGD with a rate of 2^20 learns from them where they are."""
    report = climb(
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        loss=lambda out, labels: F.cross_entropy(out, labels) * 2**-22,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.5 * 2**22),
        steps=60,
    )
    assert report.recommended.name == "O2 dynamic"
    assert report.rungs[1].failure is not None  # O2 with a static scale of 128


def test_a_run_that_float32_cannot_do_either_is_not_recommended():
    report = climb(healthy, optimizer=lambda weights: torch.optim.SGD(weights, lr=1e30))
    assert report.recommended.failure is not None
    assert str(report).startswith("No rung holds, not even fp32")


def test_a_score_decides_too():
    report = climb(healthy, evaluate=lambda model: (model(IMAGES).argmax(1) == LABELS).float().mean())
    assert all(0.25 < rung.score <= 1 for rung in report.rungs)
    worse = climb(
        healthy, evaluate=lambda model: 1.0 if next(model.parameters()).grad is None else 0.0, rungs={"O1": "O1"}
    )
    assert worse.rungs[0].score in (0.0, 1.0)


def test_every_rung_starts_alike_and_leaves_the_random_numbers():
    torch.manual_seed(3)
    random.seed(3)
    kept, drawn = torch.get_rng_state(), random.getstate()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, LABELS), batch_size=64, shuffle=True)
    report = climb(healthy, loader, rungs={"one": "fp32", "two": "fp32"}, steps=9)
    one, two = ([step.loss for step in rung.steps] for rung in report.rungs)
    assert one == two
    assert torch.equal(kept, torch.get_rng_state())
    assert random.getstate() == drawn


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"steps": 3}, "at least 8 steps"), ({"rungs": {}}, "0 rungs"), ({"data": iter(())}, "0 batches")],
)
def test_refusals(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        ladder(healthy, **{"data": batch, "loss": F.cross_entropy, "tell": str, **changes})


def test_what_raises_in_the_reference_raises():
    def broken(out, labels):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        climb(healthy, loss=broken)


@pytest.mark.parametrize("make_model", [None, lambda: None])
def test_what_makes_no_model_is_refused(make_model):
    with pytest.raises(TypeError, match=r"expected (a|one)"):
        climb(make_model)


def test_every_rung_gets_the_batches_of_an_iterator():
    report = climb(healthy, (batch(step) for step in range(40)), rungs={"one": "fp32", "two": "fp32"}, steps=9)
    assert [len(rung.steps) for rung in report.rungs] == [9, 9]
    listed = climb(healthy, [batch(step) for step in range(4)], rungs={"one": "fp32"}, steps=9)
    assert [step.loss for step in listed.rungs[0].steps] == [step.loss for step in report.rungs[0].steps]


@pytest.mark.parametrize("owner", ["loader", "sampler", "both"])
def test_every_rung_gets_the_batches_of_a_loader_in_its_own_order(owner):
    own = torch.Generator().manual_seed(3)
    data = TensorDataset(IMAGES, LABELS)
    sampler = RandomSampler(data, generator=own) if owner != "loader" else None
    loader = DataLoader(
        data, 64, sampler=sampler, shuffle=sampler is None, generator=own if owner != "sampler" else None
    )
    seen = []

    def loss(output, labels):
        seen.append(labels.tolist())
        return F.cross_entropy(output, labels)

    before = own.get_state()
    climb(healthy, loader, loss=loss, steps=8, rungs={"a": "O0", "b": "O0"})
    assert len(seen) == 16
    assert seen[:8] == seen[8:]
    assert torch.equal(own.get_state(), before)


def test_weights_that_are_cached_are_those_of_the_loop():
    """The ids of modules name them, and a copy of a rung may get that of another module."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32)), nn.Linear(32, 4))
    with nn.utils.parametrize.cached():
        climb(model, steps=8)
        assert not nn.utils.parametrize._cache
        assert model(IMAGES).dtype is torch.float32


def test_the_report_is_read_as_a_page_a_text_and_a_line():
    report = climb(Overflows)
    assert max(map(len, report.text().splitlines())) <= 100
    assert repr(report).startswith("<LadderReport: Recommended: bf16. It holds")
    read = outline(report._repr_html_())
    assert read.words.startswith("Recommended: bf16. It holds")
    assert [each.get("class") for each in read.named("tr")] == [None, None, None, None, None, "chosen", None]
    assert read.words.count("✗") == sum(rung.failure is not None for rung in report.rungs) == 4
    assert read.words.count("✓ holds") == 2


def test_progress_does_not_look_like_a_failure_in_a_notebook(monkeypatch, capsys):
    rungs = {"fp32": "fp32"}
    ladder(healthy, batch, loss=F.cross_entropy, steps=8, rungs=rungs)
    assert capsys.readouterr() == ("", "rung 1 of 1: fp32, 8 steps\n")
    cell = type("OutStream", (StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stdout", cell)
    ladder(healthy, batch, loss=F.cross_entropy, steps=8, rungs=rungs)
    assert (cell.getvalue(), capsys.readouterr().err) == ("rung 1 of 1: fp32, 8 steps\n", "")


TWO = {"O1": "O1", "fp32": "fp32"}


def scored(*scores):
    """An `evaluate` that gives one score after the other."""
    left = iter(scores)
    return lambda model: next(left)


def test_a_score_that_is_nan_does_not_win():
    report = climb(healthy, evaluate=scored(math.nan, 0.5), rungs=TWO)
    assert report.rungs[0].failure == "score nan is not finite"
    assert report.recommended.name == "fp32"
    assert "evaluate returned NaN for O1, so these do not hold: check evaluate first." in str(report)


@pytest.mark.parametrize("score", [math.inf, -math.inf])
def test_nor_does_one_that_is_infinite(score):
    assert climb(healthy, evaluate=scored(score, 0.5), rungs=TWO).recommended.name == "fp32"


def test_a_reference_without_a_score_lets_the_losses_decide():
    report = climb(healthy, evaluate=scored(0.5, math.nan), rungs=TWO)
    assert [rung.failure for rung in report.rungs] == [None, "score nan is not finite"]
    assert "evaluate returned NaN for fp32" in str(report)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"steps": "8"}, ValueError, "steps='8':"),
        ({"steps": 8.5}, ValueError, "steps=8.5:"),
        ({"steps": -1}, ValueError, "steps=-1:"),
        ({"seed": None}, TypeError, "seed=None:"),
        ({"seed": 2**70}, ValueError, "expected a whole number of 64 bits"),
        ({"tolerance": "5 %"}, TypeError, "tolerance='5 %':"),
        ({"tolerance": -1}, ValueError, "tolerance=-1:"),
        ({"tolerance": math.nan}, ValueError, "tolerance=nan:"),
        ({"rungs": ["O1"]}, TypeError, "rungs=list:"),
        ({"rungs": {1: "O1"}}, TypeError, "rungs: the name 1 is int"),
        ({"rungs": {"a": "O4", "b": "fp32"}}, ValueError, "'O4'"),
        ({"rungs": {"a": None, "b": "fp32"}}, TypeError, "rungs['a']=None:"),
        ({"evaluate": 3}, TypeError, "evaluate=int:"),
        ({"evaluate": lambda: 3}, TypeError, "evaluate is called with 1 argument"),
        ({"evaluate": lambda model: None}, TypeError, "evaluate returned NoneType"),
        ({"evaluate": lambda model: torch.ones(2)}, TypeError, "evaluate returned Tensor"),
        ({"tell": True}, TypeError, "tell=bool:"),
        ({"data": None}, TypeError, "data=NoneType:"),
        ({"data": "batch"}, TypeError, "data=str:"),
        ({"data": lambda: 0}, TypeError, "data is called with 1 argument"),
        ({"optimizer": "sgd"}, TypeError, "optimizer=str:"),
        ({"optimizer": lambda: 0}, TypeError, "optimizer is called with the parameters"),
        ({"optimizer": lambda weights: None}, TypeError, "optimizer returned NoneType"),
    ],
)
def test_odd_arguments(changes, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)):
        ladder(healthy, **{"data": batch, "loss": F.cross_entropy, "tell": str, "steps": 8, "rungs": TWO, **changes})


def test_a_class_that_needs_arguments_makes_no_model():
    with pytest.raises(
        TypeError, match=r"^make_model is called with no argument, and Linear\(in_features, .* is missing"
    ):
        climb(nn.Linear)


def test_the_same_model_for_every_rung_is_refused():
    model = healthy()
    with pytest.raises(ValueError, match="same model twice"):
        ladder(lambda: model, batch, loss=F.cross_entropy, tell=str, steps=8)


class Remembers(nn.Module):
    """Adds to its output what it gave the step before, kept in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(16, 4), 0.0

    def forward(self, x):
        out = self.linear(x) + self.last
        self.last = 0.5 * out.detach()
        return out


def test_a_state_in_plain_attributes_begins_anew_with_each_rung():
    report = climb(Remembers, rungs={"one": "fp32", "two": "fp32"})
    one, two = ([step.loss for step in rung.steps] for rung in report.rungs)
    assert one == two


@contextmanager
def session():
    model = healthy()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    try:
        yield
    finally:
        amp.reset()


@pytest.mark.parametrize(
    "around",
    [
        session,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: amplab.autocast("cpu", dtype=torch.float16),
    ],
)
def test_what_casts_around_it_does_not_cast_in_it(around):
    def losses():
        report = climb(healthy, steps=8, evaluate=lambda model: model(IMAGES).square().sum().item())
        return [([step.loss for step in rung.steps], rung.score) for rung in report.rungs]

    alone = losses()
    with around():
        assert losses() == alone
