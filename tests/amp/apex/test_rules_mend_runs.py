"""A float32 rule for what exceeds float16 mends the run: no step is skipped, and the loss is that of float32."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.policies import PrecisionPolicy, apply_policy


class Block(nn.Module):
    """A feed-forward block whose outputs exceed 65504, as those of trained transformers do."""

    def __init__(self, norm):
        super().__init__()
        self.wi, self.wo = nn.Linear(16, 64), nn.Linear(64, 16)
        with torch.no_grad():
            self.wo.weight.mul_(2.0**18)
        self.norm = nn.LayerNorm(16) if norm == "layer_norm" else nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(x + self.wo(F.relu(self.wi(x))))


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Linear(16, 16), Block(norm), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


def trained(problem, session, norm, level, policy=None):
    """The last losses and the number of skipped steps."""
    model = Net(norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session.initialize(model, optimizer, opt_level=level, verbosity=0, policy=policy, on_collapse="warn")
    skipped = []
    session.subscribe(lambda record: skipped.append(record.found_inf))
    losses = problem.train(session, model, optimizer, range(48))
    session.reset()
    return torch.tensor(losses[-16:]).mean().item(), sum(skipped)


RULES = {
    "module": {"module_rules": {"block.wo": "float32"}},
    "block": {"module_rules": {"block": "float32"}},
    "op": {"op_rules": {"linear": "float32"}},
}


@pytest.mark.filterwarnings("ignore:.*20 steps in a row")
@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_float32_rule_fixes_a_run_that_overflows(problem, session, level, norm):
    expected, _ = trained(problem, session, norm, "O0")
    assert trained(problem, session, norm, level)[1] > 40
    for name, rules in RULES.items():
        loss, skipped = trained(problem, session, norm, level, PrecisionPolicy(**rules))
        assert skipped == 0, name
        assert loss == pytest.approx(expected, rel=0.03), name


@pytest.mark.filterwarnings("ignore:.*20 steps in a row")
@pytest.mark.parametrize("rules", [RULES["module"], RULES["op"]], ids=str)
def test_on_request_the_old_cast_is_back_and_overflows(problem, session, rules):
    policy = PrecisionPolicy(**rules, cast_outputs_back=True)
    assert trained(problem, session, "layer_norm", "O2", policy)[1] > 40


def in_a_region(problem, policy):
    """The last losses of a run under amplab.autocast, with `policy` applied to the model."""
    model = Net("layer_norm")
    optimizer, scaler, losses = torch.optim.Adam(model.parameters(), lr=0.01), amplab.GradScaler("cpu"), []
    with apply_policy(policy, model):
        for step in range(48):
            optimizer.zero_grad()
            with amplab.autocast("cpu", torch.float16):
                loss = problem.loss(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return torch.tensor(losses[-16:]).mean().item()


@pytest.mark.filterwarnings("ignore:The loss scale has collapsed")
def test_a_float32_rule_fixes_a_run_in_a_region(problem, session):
    expected, _ = trained(problem, session, "layer_norm", "O0")
    assert not in_a_region(problem, PrecisionPolicy()) < 1
    assert in_a_region(problem, PrecisionPolicy(**RULES["module"])) == pytest.approx(expected, rel=0.03)
