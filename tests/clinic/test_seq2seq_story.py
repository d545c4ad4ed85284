"""The published story, rebuilt: under O1 the log says only "Gradient overflow", the score falls; now it is explained.

O0                 learns
O1                 every step is skipped, the scale falls below 2^-10, the score is that of guessing
O1, the finding    names the eps that is 0 in half, and its module
O1, mended         by the remedy as it is printed: as good as O0
"""

import warnings

import pytest
import torch

import amplab
from amplab import amp
from amplab.lessons.lesson_15 import Attention, Translator, batches, loss_of, score

STEPS = 120


def fresh(seed):
    torch.manual_seed(seed)
    model = Translator(Attention(32))
    return model, torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-7)


def trained(model, optimizer):
    """Train what `amp.initialize` has prepared, watched; return the watch, and loss and score on other batches."""
    with (
        warnings.catch_warnings(),
        amplab.watch(model, optimizer, scaler=amp, step=lambda batch: loss_of(model, batch)) as w,
    ):
        warnings.simplefilter("ignore")  # the collapse is told at every step
        for batch in w.batches(batches(STEPS)):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, batch), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    with torch.no_grad():
        held = batches(6, seed=1)
        loss = sum(loss_of(model, batch).item() for batch in held) / len(held)
    reached = score(model)
    amp.reset()
    return w, loss, reached


@pytest.mark.parametrize("seed", [0, 1])
def test_the_story(seed, capsys):
    model, optimizer = fresh(seed)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    healthy, loss_in_float32, score_in_float32 = trained(model, optimizer)
    assert list(healthy.findings()) == []

    model, optimizer = fresh(seed)
    amp.initialize(model, optimizer, opt_level="O1", on_collapse="warn")
    collapsed, _, score = trained(model, optimizer)
    assert collapsed.history.last.next_loss_scale < 2.0**-10
    assert score < 0.5 * score_in_float32
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to" in capsys.readouterr().out
    first = collapsed.findings()[0]
    assert (first.name, first.severity, first.module) == ("constant-underflows-half", "error", "attention")
    assert first.evidence["constant"] == 1e-8

    model, optimizer = fresh(seed)
    line, _, remedy = first.remedy.partition("# or the whole module:\n")
    assert "memory.abs().amax(-1, keepdim=True).float() + self.eps)" in line
    exec(remedy, {"amplab": amplab, "amp": amp, "model": model, "optimizer": optimizer})
    mended, loss, score = trained(model, optimizer)
    assert mended.history.skip_count <= 3
    assert loss == pytest.approx(loss_in_float32, rel=0.03)
    assert score == pytest.approx(score_in_float32, abs=0.02)
