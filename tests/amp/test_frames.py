"""What a function that trains has in its variables is freed when it ends: amplab keeps no frame of a caller."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.policies import PrecisionPolicy, apply_policy

X = torch.ones(4, 4)


class Batch:
    """Stands for what a function keeps in a variable."""


def train(kind, *, ends_by=None):
    """Make two steps in a function of its own, which may end by an exception in the third; return what it had."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = amplab.GradScaler("cpu", init_scale=8.0) if kind == "scaler" else None
    if kind == "policy":
        apply_policy(PrecisionPolicy(module_rules={"1": "float32"}), model)
    if kind.startswith("O"):
        amp.initialize(model, optimizer, opt_level=kind, verbosity=0)
    kept = []

    def steps():
        batch = Batch()
        kept.append(weakref.ref(batch))
        for number in range(3):
            if ends_by and number == 2:
                model[0].register_forward_hook(lambda *_: (_ for _ in ()).throw(ends_by))
            with amplab.autocast("cpu") if kind in ("region", "scaler") else nullcontext():
                loss = model(X).float().sum()
            if kind.startswith("O"):
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()

    with pytest.raises(ends_by) if ends_by else nullcontext():
        steps()
    return kept[0], (model, optimizer, scaler)


@pytest.mark.parametrize("ends_by", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["O0", "O1", "O2", "O3", "policy", "region", "scaler"])
def test_the_variables_of_a_function_that_trains_are_freed_when_it_ends(kind, ends_by):
    batch, _used_further = train(kind, ends_by=ends_by)
    try:
        X @ X  # after an interrupt, the next op or call of amplab ends what was open
        amplab.is_autocast_enabled("cpu")
        gc.collect()
        assert batch() is None
    finally:
        amp.reset()
