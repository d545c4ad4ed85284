"""The functions of ``from apex import amp``, driving one default session.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()

At O1 the thread that calls `initialize` casts from there on to `reset`; other threads do inside the forward of
initialized models. For experiments that share nothing make a `Session` of each.
"""

import inspect
from typing import Any

from amplab.amp.session import Session

__all__ = [
    "default_session",
    "initialize",
    "last_step",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "memory",
    "reset",
    "scale_loss",
    "state_dict",
    "subscribe",
]

_DEFAULT = Session()


def default_session() -> Session:
    """Return the session behind the functions of this module."""
    return _DEFAULT


def initialize(models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Prepare models and optimizers for an optimization level, and cast from here on where the level says so.

    Arguments, results and refusals are those of `Session.initialize`. At O1 the calling thread casts until `reset`,
    or until another level is chosen.
    """
    prepared = _DEFAULT.initialize(models, optimizers, *args, **kwargs)
    _DEFAULT.install()
    return prepared


initialize.__signature__ = inspect.signature(_DEFAULT.initialize)  # type: ignore[attr-defined]

last_step = _DEFAULT.last_step
load_state_dict = _DEFAULT.load_state_dict
loss_scale = _DEFAULT.loss_scale
master_params = _DEFAULT.master_params
memory = _DEFAULT.memory
reset = _DEFAULT.reset
scale_loss = _DEFAULT.scale_loss
state_dict = _DEFAULT.state_dict
subscribe = _DEFAULT.subscribe
