"""Who learns what: parameters without an optimizer, optimizers without the model's parameters, halves and masters."""

import pytest
import torch
from torch import nn

from amplab import amp
from amplab.amp import Session
from amplab.diagnose.observed_step.values import observe_step
from amplab.diagnose.rules.parameters import nonfinite_buffers, parameter_findings
from amplab.diagnose.train_step.masters import model_parameters


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def found(model, optimizers):
    x = torch.ones(2, 4, dtype=next(model.parameters()).dtype)
    step = observe_step(model, lambda: model(x).float().square().sum())
    return parameter_findings(model, optimizers, step)


@pytest.mark.parametrize("level", [None, "O1", "O2", "O3"])
def test_everything_in_its_place_is_nothing(level):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session()
    if level:
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
    try:
        assert found(model, [optimizer]) == []
        assert list(map(id, model_parameters(optimizer))) == list(map(id, model.parameters()))
    finally:
        session.reset()


@pytest.mark.parametrize("level", [None, "O2"])
def test_a_parameter_without_an_optimizer(level):
    model = network()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD([model[1].bias], lr=0.1)]
    session = Session()
    if level:
        session.initialize(model, optimizers, opt_level=level, verbosity=0)
    try:
        assert [(each.module, each.tensor) for each in found(model, optimizers)] == [
            ("1", "1.weight"),
            ("2", "2.weight"),
        ]
    finally:
        session.reset()


def test_frozen_and_unused_parameters_are_left_out_on_purpose():
    model = network()
    model[0].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    assert found(model, [torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.1)]) == []


def test_an_optimizer_of_another_model():
    model, other = network(), network()
    (finding,) = found(model, [torch.optim.SGD(other.parameters(), lr=0.1)])
    assert (finding.name, finding.severity) == ("optimizer-of-another-model", "error")


def test_an_optimizer_of_another_object_is_not_reported():
    model = network()
    temperature = nn.Parameter(torch.ones(7))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([temperature], lr=0.1)]
    assert found(model, optimizers) == []


@pytest.mark.parametrize(("eps", "harm"), [(1e-8, True), (1e-4, False)])
def test_adam_on_half(eps, harm):
    model = network().half()
    assert bool(found(model, [torch.optim.Adam(model.parameters(), eps=eps)])) == harm
    if harm:
        assert found(model, [torch.optim.AdamW(model.parameters())])[0].name == "adam-on-half"
        assert found(model.float(), [torch.optim.Adam(model.parameters())]) == []


def test_the_masters_for_adam_on_half_can_be_had_as_they_are_pasted():
    model = network().half()
    optimizer = torch.optim.Adam(model.parameters())
    (finding,) = found(model, [optimizer])
    names = {"amp": amp, "model": model, "optimizer": optimizer}
    try:
        exec(finding.remedy, names)
        assert found(names["model"], [names["optimizer"]]) == []
        assert amp.default_session().opt_level == "O2"
        assert all(each.dtype == torch.float32 for each in amp.master_params(names["optimizer"]))
    finally:
        amp.reset()


