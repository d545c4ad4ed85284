"""What scale_loss takes and refuses; what it does is in test_gradients, test_hooked_optimizer and test_skip_matrix."""

import pytest
import torch
from torch import nn


def test_refusals_of_scale_loss(session):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, num_losses=2, verbosity=0)
    loss = model.weight.sum()
    with pytest.raises(RuntimeError, match=r"^This Adam was not part of amp.initialize: expected one of the 1 "):
        session.scale_loss(loss, torch.optim.Adam(model.parameters())).__enter__()
    with pytest.raises(IndexError, match=r"^loss_id=2: there are 2 loss scalers, numbered from 0; pass num_losses"):
        session.scale_loss(loss, optimizer, loss_id=2).__enter__()
    for loss_id in ("a", True, 0.0):
        with pytest.raises(TypeError, match=rf"^loss_id={loss_id!r}: expected a whole number"):
            session.scale_loss(loss, optimizer, loss_id=loss_id).__enter__()
    with pytest.raises(TypeError, match=r"^scale_loss got a loss of type float: expected the tensor"):
        session.scale_loss(1.0, optimizer).__enter__()
    with pytest.raises(TypeError, match=r"^scale_loss got optimizers=None: expected the optimizer, or a list of the"):
        session.scale_loss(loss, None).__enter__()
    with pytest.raises(RuntimeError, match=r"^This int was not part of amp.initialize"):
        session.scale_loss(loss, 3).__enter__()


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_at_static_scale_1_an_uninitialized_optimizer_is_left_alone(session, level):
    """Scripts perturb inputs with an optimizer that amp never saw; nothing has to be unscaled for it."""
    model = nn.Linear(1, 1)
    session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    inputs = torch.ones(1, 1, requires_grad=True)
    own = torch.optim.SGD([inputs], lr=1.0)
    with session.scale_loss(model(inputs).sum(), own) as scaled_loss:
        scaled_loss.backward()
    assert torch.equal(inputs.grad, model.weight.detach().float())
    with pytest.raises(TypeError, match=r"^scale_loss got optimizers=None"):
        session.scale_loss(model(inputs).sum(), None).__enter__()
    session.initialize(model, opt_level="O0", loss_scale=2.0, verbosity=0)
    with pytest.raises(RuntimeError, match=r"^This SGD was not part of amp.initialize"):
        session.scale_loss(model(inputs).sum(), own).__enter__()


def test_before_initialize_the_message_is_that_of_apex(session):
    with pytest.raises(RuntimeError) as refusal:
        session.scale_loss(torch.ones(()), []).__enter__()
    assert str(refusal.value) == (
        "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  model, optimizer = "
        "amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
    )


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_loss_that_backward_cannot_run_from_says_so(session, level):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    output = model(torch.ones(3, 2))

    def backward(loss, run=lambda scaled_loss: scaled_loss.backward()):
        with session.scale_loss(loss, optimizer) as scaled_loss:
            run(scaled_loss)

    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=f"^scale_loss got a loss of {dtype}: expected a floating-point tensor"):
            backward(output.sum().detach().to(dtype))
    with pytest.raises(
        RuntimeError, match=r"^scale_loss got a loss of shape \(3, 2\): expected one .* scaled_loss.mean\("
    ):
        backward(output)
    with pytest.raises(
        RuntimeError, match=r"^scale_loss got a loss that requires no gradient: expected one computed f"
    ):
        backward(output.sum().detach())
    backward(output.sum().detach(), run=lambda _: None)  # nobody asked for a gradient
    with pytest.raises(RuntimeError, match=r"^of the user's own$"):
        backward(output.sum().detach(), run=lambda _: _fail())
    backward(output, run=lambda scaled_loss: scaled_loss.mean().backward())
    assert model.weight.grad is not None or next(session.master_params(optimizer)).grad is not None


def _fail():
    raise RuntimeError("of the user's own")
