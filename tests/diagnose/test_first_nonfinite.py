"""The first harmful inf or NaN is found in every face, and the cause is told apart: scale, format, model, data."""

import contextlib
import linecache
import math

import pytest
import torch
from html_outline import outline
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amplab
from amplab.amp import Session
from amplab.diagnose.first_nonfinite import first_nonfinite
from amplab.diagnose.reruns import probe
from amplab.diagnose.rules.nonfinite import finding_of
from amplab.trace.reached_values import reached_from


class Scores(nn.Module):
    """softmax(q q^T) q, whose logits leave half where q is large; and a mask of -inf that harms nobody."""

    def __init__(self, size=16):
        super().__init__()
        self.query = nn.Linear(size, size)
        self.head = nn.Linear(size, 4)

    def forward(self, x):
        q = self.query(x)
        scores = (q @ q.t()).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        return self.head(torch.softmax(scores, -1) @ q)


@contextlib.contextmanager
def under(face, model, x, y):
    """loss_fn and amp for a model under one of the faces."""

    def plain():
        return F.cross_entropy(model(x).float(), y)

    if face in ("O1", "O2", "O3"):
        session = Session()
        session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=face, verbosity=0)
        try:
            yield plain, session
        finally:
            session.reset()
        return
    region = {"amplab": amplab.autocast, "torch": torch.autocast}[face]

    def loss_fn():
        with region("cpu", dtype=torch.float16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    yield loss_fn, torch.amp.GradScaler("cpu") if face == "torch" else amplab.GradScaler("cpu")


def source_at(line):
    """The line of this file that a finding names as `folder/file.py:12`."""
    file, number = line.rsplit(":", 1)
    assert __file__.endswith(file)
    return linecache.getline(__file__, int(number))


FACES = ["O1", "O2", "O3", "amplab", "torch"]


def batch(size=16, rows=8, scale=1.0):
    torch.manual_seed(1)
    return torch.randn(rows, size) * scale, torch.randint(0, 4, (rows,))


def scores(size=16):
    torch.manual_seed(0)
    return Scores(size)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("size", [16, 48])
def test_overflow_in_forward_is_the_format(face, size):
    model, (x, y) = scores(size), batch(size, scale=1000.0)
    kept = [value.clone() for value in model.state_dict().values()]
    with under(face, model, x, y) as (loss_fn, amp):
        found = first_nonfinite(model, step=loss_fn, scaler=amp)
        assert (found.cause, found.record.op, found.record.module, found.phase) == (
            "format",
            "matmul",
            "Scores",
            "forward",
        )
        assert (found.result, found.in_bfloat16, found.output.infs > 0) == ("loss", True, True)
        assert finding_of(found).name == "logits-overflow-half"
        assert source_at(finding_of(found).line).strip().startswith("scores = (q @ q.t())")
    if face not in ("O2", "O3"):
        assert all(torch.equal(now, then) for now, then in zip(model.state_dict().values(), kept, strict=True))


@pytest.mark.parametrize("face", FACES)
def test_nothing_is_found_where_nothing_is_wrong(face):
    model, (x, y) = scores(), batch()
    with under(face, model, x, y) as (loss_fn, amp):
        assert first_nonfinite(model, step=loss_fn, scaler=amp, loss_scale=64.0) is None


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("exponent", [20, 30])
def test_the_scale_is_told_and_the_largest_that_fits(face, exponent):
    model, (x, y) = scores(), batch()
    with under(face, model, x, y) as (loss_fn, amp):
        found = first_nonfinite(model, step=loss_fn, scaler=amp, loss_scale=2.0**exponent)
        casting = amp.casting if isinstance(amp, Session) else contextlib.nullcontext
        tried = [2.0**k for k in range(exponent)]
        oracle = max(s for s in tried if probe(model, loss_fn, casting=casting(), loss_scale=s).is_finite)
    assert (found.cause, found.phase) == ("scale", "backward")
    assert found.fitting_scale == oracle
    assert finding_of(found).severity == ("error" if face == "O3" else "note")  # whose scale is static


def at_the_cast(out):
    return out.half().float()


def behind_the_cast(out):
    return (out.half() * 64).float()  # whose gradient, 64 times that of the cast, leaves half first


def in_a_product(out):
    return (out * 1e-20) * 1e20  # no cast at all: the gradient leaves float32


@pytest.mark.parametrize("through", [at_the_cast, behind_the_cast, in_a_product])
@pytest.mark.parametrize("exponent", [14, 20, 40, 90])
def test_the_scale_that_fits_is_found_from_wherever_the_overflow_began(through, exponent):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)), batch()

    def loss_fn():
        return F.cross_entropy(through(model(x)), y)

    found = first_nonfinite(model, step=loss_fn, loss_scale=2.0**exponent)
    fits = [2.0**k for k in range(exponent + 1) if probe(model, loss_fn, loss_scale=2.0**k).is_finite]
    if found is None:
        assert fits[-1] == 2.0**exponent
    else:
        assert (found.cause, found.fitting_scale) == ("scale", fits[-1])


