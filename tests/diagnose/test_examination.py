"""The doctor applies every rule, puts causes before symptoms, leaves the model unchanged, and checks its arguments."""

import math
from pathlib import Path

import pytest
import torch
from html_outline import outline
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.diagnose import Finding, Findings, MachineReport, Observation, StepObservation, doctor
from amplab.diagnose.ranking import ranked


def test_without_a_model_it_looks_at_the_machine():
    assert isinstance(amplab.doctor(), MachineReport)
    with pytest.raises(TypeError, match=r"^doctor got step, but no model"):
        doctor(step=lambda: None)


def healthy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 8))
    return model, torch.randn(64, 16), torch.randint(0, 8, (64,))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_healthy_model_has_nothing_above_a_note(level):
    model, x, y = healthy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amplab.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    try:
        found = doctor(model, step=lambda: F.cross_entropy(model(x).float(), y), optimizer=optimizer, batch=(x, y))
        assert isinstance(found, Findings)
        assert not found.harmful, str(found)
    finally:
        amplab.amp.reset()


def test_a_softmax_of_o1_gives_nothing():
    model, x, _ = healthy()
    with amplab.autocast("cpu", dtype=torch.float16):
        found = doctor(model, step=lambda: torch.log(torch.softmax(model(x), -1) + 1e-12).square().mean())
    assert not [each for each in found if each.op in ("softmax", "log", "add")], str(found)


def test_a_mask_that_half_cannot_hold_is_found_from_the_error():
    model, x, _ = healthy()
    found = doctor(model.half(), step=lambda: model(x.half()).masked_fill(torch.ones(8).bool(), -1e9).softmax(-1).sum())
    assert (found[0].name, found[0].severity) == ("constant-overflows-half", "error")


def test_a_refused_bce_is_found_from_the_error():
    model, x, _ = healthy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amplab.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    try:
        found = doctor(model, step=lambda: F.binary_cross_entropy(model(x).sigmoid(), torch.ones(64, 8)))
        assert found[0].name == "bce-after-sigmoid"
    finally:
        amplab.amp.reset()


def test_what_else_a_step_raises_is_told_as_it_is():
    model, *_ = healthy()
    found = doctor(model, step=lambda: model(torch.ones(3, 5)).sum())
    assert (found[0].name, len(found)) == ("step-raised", 1)
    assert "mat1 and mat2" in found[0].symptom
    assert found[0].remedy.startswith("step()")


def test_a_train_step_that_raises_is_named():
    model, *_ = healthy()
    found = doctor(model, train_step=lambda: model(torch.ones(3, 5)).sum())
    assert (found[0].name, found[0].remedy.partition("  #")[0]) == ("step-raised", "train_step()")


def test_causes_precede_the_symptoms_they_explain():
    model, x, y = healthy()
    x[0, 0] = math.nan
    skips = (StepObservation(n, math.nan, 2.0 ** (16 - n), True, 2.0 ** (15 - n)) for n in range(20))
    found = doctor(model, step=lambda: F.cross_entropy(model(x), y), batch=(x, y), run=Observation(tuple(skips)))
    assert found[0].name == "nonfinite-batch"
    assert not found.named("scale-collapse")
    alone = doctor(model, step=lambda: F.cross_entropy(model(x.nan_to_num()), y), run=Observation(tuple(
        StepObservation(n, math.nan, 2.0 ** (16 - n), True, 2.0 ** (15 - n)) for n in range(20))))  # fmt: skip
    assert alone[0].name == "scale-collapse"


def test_odd_shapes_are_a_note():
    torch.manual_seed(0)
    model = nn.Linear(63, 127)
    with amplab.autocast("cpu", dtype=torch.float16):
        found = doctor(model, step=lambda: model(torch.ones(64, 63)).float().sum())
    (odd,) = found.named("shapes-not-multiple-of-8")
    assert (odd.severity, odd.evidence["sides"], odd.evidence["share"]) == ("note", "64 x 63 x 127", 1.0)
    even = nn.Linear(64, 128)
    with amplab.autocast("cpu", dtype=torch.float16):
        assert not doctor(even, step=lambda: even(torch.ones(64, 64)).float().sum()).named("shapes-not-multiple-of-8")


