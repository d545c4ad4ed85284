"""Who learns what: parameters without an optimizer, optimizers without the model's parameters, halves and masters."""

import pytest
import torch
from torch import nn

from amplab import amp
from amplab.amp import Session
from amplab.diagnose.parameter_rules import model_parameters, parameter_findings
from amplab.diagnose.values import observe_step


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
    assert (finding.name, finding.severity) == ("optimizer-of-other-parameters", "error")


def test_an_optimizer_of_something_else_is_none_of_ours():
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
