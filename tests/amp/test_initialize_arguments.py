"""What initialize refuses, and what it warns of."""

import pytest
import torch
from torch import nn

from amplab.amp import Session


def wrapped():
    return nn.DataParallel(nn.Linear(1, 1))


def half_buffer():
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.ones(1).half())
    return model


class FP16_Optimizer:
    """Known by its name: there are copies of it in many a script."""


REFUSALS = [
    (lambda s: s.initialize((nn.Linear(1, 1),)), TypeError, "models must be either a single model or a list of"),
    (lambda s: s.initialize("net"), TypeError, "models must be either a single model or a list of"),
    (lambda s: s.initialize([nn.Linear(1, 1), 3]), TypeError, "Found an object of type int; pass torch.nn.Module."),
    (lambda s: s.initialize(nn.Linear(1, 1), ()), TypeError, "optimizers must be either a single optimizer or a list"),
    (lambda s: s.initialize(nn.Linear(1, 1), [1]), TypeError, "Found an object of type int; pass torch.optim."),
    (lambda s: s.initialize(wrapped()), RuntimeError, "Parallel wrappers should only be applied to the model(s) AFTER"),
    (lambda s: s.initialize(nn.Linear(1, 1).half()), RuntimeError, "Found param weight with type torch.HalfTensor"),
    (lambda s: s.initialize(half_buffer()), RuntimeError, "Found buffer mask with type torch.HalfTensor"),
    (lambda s: s.initialize(nn.Linear(1, 1), num_losses=0), ValueError, "num_losses=0: expected a whole number >= 1"),
    (lambda s: s.initialize(nn.Linear(1, 1), num_losses=1.5), ValueError, "num_losses=1.5: expected a whole number"),
    (lambda s: s.initialize(nn.Linear(1, 1), min_loss_scale=-1), ValueError, "min_loss_scale=-1: expected a finite"),
    (lambda s: s.initialize(nn.Linear(1, 1), min_loss_scale=8, max_loss_scale=4), ValueError, "min_loss_scale=8 is"),
    (lambda s: s.initialize(nn.Linear(1, 1), scale_growth_factor=0.5), ValueError, "scale_growth_factor=0.5: expected"),
    (lambda s: s.initialize(nn.Linear(1, 1), scale_backoff_factor=2), ValueError, "scale_backoff_factor=2: expected"),
    (lambda s: s.initialize(nn.Linear(1, 1), scale_window=0), ValueError, "scale_window=0: expected a whole number"),
    (lambda s: s.initialize(nn.Linear(1, 1), dynamic_init_scale=0), ValueError, "dynamic_init_scale=0: expected"),
    *(
        (lambda s, name=name: s.initialize(nn.Linear(1, 1), **{name: 8}), NotImplementedError, f"{name}: amp.init")
        for name in ("combine_grad", "combine_ddp", "ddp_replica_count", "check_combined_tensors")
    ),
    (lambda s: s.initialize(nn.Linear(1, 1), FP16_Optimizer()), RuntimeError, "An incoming optimizer is an instance"),
    (lambda s: s.initialize(nn.Linear(1, 1), [FP16_Optimizer()]), RuntimeError, "must be bare instances of either"),
    (lambda s: s.initialize(nn.Linear(1, 1), min_loss_scale="x"), TypeError, "min_loss_scale='x': expected a number"),
    (lambda s: s.initialize(nn.Linear(1, 1), verbosity="loud"), TypeError, "verbosity='loud': expected 0 (nothing)"),
    (lambda s: s.initialize(nn.Linear(1, 1), cast_model_outputs="half"), TypeError, "cast_model_outputs='half': exp"),
    (lambda s: s.initialize(nn.Linear(1, 1), cast_model_outputs=torch.int8), TypeError, "expected a floating torch."),
    (lambda s: s.initialize(nn.Linear(1, 1), loss_scale=True), ValueError, 'loss_scale=True: expected "dynamic" or a'),
    (lambda s: s.initialize(nn.Linear(1, 1), opt_level="O9"), RuntimeError, "Unexpected optimization level O9."),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=[message[:40] for _, _, message in REFUSALS])
def test_refusals_of_initialize(session, call, error, message):
    with pytest.raises(error) as refusal:
        call(session)
    assert message in str(refusal.value)
    assert len(refusal.value.args) == 1


def test_cudnn_switched_off_is_refused(session):
    with (
        torch.backends.cudnn.flags(enabled=False),
        pytest.raises(RuntimeError, match=r"^Amp requires torch.backends.cudnn.enabled = True$"),
    ):
        session.initialize(nn.Linear(1, 1))


def test_adam_on_half_parameters_is_warned_of(session):
    model = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match=r"^Adam on half parameters: eps=1e-08 is 0 in torch.float16"):
        session.initialize(model, torch.optim.Adam(model.parameters()), opt_level="O3", verbosity=0)
    session.reset()
    session.initialize(model, torch.optim.Adam(model.parameters(), eps=1e-4), opt_level="O3", verbosity=0)


def test_what_asks_for_nothing_of_ascend_is_taken(session):
    options = {"combine_grad": None, "combine_ddp": False, "ddp_replica_count": 4, "check_combined_tensors": None}
    session.initialize(nn.Linear(1, 1), verbosity=0, user_cast_preferred=True, **options)


@pytest.mark.parametrize("name", ["enabled", "master_weights", "allow_banned"])
def test_a_flag_is_a_boolean_or_its_word(name):
    model = torch.nn.Linear(2, 2)
    for wrong in ("no", 3, "false"):
        with pytest.raises(TypeError, match=f"{name}={wrong!r}: expected True or False"):
            Session().initialize(model, opt_level="O3", verbosity=0, **{name: wrong})
    assert model.weight.dtype is torch.float32
    session = Session()
    session.initialize(model, opt_level="O3", verbosity=0, enabled="False", master_weights="False")
    assert model.weight.dtype is torch.float32


def test_scale_loss_wants_an_optimizer():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session()
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for nothing in (None, [], ()):
        refused = pytest.raises(TypeError, match="scale_loss got optimizers=")
        with refused, session.scale_loss(model(torch.ones(1, 2)).sum(), nothing):
            pass
