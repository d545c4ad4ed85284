"""A loop whose step calls a module of `torch.jit.script` or `torch.jit.trace`: a skipped step runs again."""

import pytest
import torch
from torch import nn

import amplab
from amplab.lab import watch

BAD = 3
KINDS = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.randn(4, 4)),
    "frozen": lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


def trained(kind, watched):
    """Train behind a scripted module whose BatchNorm follows the data; return what it and the model have, the watch."""
    torch.manual_seed(0)
    before = KINDS[kind](nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amplab.GradScaler("cpu", init_scale=1024.0)

    def loss_of(batch):
        x, factor = batch
        return (model(before(x)).square().mean() * factor).sqrt()

    batches = [(torch.randn(8, 4), torch.tensor(float("inf") if number == BAD else 1.0)) for number in range(6)]
    w = watch(model, optimizer, scaler=scaler, step=loss_of)

    def train(batches, note):
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(note(loss_of(batch))).backward()
            scaler.step(optimizer)
            scaler.update()

    if watched:
        with w:
            train(w.batches(batches), w.loss)
    else:
        train(batches, lambda loss: loss)
    kept = [*model.parameters(), *before.parameters(), *before.buffers()]
    return [each.detach().clone() for each in kept], w


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_runs_again_and_leaves_a_scripted_module_as_it_was(kind):
    expected, _ = trained(kind, watched=False)
    values, w = trained(kind, watched=True)
    assert len(values) == len(expected)
    assert all(map(torch.equal, values, expected))
    assert w.failures == ()
    assert [record.step for record in w.history.skips()] == [BAD]
    names = [each.name for each in w.findings()]
    assert "step-not-explained" not in names
    assert names


@pytest.mark.filterwarnings("ignore:amplab.watch:RuntimeWarning")
def test_a_scripted_part_of_a_model_is_named_as_what_keeps_a_step_from_running_again():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.BatchNorm1d(4)), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amplab.GradScaler("cpu", init_scale=1024.0)

    def loss_of(x):
        return model(x).square().mean() * x.max()

    batches = [torch.randn(8, 4) if number != BAD else torch.full((8, 4), float("inf")) for number in range(6)]
    with watch(model, optimizer, scaler=scaler, step=loss_of) as w:
        for x in w.batches(batches):
            optimizer.zero_grad()
            scaler.scale(w.loss(loss_of(x))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert BAD in [record.step for record in w.history.skips()]
    (failure,) = w.failures
    assert f"step {BAD} could not run again: ValueError: 1 is scripted" in failure
    assert "step-not-explained" in [each.name for each in w.findings()]
