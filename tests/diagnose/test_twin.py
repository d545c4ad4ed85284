"""Twins: equal where they compute the same, apart where a fault was planted, measured as float64 measures."""

import copy
import math
import random
import re
import threading

import numpy as np
import pytest
import torch
from html_outline import outline
from torch import nn
from torch.nn import functional as F

from amplab.diagnose.ladder import ladder
from amplab.diagnose.twin import twin
from amplab.diagnose.twin_report import TwinRow, twin_error
from amplab.policies import PrecisionPolicy


@pytest.fixture
def task():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, 4)
    )
    return model, (torch.randn(64, 16), torch.randint(0, 4, (64,)))


@pytest.mark.parametrize("right", ["O0", "fp32", PrecisionPolicy(table=None)])
def test_the_same_precision_gives_the_same_bits(task, right):
    report = twin(*task, "O0", right, loss=F.cross_entropy, steps=3)
    assert {row.error.relative for row in report.rows()} == {0.0}
    assert report.parted is None
    assert [step.left.loss for step in report.steps] == [step.right.loss for step in report.steps]


@pytest.mark.parametrize(("right", "epsilon"), [("O1", 2**-11), ("O2", 2**-11), ("O3", 2**-11), ("bf16", 2**-8)])
def test_errors_are_as_large_as_the_format_rounds(task, right, epsilon):
    settings = {"opt_level": "O3", "loss_scale": 128.0} if right == "O3" else right
    report = twin(*task, "O0", settings, loss=F.cross_entropy, steps=3)
    first = [row.error.relative for row in report.steps[0].rows if row.what == "output"]
    assert report.parted is None
    assert 0.1 * epsilon < max(first) < 10 * epsilon


def test_a_model_is_restored(task):
    model, batch = task
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    twin(model, batch, loss=F.cross_entropy, steps=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not model[0]._forward_hooks


class Overflows(nn.Module):
    """A layer whose output leaves half once the weights before it have grown: 8 x 300 x 300 > 65504."""

    def forward(self, x):
        return (x * 300).square() / 9e4


def test_they_part_where_half_overflows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Overflows(), nn.Linear(4, 2))
    report = twin(model, (torch.full((8, 4), 3.0), torch.zeros(8, dtype=torch.long)), loss=F.cross_entropy, steps=2)
    assert (report.parted.step, report.parted.module, report.parted.what) == (0, "1", "output")
    assert math.isinf(report.parted.error.relative)
    assert "They part at step 0, output of 1 (float16): not finite." in report.text()
    assert "O2 skipped 2 of 2 steps" in report.text()


