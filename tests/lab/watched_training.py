"""A training loop whose first steps overflow, with a watch that runs them again and without one."""

import copy

import torch

from amplab.lab import watch

__all__ = ["trained"]


class Unwatched:
    batches, loss, failures = staticmethod(iter), staticmethod(lambda loss: loss), ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def trained(make_model, make_step, scaler_type, watched):
    """Return the weights after 30 batches of the loss that `make_step(model)` computes."""
    torch.manual_seed(0)
    model = make_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), scaler_type("cpu", init_scale=2.0**24)
    loss_of = make_step(model)

    def step(x):
        with torch.autocast("cpu", torch.float16):
            return loss_of(x)

    batches = torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(1))
    with watch(model, optimizer, scaler=scaler, step=step) if watched else Unwatched() as w:
        for x in w.batches(batches):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(x))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.failures == ()
    if watched:
        assert w.history.explanations
    return copy.deepcopy(list(model.parameters()))
