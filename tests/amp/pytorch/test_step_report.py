"""What a step is reported to have done, and that nothing is read before it is asked for."""

import torch
from torch import nn

from amplab.amp.pytorch.step_report import STEPPED, StepReport

INF, NAN = float("inf"), float("nan")


def groups_of(*grads, names=None):
    params = [nn.Parameter(torch.zeros(2)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else torch.tensor(grad)
    group = {"params": params} | ({"param_names": names} if names else {})
    return [group], params


def test_the_last_of_several_in_the_order_of_the_groups():
    groups, params = groups_of([1.0, NAN], None, [INF, 1.0], [1.0, 1.0], names=["a", "b", "c", "d"])
    report = StepReport(groups, params, None, torch.tensor(8.0))
    for param in params:
        param.grad = None
    outcome = report.outcome()
    assert (outcome.stepped, outcome.first_nonfinite) == (False, "c")
    assert outcome.reason == "gradient overflow at loss scale 8.0, first in the gradient of c"
    assert report.outcome() is outcome


def test_the_scale_is_that_of_the_step():
    groups, params = groups_of([INF, 1.0])
    scale = torch.tensor(8.0)
    report = StepReport(groups, params, None, scale)
    scale.fill_(4.0)
    assert "at loss scale 8.0" in report.outcome().reason


def test_a_verdict_on_the_device():
    groups, params = groups_of([INF, 1.0])
    assert StepReport(groups, params, torch.tensor(0.0), torch.tensor(8.0)).outcome() is STEPPED
    first = StepReport(groups, params, torch.tensor(1.0), torch.tensor(8.0)).outcome()
    assert first.first_nonfinite == "param_groups[0]['params'][0]"
    for change in (params[0].grad.zero_, lambda: setattr(params[0], "grad", torch.ones(2))):
        report = StepReport(groups, params, torch.tensor(1.0), torch.tensor(8.0))
        change()
        assert report.outcome().first_nonfinite is None


def test_without_gradients_there_is_no_first_one():
    groups, params = groups_of(None, None)
    assert StepReport(groups, params, None, torch.tensor(8.0)).outcome().first_nonfinite is None


def test_sparse_empty_and_half_gradients():
    params = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(1).half())]
    values = torch.tensor([[1.0, INF]])
    params[0].grad = torch.sparse_coo_tensor(torch.tensor([[1]]), values, (3, 2), check_invariants=True).coalesce()
    params[1].grad, params[2].grad = torch.zeros(0), torch.full((1,), 65504.0).half()
    report = StepReport([{"params": params}], params, None, torch.tensor(8.0))
    assert report.outcome().first_nonfinite == "param_groups[0]['params'][0]"