def test_they_part_where_gradients_vanish():
    """The gradients of a loss of 2^-20 are below half without a scale, and are not with one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 8)
    lost = twin(
        model, x, "O0", {"opt_level": "O2", "loss_scale": 1.0}, loss=lambda out: out.square().mean() * 2**-20, steps=1
    )
    kept = twin(
        model,
        x,
        "O0",
        {"opt_level": "O2", "loss_scale": 2.0**18},
        loss=lambda out: out.square().mean() * 2**-20,
        steps=1,
    )
    assert "grad" in lost.parted.what
    assert kept.parted is None


def test_a_bias_before_a_norm_has_a_gradient_of_rounding_alone(task):
    report = twin(*task, loss=F.cross_entropy, steps=1)
    assert {row.module for row in report.rows() if row.cancels} == {"0.bias"}
    assert "0 except for rounding" in report.text()


def test_a_module_called_twice_has_two_rows():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x).relu())

    rows = twin(Twice(), torch.ones(2, 4), steps=1).rows()
    assert [row.module for row in rows if row.what == "output"] == ["layer", "layer #2", ""]


def test_batches_by_step_and_outputs_of_other_kinds():
    seen = []

    class Dict(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(3, 5)

        def forward(self, x):
            out, (h, _) = self.layer(x)
            return {"out": out, "h": h, "loss": out.float().sum()}

    report = twin(Dict(), lambda step: seen.append(step) or torch.full((4, 2, 3), float(step)), "O0", "O1", steps=3)
    assert seen == [0, 1, 2]
    assert report.parted is None
    assert "[2]" in report.text()
    assert "<table>" in report._repr_html_()


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"steps": 0}, ValueError, "expected a whole number > 0"),
        ({"right": "O4"}, ValueError, "right='O4':"),
        ({"right": 3}, TypeError, "right=3: expected"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)}, TypeError, "makes an optimizer"),
    ],
)
def test_refusals(task, changes, error, sentence):
    with pytest.raises(error, match=sentence):
        twin(*task, loss=F.cross_entropy, **changes)


def test_measures_against_numpy():
    torch.manual_seed(0)
    a = torch.randn(300)
    b = a.half().float()
    error = twin_error(a, b)
    x, y = a.double().numpy(), b.double().numpy()
    assert error.relative == pytest.approx(((x - y) ** 2).sum() ** 0.5 / (x**2).sum() ** 0.5, rel=1e-12)
    assert error.cosine == pytest.approx((x * y).sum() / ((x**2).sum() * (y**2).sum()) ** 0.5, rel=1e-12)
    assert 0 < error.ulps <= 0.5
    assert twin_error(torch.zeros(3), torch.zeros(3)).relative == 0
    assert math.isinf(twin_error(torch.ones(2), torch.tensor([1.0, math.nan])).relative)
    assert twin_error(torch.tensor([1.0]), torch.tensor([1 + 2**-10])).ulps == 1.0
    assert twin_error(torch.tensor([2.0**-24]), torch.tensor([2.0**-23])).ulps == 1.0


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_model_that_is_none_is_refused():
    with pytest.raises(TypeError, match="expected a torch"):
        twin(None, torch.ones(1))
    with pytest.raises(ValueError, match="is compiled"):
        twin(torch.compile(nn.Linear(1, 1), backend="eager"), torch.ones(1, 1))
    with pytest.raises(ValueError, match="is scripted"):
        twin(torch.jit.script(nn.Linear(1, 1)), torch.ones(1, 1))


def test_the_report_is_read_as_a_page_a_text_and_a_line(task):
    report = twin(*task, "O0", "O1", loss=F.cross_entropy, steps=2)
    assert repr(report) == "<TwinReport: O1 against O0: they agree>"
    assert max(map(len, report.text().splitlines())) <= 100
    read = outline(report._repr_html_())
    tensors = {(row.module, row.what) for row in report.rows()}
    cancels = {(row.module, row.what) for row in report.steps[0].rows if row.cancels}
    assert read.counts["svg"] == len(tensors) - len(cancels)
    assert len(read.named("th", "rowgroup")) == 3
    assert read.words.startswith("They agree: no relative error is above 10 %")


def test_where_they_part_stands_out(task):
    report = twin(*task, "O0", "bf16", loss=F.cross_entropy, steps=2, tolerance=1e-4)
    read = outline(report._repr_html_())
    assert [each["class"] for each in read.named("tr") if each.get("class") == "chosen"] == ["chosen"]
    assert repr(report) == f"<TwinReport: bf16 against O0: they part at {report.parted}>"


def test_gradients_have_the_dtype_they_came_in(task):
    report = twin(*task, "O0", "O2", loss=F.cross_entropy, steps=1)
    dtypes = {row.module: row.dtype for row in report.rows() if row.what == "output grad"}
    assert dtypes["4"] == "float16"
    assert "float64" not in dtypes.values()


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"steps": -1}, ValueError, "steps=-1:"),
        ({"steps": "2"}, ValueError, "steps='2':"),
        ({"seed": "a"}, TypeError, "seed='a':"),
        ({"seed": 1.5}, TypeError, "seed=1.5:"),
        ({"tolerance": None}, TypeError, "tolerance=None:"),
        ({"tolerance": math.nan}, ValueError, "tolerance=nan:"),
        ({"step": lambda: 0}, TypeError, "step is called as step(model, batch)"),
        ({"left": 1}, TypeError, "left=1:"),
        ({"right": "o1"}, ValueError, "'o1'"),
        ({"right": None}, TypeError, "right=None:"),
        ({"batch": lambda: 0}, TypeError, "amplab.twin(model, batch, step=lambda model, batch"),
        ({"model": nn.Sequential(nn.Linear(4, 1)).requires_grad_(False)}, ValueError, "nothing to train"),
        ({"optimizer": lambda weights: 3}, TypeError, "optimizer returned int"),
        (
            {"optimizer": lambda _: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)},
            ValueError,
            "other parameters than it was given",
        ),
    ],
)
def test_odd_arguments(changes, error, sentence):
    given = {"model": nn.Linear(4, 1), "batch": torch.ones(2, 4), "steps": 1, **changes}
    with pytest.raises(error, match=re.escape(sentence)):
        twin(given.pop("model"), given.pop("batch"), **given)


class Holds(nn.Linear):
    """Keeps something that cannot be copied."""

    def __init__(self, what):
        super().__init__(4, 1)
        self.what = what


@pytest.mark.parametrize("what", [threading.Lock(), nn.Linear(1, 1)(torch.ones(1))])
def test_a_model_that_cannot_be_copied_is_refused(what):
    with pytest.raises(ValueError, match=r"^model=Holds cannot be copied .*detach"):
        twin(Holds(what), torch.ones(2, 4), steps=1)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "tool",
    [
        lambda model: twin(model, torch.ones(2, 4), loss=torch.sum),
        lambda model: ladder(model, torch.ones(2, 4), loss=torch.sum, steps=8, tell=lambda _: None),
    ],
    ids=["twin", "ladder"],
)
def test_a_model_that_keeps_its_normed_weight_is_refused_with_what_to_use(tool):
    """The older weight_norm keeps the weight of the last forward, which has a graph; the newer one keeps none."""
    older, newer = nn.utils.weight_norm(nn.Linear(4, 1)), nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
    for model in (older, newer):
        model(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"model=Linear cannot be copied .*use torch\.nn\.utils\.parametrizations"):
        tool(older)
    tool(newer)


def test_what_casts_around_it_does_not_cast_in_it():
    """Else "O0" would run in bfloat16, and be no reference."""
    model, batch = nn.Linear(4, 1), torch.rand(2, 4)
    alone = twin(model, batch, steps=2).rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert twin(model, batch, steps=2).rows() == alone


def test_sparse_gradients_are_held_against_each_other():
    report = twin(nn.Embedding(8, 4, sparse=True), torch.tensor([1, 5, 5]), "O0", "O0", steps=2)
    rows = [row for row in report.rows() if row.what == "weight grad"]
    assert [(row.module, row.error.relative) for row in rows] == [("weight", 0.0)] * 2


def test_gradients_are_named_by_parameter_in_every_order():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    loss = lambda out: out.square().mean()  # noqa: E731
    backwards = lambda weights: torch.optim.SGD([*reversed(list(weights))][:3], lr=0.1)  # noqa: E731
    report = twin(model, torch.ones(2, 4), "O0", "O2", steps=1, loss=loss, optimizer=backwards)
    rows = {row.module for row in report.rows() if row.what == "weight grad"}
    assert rows == {"1.bias", "1.weight", "0.bias"}


class Counts(nn.Module):
    """Counts its calls in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