def with_penalty(loss, out, x):
    """A double backward: the first one writes values that do not grow with the scale."""
    (slope,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    return loss + (slope.norm(dim=1) - 1).square().mean()


def with_cubes(loss, out, x):
    """Backward computes 3 out ** 2, which does not grow with the scale."""
    return loss + (out * 16).half().pow(3).float().mean() * 1e-4


@pytest.mark.parametrize("term", [with_penalty, with_cubes])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("region", [amplab.autocast, torch.autocast])
def test_the_scale_that_fits_is_found_past_values_that_do_not_grow_with_it(term, depth, region):
    torch.manual_seed(0)
    hidden = [each for _ in range(depth) for each in (nn.Linear(16, 16), nn.Tanh())]
    model, (x, y) = nn.Sequential(*hidden, nn.Linear(16, 4)), batch()

    def loss_fn():
        given = x.clone().requires_grad_()
        with region("cpu", torch.float16):
            out = model(given)
            return term(F.cross_entropy(out, y), out, given)

    found = first_nonfinite(model, step=loss_fn, loss_scale=2.0**24)
    assert (found.cause, found.fitting_scale) == ("scale", largest_finite(model, loss_fn, 24))


@pytest.mark.parametrize("scale", [100_000.0, 2.0**20 * 1.001, 3e8])
def test_the_largest_power_of_two_may_be_more_than_half_of_the_scale(scale):
    model, fits = nn.Linear(1, 1), 2.0 ** math.floor(math.log2(scale))
    x = torch.full((1, 1), 65504 / fits)

    def loss_fn():
        return (model(x).half().float() * x).sum()

    found = first_nonfinite(model, step=loss_fn, loss_scale=scale)
    assert (found.cause, found.fitting_scale) == ("scale", fits)


def largest_finite(model, loss_fn, exponent):
    """The largest power of two below 2 ** exponent at which every gradient is finite, of all of them."""
    fits = []
    for scale in (2.0**k for k in range(exponent)):
        grads = torch.autograd.grad(loss_fn() * scale, list(model.parameters()), allow_unused=True)
        fits += [scale] if all(grad.isfinite().all() for grad in grads if grad is not None) else []
    return max(fits)


def test_a_static_scale_that_overflows_is_an_error():
    model, (x, y) = scores(), batch()
    session = Session()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O2", loss_scale=2.0**26, verbosity=0)
    found = finding_of(first_nonfinite(model, step=lambda: F.cross_entropy(model(x), y), scaler=session))
    assert (found.name, found.severity) == ("scale-too-large", "error")
    session.reset()


def test_the_apex_session_of_the_thread_is_found():
    model, (x, y) = scores(), batch(scale=1000.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amplab.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    try:
        found = first_nonfinite(model, step=lambda: F.cross_entropy(model(x), y))
        assert (found.cause, found.setting.loss_scale, found.setting.api_style) == ("format", 65536.0, "apex")
    finally:
        amplab.amp.reset()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_data_is_named_first(bad):
    model, (x, y) = scores(), batch()
    x[3, 2] = bad
    found = first_nonfinite(model, step=lambda: F.cross_entropy(model(x), y), batch={"x": x, "y": y})
    assert (found.cause, found.tensor, found.record) == ("batch", "batch['x']", None)
    assert finding_of(found).name == "nonfinite-batch"
    assert found.output.infs + found.output.nans == 1


def test_a_parameter_that_is_lost_already_is_named():
    model, (x, y) = scores(), batch()
    with torch.no_grad():
        model.head.weight[0, 0] = math.inf
    found = first_nonfinite(model, step=lambda: F.cross_entropy(model(x), y))
    assert (found.cause, found.tensor) == ("parameter", "head.weight")
    assert finding_of(found).module == "head"


def test_a_buffer_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean[0] = math.nan
    found = first_nonfinite(model, step=lambda: model(torch.ones(2, 4)).sum())
    assert (found.cause, found.tensor) == ("buffer", "1.running_mean")


def test_a_value_out_of_range_in_float32_too_is_the_models():
    model, (x, _) = nn.Linear(4, 4), batch(4)
    found = first_nonfinite(model, step=lambda: F.mse_loss(model(x * 1e30).exp(), x))
    assert (found.cause, found.record.op) == ("model", "exp")
    assert finding_of(found).name == "nonfinite-in-float32"


def test_a_row_that_is_masked_from_end_to_end_is_not_blamed_on_the_mask():
    model, (x, _) = nn.Linear(4, 4), batch(4, rows=4)
    mask = torch.eye(4).bool()
    mask[2] = True
    found = first_nonfinite(model, step=lambda: torch.softmax(model(x).masked_fill(mask, -math.inf), -1).square().sum())
    assert (found.record.op, finding_of(found).name) == ("softmax", "masked-row")


def test_a_mask_that_came_with_the_batch_is_none_either():
    model, (x, _) = nn.Linear(4, 4), batch(4, rows=4)
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    assert first_nonfinite(model, step=lambda: torch.softmax(model(x) + mask, -1).square().sum()) is None
    mask[0] = -math.inf
    found = first_nonfinite(model, step=lambda: torch.softmax(model(x) + mask, -1).square().sum())
    assert finding_of(found).name == "masked-row"


class Discards(nn.Module):
    """log(0) in three places that do no harm, and an overflow of its own where asked."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.fc(x)
        positive = hidden.detach().clamp_min(0)
        kept = torch.where(positive > 0, positive.log(), 0.0)
        with torch.no_grad():
            positive.log().mean()
        return hidden + kept + torch.zeros(4).log().exp()


def test_discarded_infinities_are_not_a_cause():
    torch.manual_seed(0)
    model, (x, _) = Discards(), batch(4)
    assert first_nonfinite(model, step=lambda: model(x).square().sum()) is None
    found = first_nonfinite(model, step=lambda: (model(x) * 3e38 * 3e38).square().sum())
    assert found.record.op == "mul"


def test_a_where_that_comes_too_late_is_found_in_backward():
    model = nn.Linear(3, 3, bias=False)
    x = torch.zeros(2, 3)
    found = first_nonfinite(model, step=lambda: torch.where(model(x) > 0, model(x).sqrt(), 0.0).sum())
    assert (found.phase, found.record.op, found.result) == ("backward", "sqrt", "gradient of weight")
    assert finding_of(found).name == "gradient-undefined"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_seen_through(reentrant):
    model, (x, y) = scores(), batch(scale=1000.0)
    session = Session()
    session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    x.requires_grad_()

    def loss():
        return F.cross_entropy(checkpoint(model, x, use_reentrant=reentrant), y)

    found = first_nonfinite(model, step=loss, scaler=session)
    assert (found.record.op, found.phase, found.cause) == ("matmul", "forward", "format")
    session.reset()


def test_it_prints_where_and_how_it_went_on():
    model, (x, y) = scores(), batch(scale=1000.0)
    with under("torch", model, x, y) as (loss_fn, amp):
        printed = str(first_nonfinite(model, step=loss_fn, scaler=amp))
    assert printed.startswith("loss is not finite: the format\n  began at  matmul in Scores (forward), ")
    assert "-> softmax in Scores ->" in printed


def test_another_kind_of_scaler_is_refused():
    with pytest.raises(TypeError, match="scaler=str"):
        first_nonfinite(nn.Linear(1, 1), step=lambda: None, scaler="O1")


def test_a_weight_too_large_for_half_is_named():
    model, (x, y) = scores(), batch()
    with torch.no_grad():
        model.head.weight[0, 0] = 1e5
    with under("amplab", model, x, y) as (loss_fn, amp):
        found = finding_of(first_nonfinite(model, step=loss_fn, scaler=amp))
    assert (found.op, found.module, found.tensor) == ("cast", "head", "head.weight")


def test_a_mean_over_no_elements_is_not_an_overflow():
    model = nn.Linear(4, 4)
    none = torch.zeros(2).bool()
    found = finding_of(first_nonfinite(model, step=lambda: model(torch.ones(2, 4))[none].mean()))  # noqa: PLW0108
    assert (found.op, "not defined" in found.cause) == ("mean", True)


def test_nan_is_followed_to_nan_and_not_to_an_infinity_beside_it():
    """The where takes nothing of the -inf that was there earlier, and all of the NaN."""
    model = nn.Linear(4, 4)

    def loss():
        hidden = model(torch.ones(2, 4))
        infinite = (hidden * 0).log()
        undefined = (hidden * 0).div(hidden * 0)
        return torch.where(torch.zeros(2, 4).bool(), infinite, undefined).sum()

    assert first_nonfinite(model, step=loss).record.op == "div"


def test_what_was_there_before_a_write_in_place_is_seen():
    model = nn.Linear(4, 4)

    def loss():
        hidden = model(torch.ones(2, 4)).mul(3e38).mul(3e38)
        hidden[0] = 0
        return hidden.sum()

    assert (found := first_nonfinite(model, step=loss)).record.op == "mul"
    assert "setitem" not in [record.op for record in found.chain]


def test_complex_numbers_are_followed_too():
    model = nn.Linear(4, 4)

    def loss():
        spectrum = torch.fft.rfft(model(torch.ones(2, 4)).mul(3e38).mul(3e38))
        return torch.fft.irfft(spectrum * torch.exp(1j * torch.ones(3))).sum()

    found = first_nonfinite(model, step=loss)
    assert (found.record.op, found.cause) == ("mul", "model")
    assert any("fft" in record.aten for record in found.chain)


def test_sparse_gradients_are_followed_too():
    model = nn.Embedding(10, 4, sparse=True)

    def loss():
        chosen = model(torch.tensor([1, 2, 1]))
        return torch.where(chosen > 9, chosen.sub(chosen.detach()).sqrt(), chosen).sum()

    found = first_nonfinite(model, step=loss)
    assert (found.result, found.record.op, found.phase) == ("gradient of weight", "sqrt", "backward")


def test_the_page_leads_from_the_first_op_to_the_result():
    model, (x, y) = scores(), batch(scale=1000.0)
    with under("torch", model, x, y) as (loss_fn, amp):
        found = first_nonfinite(model, step=loss_fn, scaler=amp)
    read = outline(found._repr_html_())
    assert read.words.startswith("loss is not finite because of the format: it is finite in float32")
    assert [each.get("class") for each in read.named("li")][3:5] == ["origin", None]  # after three figures
    assert str(found.record.line) in read.words
    assert found.record.line.source in read.text
    assert read.words.endswith("loss is not finite")
    assert repr(found) == "<FirstNonfinite: loss is not finite: the format, at matmul in Scores>"
    assert max(map(len, str(found).splitlines())) <= 100


def test_a_batch_that_came_in_broken_is_where_the_page_begins():
    model, (x, y) = scores(), batch()
    x[0, 0] = math.nan
    found = first_nonfinite(model, step=lambda: F.cross_entropy(model(x), y), batch={"<x>": x})
    read = outline(found._repr_html_())
    assert found.record is None
    assert found.tensor in read.text
    assert "b" not in read.counts


def test_a_hook_of_the_model_may_ask_where_a_nan_came_from():
    """As a guard that is called by each forward, also those of the tool, which would never end."""
    model, asked = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), []
    batch = torch.randn(3, 4)
    batch[0, 0] = float("nan")

    def guard(module, inputs, output):
        if not torch.isfinite(output).all():
            asked.append(first_nonfinite(model, batch))

    for each in model:
        each.register_forward_hook(guard)
    model(batch)
    answers = [each for each in asked if each is not None]
    assert len(answers) == 3
    assert all("began at  batch" in str(each) for each in answers)
    assert len(asked) < 60


@pytest.mark.parametrize("tool", [amplab.xray, amplab.gradient_range, amplab.twin])
def test_another_tool_refuses_a_call_in_its_own_step(tool):
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda *_: tool(model, torch.ones(1, 4)))
    with pytest.raises(RuntimeError, match=rf"amplab\.{tool.__name__} is called in a step that it runs itself"):
        tool(model, torch.ones(1, 4))


def test_a_hook_may_ask_about_a_part_of_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    asked = []
    model.register_forward_hook(lambda *_: asked.append(amplab.xray(model[0], torch.ones(1, 4))) and None)
    amplab.xray(model, torch.ones(1, 4))
    assert asked


def test_a_step_that_leads_to_many_objects_is_not_searched_for_long():
    rows = [[number] for number in range(300_000)]
    model = nn.Linear(4, 2)

    def loss(output):
        return output.sum() + 0.0 * len(rows)

    seen = sum(1 for _ in reached_from(loss))
    assert seen < 5_000
    assert first_nonfinite(model, torch.ones(1, 4), loss=loss) is None


def test_names_of_modules_have_no_control_characters_in_what_is_printed():
    model = nn.Sequential()
    model.add_module("a\x1b[2J", nn.Linear(4, 1))
    found = first_nonfinite(model, torch.full((2, 4), 1e30), loss=lambda out: out.square().sum())
    assert found is not None
    for printed in (str(found), repr(found)):
        assert "\x1b" not in printed
        assert "a" in printed
