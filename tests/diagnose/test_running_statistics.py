"""A bad batch leaves NaN in the running statistics of a norm; training does not read them, evaluation does."""

import math

import pytest
import torch
from torch import nn

import amplab
from amplab.diagnose.first_nonfinite import first_nonfinite
from amplab.diagnose.observed_step.values import observe_step
from amplab.diagnose.rules.nonfinite import finding_of

NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "a mean of all batches": lambda: nn.BatchNorm1d(4, momentum=None),
    "batch norm without weights": lambda: nn.BatchNorm1d(4, affine=False),
    "instance norm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "SyncBatchNorm": lambda: amplab.parallel.SyncBatchNorm(4),
}


class Net(nn.Module):
    """A convolution, its output times `factor`, a norm, and a convolution."""

    def __init__(self, norm, factor=1.0):
        super().__init__()
        self.first, self.norm, self.last, self.factor = nn.Conv1d(3, 4, 1), norm, nn.Conv1d(4, 1, 1), factor

    def forward(self, x):
        return self.last(self.norm(self.first(x) * self.factor))


def after_a_bad_batch(norm, factor=1.0):
    torch.manual_seed(0)
    model = Net(NORMS[norm](), factor)
    model(torch.full((4, 3, 5), math.nan))
    assert model.norm.running_mean.isnan().all()
    assert model.norm.running_var.isnan().all()
    return model


def batch():
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1))


def blamed(model, x, **given):
    def loss():
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return out.float().square().mean()

    found = first_nonfinite(model, step=loss, batch=x, **given)
    return found and (finding_of(found).name, found.cause, found.tensor, found.record and found.record.op)


def with_clean_statistics(model, x, **given):
    """What is blamed where the statistics are as before the bad batch: the oracle in training."""
    model.norm.reset_running_stats()
    return blamed(model, x, **given)


@pytest.mark.parametrize("norm", NORMS)
def test_in_training_the_next_bad_batch_is_named(norm):
    model, x = after_a_bad_batch(norm), batch()
    x[1, 2, 3] = math.inf
    found = blamed(model, x)
    assert found[:3] == ("nonfinite-batch", "batch", "batch")
    assert found == with_clean_statistics(model, x)


@pytest.mark.parametrize("norm", NORMS)
def test_in_training_the_op_that_overflows_is_named(norm):
    model, x = after_a_bad_batch(norm, factor=6e4), batch()
    found = blamed(model, x)
    assert found == ("overflow-in-half", "format", "", "mul")
    assert found == with_clean_statistics(model, x)


@pytest.mark.parametrize("norm", NORMS)
def test_in_training_a_loss_scale_that_is_too_large_is_named(norm):
    model, x = after_a_bad_batch(norm), batch()
    found = blamed(model, x, loss_scale=2.0**40)
    assert found[:2] == ("scale-too-large", "scale")
    assert found == with_clean_statistics(model, x, loss_scale=2.0**40)


@pytest.mark.parametrize("norm", NORMS)
def test_in_training_a_good_batch_is_good(norm):
    assert blamed(after_a_bad_batch(norm), batch()) is None


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_in_evaluation_the_statistics_are_named(norm, frozen):
    """Also where only the norm is in evaluation, as in fine-tuning with frozen statistics."""
    model = after_a_bad_batch(norm)
    (model.norm if frozen else model).eval()
    assert blamed(model, batch())[:2] == ("nonfinite-buffer", "buffer")
    assert blamed(model, batch())[2] in ("norm.running_mean", "norm.running_var")


@pytest.mark.parametrize("norm", NORMS)
def test_a_batch_that_trains_and_is_evaluated_in_one_step_is_named(norm):
    torch.manual_seed(0)
    model, x = Net(NORMS[norm]()), batch()
    x[1, 2, 3] = math.inf

    def both(x):
        trained = model.train()(x)
        return trained + model.eval()(x)

    found = first_nonfinite(model, step=lambda: both(x).square().mean(), batch=x)
    assert (found.cause, found.tensor) == ("batch", "batch")


OPS = {  # op of the dispatcher: its arguments after input, weight, bias, running_mean and running_var
    "native_batch_norm": [(True, 0.1, 1e-5), (True, 0.0, 1e-5), (True, 1.0, 1e-5), (False, 0.1, 1e-5)],
    "_native_batch_norm_legit": [(True, 0.1, 1e-5), (False, 0.1, 1e-5)],
    "_native_batch_norm_legit_no_training": [(0.1, 1e-5)],
    "_batch_norm_with_update": [(0.1, 1e-5)],
    "_batch_norm_no_update": [(0.1, 1e-5)],
}


@pytest.mark.parametrize(("name", "rest"), [(name, rest) for name, each in OPS.items() for rest in each])
def test_an_op_reads_the_statistics_if_its_result_depends_on_them(name, rest):
    """The oracle is the op itself: with statistics that are NaN its result is NaN if it reads them."""
    torch.manual_seed(0)
    model, weight, x = nn.Linear(3, 3), torch.ones(3), torch.randn(8, 3)

    def normalized():
        lost = [torch.full((3,), math.nan) for _ in range(2)]
        return getattr(torch.ops.aten, name).default(model(x), weight, weight, *lost, *rest)[0]

    step = observe_step(model, lambda: normalized().pow(3).sum())
    (grad,) = torch.autograd.grad(normalized().pow(3).sum(), model.weight)
    reads = {
        record.phase: any(value.summary.has_nan for value in step.inputs(record.index))
        for record in step.trace
        if "batch_norm" in record.aten
    }
    assert reads == {"forward": normalized().isnan().any(), "backward": grad.isnan().any()}


@torch.library.custom_op("amplab_tests::renormalize", mutates_args=())
def renormalize(x: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, training: bool) -> torch.Tensor:
    return (x - running_mean) / running_var.sqrt()


renormalize.register_autograd(lambda ctx, grad: (grad, None, None, None))


class Renormalizing(nn.BatchNorm1d):
    """Batch renormalization reads its running statistics in training too."""

    def forward(self, x):
        return renormalize(x.float(), self.running_mean[:, None], self.running_var[:, None], self.training)


def test_in_training_the_statistics_of_a_norm_that_reads_them_are_named():
    model = Net(Renormalizing(4))
    assert blamed(model, batch()) is None
    model.norm.running_var.fill_(math.nan)
    assert blamed(model, batch())[:3] == ("nonfinite-buffer", "buffer", "norm.running_var")