def test_a_state_in_plain_attributes_is_each_sides_own():
    model = Counts()
    report = twin(model, torch.ones(2, 4), "O0", "O0", steps=3)
    assert model.calls == 0
    assert all(row.error.relative == 0 for row in report.rows())


DRAWS = {
    "numpy": lambda: np.random.randn(),  # noqa: PLW0108  a copied method copies its generator
    "python": random.random,
    "torch": lambda: torch.randn(()).item(),
}


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(5, 5), draw

    def forward(self, x):
        return self.layer(x * float(self.draw()))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_both_sides_draw_the_same_numbers(draw):
    model = Drawing(draw)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    report = twin(model, (torch.ones(4, 5), torch.ones(4, 5)), "O0", "O0", loss=F.mse_loss, steps=2)
    assert {row.error.relative for row in report.rows()} == {0.0}
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_a_large_error_is_never_said_to_be_no_ulps():
    """A sparse tensor of which few elements are wrong, and numbers that float16 rounds to 0."""
    sparse = torch.zeros(100)
    sparse[:3] = 1.0
    row = TwinRow(0, "body", "output", "float16", twin_error(sparse, torch.zeros(100)))
    assert "relative error 100 %, 1e+03 ulps of half" in str(row)
    tiny = torch.full((100,), 1e-9)
    row = TwinRow(0, "body", "output grad", "float16", twin_error(tiny, tiny.half()))
    assert "relative error 100 %, too small for float16" in str(row)


@pytest.mark.parametrize("way", ["loss", "step", "detached"])
def test_a_loss_that_does_not_reach_the_copy_is_refused(way):
    """Such a step is skipped at every loss scale."""
    model, batch = nn.Linear(4, 2), (torch.ones(3, 4), torch.ones(3, 2))
    head = nn.Linear(2, 2)

    def of_the_original(*_):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    given = {
        "loss": {"loss": of_the_original},
        "step": {"step": of_the_original},
        "detached": {"loss": lambda output, target: nn.functional.mse_loss(head(output.detach().float()), target)},
    }
    with pytest.raises(ValueError, match="depends on no parameter of the model: each side trains a copy"):
        twin(model, batch, **given[way])