def test_masters_that_are_lost_with_their_weights_are_not_stale():
    """What a static scale lets through is NaN in both, and nothing was loaded."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=1024.0)
    try:
        with torch.no_grad():
            for half, master in zip(model.parameters(), session.master_params(optimizer), strict=True):
                half.fill_(torch.nan), master.fill_(torch.nan)
        assert found(model, [optimizer]) == []
        with torch.no_grad():
            model[1].bias.zero_()
        (finding,) = found(model, [optimizer])
        assert (finding.name, finding.tensor, finding.evidence["parameters"]) == ("stale-masters", "1.bias", 1)
    finally:
        session.reset()


def test_masters_that_the_model_has_left_behind():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    try:
        with torch.no_grad():
            model[1].bias += 1
        (finding,) = found(model, [optimizer])
        assert (finding.name, finding.tensor) == ("stale-masters", "1.bias")
        assert finding.evidence["largest_difference"] == pytest.approx(1, abs=1e-3)
    finally:
        session.reset()


def test_statistics_that_a_batch_has_spoilt():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))  # inf that is meant
    assert not list(nonfinite_buffers(model))
    bad = torch.randn(8, 4)
    bad[0, 0] = torch.inf
    model(bad)
    (finding,) = nonfinite_buffers(model)
    assert (finding.severity, finding.module, finding.tensor) == ("error", "1", "1.running_mean")
    with torch.no_grad():
        kept = model[2].bias.clone()
        model[2].bias.fill_(torch.nan)
        assert not list(nonfinite_buffers(model))  # which are then a consequence
        model[2].bias.copy_(kept)
    assert not model.eval()(torch.randn(2, 4)).isfinite().any()
    exec(finding.remedy, {"model": model})
    assert not list(nonfinite_buffers(model))
    assert model(torch.randn(2, 4)).isfinite().all()
    model.register_buffer("level", torch.tensor(torch.nan))
    (finding,) = nonfinite_buffers(model)
    exec(finding.remedy, {"model": model})
    assert finding.tensor == "level"
    assert not list(nonfinite_buffers(model))


def two_parts():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "b": nn.Linear(4, 1)})
    return model, lambda: model["b"](model["a"](torch.ones(2, 4))).square().mean()


def remedy_for(model, loss_fn, optimizers):
    (finding,) = parameter_findings(model, optimizers, observe_step(model, loss_fn))
    names = {"model": model, "torch": torch, "optimizers": optimizers, "optimizer": optimizers[0]}
    exec(finding.remedy, names)
    assert parameter_findings(model, optimizers, observe_step(model, loss_fn)) == []
    return finding


def test_parameters_go_to_the_optimizer_of_what_is_around_them():
    model, loss_fn = two_parts()
    of_a, of_b = torch.optim.SGD(model["a"][0].parameters(), lr=0.1), torch.optim.SGD(model["b"].parameters(), lr=0.2)
    finding = remedy_for(model, loss_fn, [of_b, of_a])
    assert (finding.module, finding.remedy.partition(".add")[0]) == ("a.1", "optimizers[1]")
    assert len(of_a.param_groups) == 2


def test_an_optimizer_that_holds_what_another_holds_is_built_anew():
    model, loss_fn = two_parts()
    optimizers = [torch.optim.Adam(model["b"].parameters(), lr=rate) for rate in (0.5, 0.1)]
    finding = remedy_for(model, loss_fn, optimizers)
    assert (finding.module, finding.evidence["parameters"]) == ("a", 4)
    assert optimizers[0].param_groups[0]["lr"] == 0.5
    assert "1 more" in finding.symptom


def test_a_module_without_an_optimizer_gets_one():
    model, loss_fn = two_parts()
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in model["b"].parameters()]
    remedy_for(model, loss_fn, optimizers)
    assert len(optimizers) == 3


def test_of_a_module_that_is_partly_held_the_rest_is_taken_in():
    model, loss_fn = two_parts()
    held = [each for name, each in model.named_parameters() if name != "a.0.bias"]
    finding = remedy_for(model, loss_fn, [torch.optim.SGD(held, lr=0.1)])
    assert "get_parameter('a.0.bias')" in finding.remedy


def test_a_parameter_of_the_model_itself_is_taken_in():
    model = nn.Linear(4, 2)
    for name in ("bias", "weight"):
        held = [each for own, each in model.named_parameters() if own != name]
        finding = remedy_for(model, lambda: model(torch.ones(2, 4)).square().mean(), [torch.optim.SGD(held, lr=0.1)])
        assert finding.remedy.count(f"get_parameter('{name}')") == 1


STORED_OTHERWISE = {
    "sparse": lambda values: values.to_sparse(),
    "compressed": lambda values: values.to_sparse_csr(),
    "jagged": lambda values: torch.nested.nested_tensor([*values], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
@pytest.mark.parametrize("kind", STORED_OTHERWISE)
def test_a_buffer_that_is_not_dense(kind):
    model = network()
    model.register_buffer("graph", STORED_OTHERWISE[kind](torch.eye(3)))
    assert not list(nonfinite_buffers(model))
    model.graph = STORED_OTHERWISE[kind](torch.eye(3) * torch.nan)
    (finding,) = nonfinite_buffers(model)
    assert "graph" in finding.symptom