def test_a_convolution_counts_by_its_channels():
    """Where it is most of the work, an odd head beside it does not matter."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 3))
    odd = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 8))
    for network, x, found in ((model, torch.ones(8, 8, 8, 8), 0), (odd, torch.ones(8, 3, 8, 8), 1)):
        with amplab.autocast("cpu", dtype=torch.float16):
            seen = doctor(network, step=lambda network=network, x=x: network(x).float().sum())
        assert len(seen.named("shapes-not-multiple-of-8")) == found


def test_in_float32_there_are_no_speed_findings():
    model = nn.Linear(63, 127)
    assert not doctor(model, step=lambda: model(torch.ones(64, 63)).sum())


@pytest.mark.parametrize("rate", [1e3, 1e4])
def test_a_rate_that_loses_the_loss_in_one_step_is_named_before_what_overflows(rate):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = (x.sum(1) > 0).long()
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    amplab.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    run = Observation()
    try:
        for number in range(8):
            optimizer.zero_grad()
            loss, scale = F.cross_entropy(model(x), y), amplab.amp.default_session().loss_scale()
            with amplab.amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            lost = not math.isfinite(loss.item())
            run = run.then(StepObservation(number, loss.item(), scale, lost, learning_rate=rate))
        found = doctor(model, step=lambda: F.cross_entropy(model(x), y), optimizer=optimizer, batch=(x, y), run=run)
    finally:
        amplab.amp.reset()
    assert found[0].name == "diverging", str(found)
    assert [each.certainty for each in found if "overflow" in each.name] == ["possible"]


class Masked(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.ones(8).bool(), -1e9).softmax(-1)


def test_an_error_is_reported_with_its_op_its_module_and_its_line():
    model = nn.Sequential(nn.Linear(16, 8), Masked()).half()
    found = doctor(model, step=lambda: model(torch.ones(4, 16).half()).sum())[0]
    assert (found.name, found.op, found.module) == ("constant-overflows-half", "masked_fill", "1")
    file, number = found.line.rsplit(":", 1)
    assert __file__.endswith(file)
    assert "x.masked_fill" in Path(__file__).read_text().splitlines()[int(number) - 1]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("inside", [True, False])
def test_clipping_inside_of_scale_loss_is_found_with_the_threads_session(level, inside):
    model, x, y = healthy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amplab.amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1024.0)

    def train_step():
        optimizer.zero_grad()
        with amplab.amp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as scaled:
            scaled.backward()
            if inside:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if not inside:
            nn.utils.clip_grad_norm_(amplab.amp.master_params(optimizer), 0.01)
        optimizer.step()

    try:
        found = doctor(model, train_step=train_step, optimizer=optimizer)
        assert bool(found.named("clips-scaled-gradients")) == inside, str(found)
    finally:
        amplab.amp.reset()


@pytest.mark.parametrize(
    ("in_float32", "first"), [(820.0, "logits-overflow-half"), (7e20, "diverging"), ("nan", "diverging")]
)
def test_a_loss_that_float32_has_not_lost_has_not_diverged(in_float32, first):
    """Losses of 2e4 and 3e3, and then none that is finite: the rate, or the format."""
    lost = Finding("diverging", "error", "a", "b", "c", "likely", evidence={"first_loss": 2e4})
    overflows = Finding(
        "logits-overflow-half", "error", "d", "e", "f", evidence={"loss_in_float32": in_float32, "not_finite": "loss"}
    )
    found = ranked([lost, overflows])
    assert (found[0].name, [each.certainty for each in found[1:]]) == (
        first,
        ["possible"] if first == "diverging" else [],
    )


def patient():
    model = nn.Linear(4, 2)
    return model, lambda: model(torch.ones(3, 4)).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "a"}, "model=str: expected a torch.nn.Module"),
        ({"model": []}, "no model in the list: expected a torch.nn.Module"),
        ({"step": 3}, "step=int: expected a function"),
        ({"step": torch.ones(2)}, "step=Tensor: expected a function"),
        ({"step": list}, "step=list is a class: expected a function"),
        ({"train_step": list}, "train_step=list is a class: expected a function"),
        ({"train_step": 3}, "train_step=int: expected a function"),
        ({"optimizer": 3}, "optimizer=int: expected a torch.optim.Optimizer"),
        ({"optimizer": [3]}, "optimizer=list of int: expected"),
        ({"run": 3}, "run=int: expected an amplab.watch"),
        ({"stateful": [3]}, "stateful=list of int: expected a list"),
        ({"stateful": 3}, "stateful=int: expected a list"),
        ({"loss_scale": "a"}, "loss_scale='a': expected a number"),
    ],
)
def test_another_type_is_refused(given, words):
    model, loss_fn, _ = patient()
    with pytest.raises(TypeError) as refusal:
        doctor(**({"model": model, "step": loss_fn} | given))
    assert str(refusal.value).startswith(words)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_a_loss_scale_is_positive(scale):
    with pytest.raises(ValueError, match="expected a finite number > 0"):
        doctor(patient()[0], step=patient()[1], loss_scale=scale)


@pytest.mark.parametrize("error", [AssertionError("hey"), ValueError("hey"), KeyError("hey"), IndexError("hey")])
def test_what_the_users_step_raises_is_a_finding(error):
    model, loss_fn, optimizer = patient()

    def fails():
        raise error

    for found in (doctor(model, step=fails), doctor(model, step=loss_fn, train_step=fails, optimizer=optimizer)):
        assert (found[0].name, type(error).__name__ in found[0].symptom) == ("step-raised", True)


def test_a_loss_that_is_not_a_number_is_not_an_error_of_the_step():
    model, *_ = patient()
    with pytest.raises(ValueError, match="reduce it"):
        doctor(model, step=lambda: model(torch.ones(3, 4)))


@pytest.mark.parametrize(
    "given",
    [
        {"step": list},
        {"train_step": list},
        {"scaler": 3},
        {"batch": torch.ones(2)},
        {"loss_scale": 2.0},
        {"optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1)},
        {"stateful": [3]},
    ],
)
def test_arguments_without_a_model(given):
    (name,) = given
    with pytest.raises(TypeError, match=rf"^doctor got {name}, but no model"):
        doctor(**given)


@pytest.mark.parametrize("name", ["step", "train_step"])
def test_a_function_of_something(name):
    with pytest.raises(TypeError, match=rf"^{name} requires \(batch\)"):
        doctor(patient()[0], **{name: lambda batch: batch})


def test_a_batch_and_a_loss_are_a_step():
    """The same findings, whichever way the step is given."""
    model, step, optimizer = patient()
    with torch.no_grad():
        model.weight.fill_(torch.inf)
    x = torch.ones(3, 4)
    ways = [
        {"step": step},
        {"batch": x, "loss": lambda out: out.square().mean()},
        {"batch": (x, x[:, :2]), "loss": lambda out, _target: out.square().mean()},
        {"batch": x, "step": lambda batch: model(batch).square().mean()},
        {"batch": x, "step": lambda given, batch: given(batch).square().mean()},
    ]
    found = [doctor(model, **way, optimizer=optimizer) for way in ways]
    assert [each.name for each in found[0]] == ["nonfinite-parameter"]
    assert all([(each.name, each.tensor) for each in other] == [("nonfinite-parameter", "weight")] for other in found)


def test_a_train_step_may_take_the_batch():
    model, _, optimizer = patient()
    seen = []

    def train(batch):
        seen.append(batch)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    x = torch.ones(3, 4)
    assert not doctor(model, x, train_step=train, optimizer=optimizer)
    assert all(each is x for each in seen)


def test_a_compiled_model_has_no_ops_but_a_loop():
    """Its loop can be rehearsed, its step cannot be looked at."""
    model, _, optimizer = patient()
    model.compile(backend="eager")

    def train():
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    assert [each.name for each in doctor(model, train_step=train, optimizer=optimizer)] == []
    with pytest.raises(ValueError, match="Linear is compiled"):
        doctor(model, step=lambda: model(torch.ones(3, 4)).mean())


def test_where_nothing_is_found_it_is_said_what_was_looked_at():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    found = doctor(model, x, loss=lambda out: out.square().mean(), optimizer=optimizer)
    assert not found
    said = str(found)
    assert "2 parameters of the model and 1 optimizer" in said
    assert "ops of its backward" in said
    assert "not looked at: the loop: unscaling, clipping, optimizer steps; pass train_step=" in said
    assert "train_step=" in outline(found._repr_html_()).words


def test_a_clipping_is_named_as_the_code_calls_it():
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def train_step():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()

    (first, *_) = doctor(model, train_step=train_step, optimizer=optimizer, scaler=scaler)
    assert (first.name, first.op) == ("clips-scaled-gradients", "clip_grad_norm_")
    assert first.line.startswith("diagnose/test_examination.py:")


@pytest.mark.parametrize(
    ("shape", "spoilt", "said"),
    [
        ((8, 16), (5, 3), "first in sample 5, column 3;"),
        ((8, 4, 4), (5, 3, 2), "first in sample 5 at [3, 2];"),
        ((8,), (5,), "first in sample 5;"),
    ],
)
def test_a_batch_that_is_not_finite_names_the_sample_and_the_column(shape, spoilt, said):
    model = nn.Linear(shape[-1], 1)
    x = torch.ones(shape)
    x[spoilt] = math.nan
    x[-1] = math.inf
    found = doctor(model, x, loss=lambda out: out.square().mean())[0]
    assert found.name == "nonfinite-batch"
    assert said in found.symptom
    assert found.evidence["sample"] == 5
    assert found.evidence.get("column") == (spoilt[1] if len(spoilt) > 1 else None)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_norm_of_blank_samples_is_named_before_the_scale(level):
    """The gradient is multiplied by 1 / sqrt(eps), so the scale falls; the samples are the cause."""

    def found(x):
        torch.manual_seed(0)
        model = nn.Sequential(nn.GroupNorm(1, 4), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 1))
        return doctor(model, x, loss=lambda out: out.float().square().mean() * 100, opt_level=level)

    torch.manual_seed(1)
    x = torch.randn(8, 4, 8, 8)
    assert found(torch.ones(8, 4, 8, 8))[0].name == "norm-of-constant"
    assert not found(x).named("norm-of-constant")
    x[:3] = 0  # some blank samples are usual
    assert not found(x).named("norm-of-constant")
    assert not found(torch.full((8, 4, 8, 8), torch.nan)).named("norm-of-constant"), "torch's variance of NaN is 0"


def test_a_step_that_cannot_run_again_is_examined_once():
    torch.manual_seed(0)
    model, batches = nn.Linear(4, 1), iter([torch.randn(8, 4)])
    found = doctor(model, step=lambda: model(next(batches)).square().mean(), scaler=torch.amp.GradScaler("cpu"))
    assert not found.harmful, str(found)


def test_a_loss_scale_that_skipped_steps_have_lowered_is_no_finding_of_its_own():
    """Gradients underflow at a scale that fell because forward overflows; the constant is in the cause."""
    model, x, _ = healthy()
    scaler = amplab.GradScaler("cpu", init_scale=2.0**-10)

    def step():
        with amplab.autocast("cpu", dtype=torch.float16):
            scores = model(x) + (x[:, :8] > 0).half() * -1e9
        return (scores.softmax(-1) * model(x)).sum() * 1e-3 + scores.half().mul(2).float().sum()

    found = doctor(model, step=step, scaler=scaler)
    assert found[0].name == "constant-overflows-half"
    assert "-1e+09" in found[0].cause
    assert found[0].evidence["constant"] == -1e9
    assert not [each for each in found if each.name == "gradients-underflow"]


@pytest.mark.parametrize("level", [None, "O1"])
def test_an_overflow_is_found_without_a_loss(level):
    """The doctor then takes the sum of the output, which says nothing of a rate that is too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = amplab.doctor(model, torch.randn(8, 4) * 1e5, optimizer=optimizer, opt_level=level)
    assert bool(found) == (level == "O1")
    assert "diverging" not in [each.name for each in found]
