"""Accumulation and failures in scale_loss, against the gradients of plain torch.

``patch_torch_functions=False`` at O1 is float32 with dynamic scaling: powers of two scale without rounding, so every
comparison with plain torch is exact.
"""

import contextlib

import pytest
import torch
from torch import nn

from amplab import amp


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def initialized(model, optimizer, **overrides):
    session = amp.Session()
    overrides = {"opt_level": "O1", "patch_torch_functions": False, "verbosity": 0, **overrides}
    session.initialize(model, optimizer, **overrides)
    return session


def assert_same(left, right):
    """Tensors, or dicts and lists of them, agree bit for bit."""
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_accumulated_gradients_are_those_of_float32(problem, delayed, set_to_none):
    model, by_hand = problem.model(), problem.model()
    optimizer, hand_optimizer = (adam(each.parameters()) for each in (model, by_hand))
    session = initialized(model, optimizer)
    for step in range(4):
        for micro in range(3):
            loss = problem.loss(model, 3 * step + micro)
            with session.scale_loss(loss, optimizer, delay_unscale=delayed and micro < 2) as scaled_loss:
                scaled_loss.backward()
            problem.loss(by_hand, 3 * step + micro).backward()
        for param, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
            assert torch.equal(param.grad, expected.grad)
        for each in (optimizer, hand_optimizer):
            each.step()
            each.zero_grad(set_to_none=set_to_none)
    assert_same(model.state_dict(), by_hand.state_dict())
    assert session.state_dict()["loss_scaler0"]["unskipped"] == (4 if delayed else 12)


def test_a_scale_that_moves_during_delayed_accumulation_is_accounted_for(problem):
    model, by_hand = problem.model(), problem.model()
    optimizer = sgd(model.parameters())
    session = initialized(model, optimizer, num_losses=2, scale_window=1)
    for step, options in enumerate([{}, {"delay_unscale": True}, {"loss_id": 1, "delay_unscale": True}, {}]):
        with session.scale_loss(problem.loss(model, step), optimizer, **options) as scaled_loss:
            scaled_loss.backward()
        problem.loss(by_hand, step).backward()
    assert (session.loss_scale(0), session.loss_scale(1)) == (2.0**18, 2.0**16)
    for param, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-6, atol=1e-7)


def test_accumulation_on_masters(problem):
    """Gradients of three backwards add up in float32 on the masters, and the model's are clear after each."""
    model = problem.model(batch_norm=False)
    optimizer = sgd(model.parameters())
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    sums = [torch.zeros_like(master) for master in session.master_params(optimizer)]
    for step in range(3):
        (problem.loss(model, step) * 2.0**16).backward()
        for total, param in zip(sums, model.parameters(), strict=True):
            total.add_(param.grad.float() / 2.0**16)
        with session.scale_loss(problem.loss(model, step), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(m.grad, total) for m, total in zip(session.master_params(optimizer), sums, strict=True))
    optimizer.step()
    assert all(master.grad is None for master in session.master_params(optimizer))


def test_delayed_accumulation_on_half_parameters(problem):
    model = problem.model(batch_norm=False)
    optimizer = sgd(model.parameters())
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    sums = [torch.zeros_like(param) for param in model.parameters()]
    for step in range(3):
        (problem.loss(model, step) * 64).backward()
        for total, param in zip(sums, model.parameters(), strict=True):
            total.add_(param.grad)
            param.grad = None
    for step in range(3):
        with session.scale_loss(problem.loss(model, step), optimizer, delay_unscale=step < 2) as scaled_loss:
            scaled_loss.backward()
    for master, total in zip(session.master_params(optimizer), sums, strict=True):
        torch.testing.assert_close(master.grad, total.float() / 64, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("delays", [(True,), (True, True), (False, True)])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_delayed_gradients_that_zero_grad_clears_are_in_no_step(problem, level, set_to_none, delays):
    """An iteration that is given up leaves nothing, although `zero_grad` reaches masters only."""
    gives_up, plain = [], []
    for trained in (gives_up, plain):
        model = problem.model(batch_norm=False)
        optimizer, session = sgd(model.parameters()), amp.Session()
        session.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            if step == 1 and trained is gives_up:
                for delay in delays:
                    with session.scale_loss(problem.loss(model, 9), optimizer, delay_unscale=delay) as scaled_loss:
                        scaled_loss.backward()
                torch.nn.utils.clip_grad_norm_(session.master_params(optimizer), 1.0)
                optimizer.zero_grad(set_to_none=set_to_none)
            for delay in (True, True, False):
                with session.scale_loss(problem.loss(model, step), optimizer, delay_unscale=delay) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
        trained += [each.detach().clone() for each in session.master_params(optimizer)]
        session.reset()
    assert_same(gives_up, plain)


@pytest.mark.parametrize("has_sum", [False, True])
def test_clipping_between_delayed_backwards_clears_nothing(problem, has_sum):
    model = problem.model(batch_norm=False)
    optimizer, session = sgd(model.parameters()), amp.Session()
    session.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    sums = [0.0] * len(list(model.parameters()))
    for step in range(3):
        (problem.loss(model, step) * 64).backward()
        sums = [total + param.grad.float() / 64 for total, param in zip(sums, model.parameters(), strict=True)]
        model.zero_grad()
    for step, delay in enumerate((not has_sum, True, False)):
        with session.scale_loss(problem.loss(model, step), optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(session.master_params(optimizer), 1e9)
        assert norm.item() > 0 or delay
    for master, total in zip(session.master_params(optimizer), sums, strict=True):
        torch.testing.assert_close(master.grad, total, rtol=2e-3, atol=1e-5)


def fail_in_the_block(session, loss, optimizer, error):
    with session.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        raise error


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_block_restores_everything(problem, level, error):
    def run(stumble):
        session, model = amp.Session(), problem.model()
        optimizer = sgd(model.parameters())
        session.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
        with session.casting():
            for step in range(3):
                if stumble:
                    model.eval()
                    with pytest.raises(error):
                        fail_in_the_block(session, problem.loss(model, step), optimizer, error)
                    model.train()
                problem.train(session, model, optimizer, [step])
        return model.state_dict(), session.state_dict()

    assert_same(run(stumble=True), run(stumble=False))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_keeps_what_was_accumulated(problem, level):
    model = problem.model()
    optimizer = sgd(model.parameters())
    session = amp.Session()
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    with session.casting(), session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = [param.grad.clone() for param in session.master_params(optimizer)]
    assert all(grad.isfinite().all() for grad in before)
    with pytest.raises(KeyError):
        fail_in_the_block(session, problem.loss(model, 1), optimizer, KeyError)
    assert_same(before, [param.grad for param in session.master_params(optimizer)])


def test_gradients_of_other_optimizers_stay_out_of_a_step(problem):
    """As in a GAN: the generator's backward leaves gradients on the half parameters of the discriminator."""
    generator, discriminator = nn.Linear(4, 16), problem.model(batch_norm=False)
    optimizers = [sgd(model.parameters()) for model in (generator, discriminator)]
    session = amp.Session()
    session.initialize([generator, discriminator], optimizers, opt_level="O2", verbosity=0, loss_scale=2.0)
    fake = generator(torch.ones(8, 4))
    with session.scale_loss(discriminator(fake).sum(), optimizers[0]) as scaled_loss:
        scaled_loss.backward()
    optimizers[0].step()
    with session.scale_loss(problem.loss(discriminator, 0), optimizers[1]) as scaled_loss:
        scaled_loss.backward()
    found = [master.grad for master in session.master_params(optimizers[1])]
    discriminator.zero_grad()
    (problem.loss(discriminator, 0) * 2).backward()
    assert all(torch.equal(g, p.grad.float() / 2) for g, p in zip(found, discriminator.parameters(), strict=True))


def test_one_optimizer_named_twice_is_unscaled_once(problem):
    model = problem.model()
    optimizer = sgd(model.parameters())
    session = initialized(model, optimizer)
    with session.scale_loss(model[0].weight.sum(), [optimizer, optimizer]) as scaled_loss:
        scaled_loss.backward()
    assert torch.equal(model[0].weight.grad, torch.ones(32, 16))


def test_sparse_gradients_are_unscaled_and_added_up():
    model = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    session = initialized(model, optimizer)
    for _ in range(2):
        with session.scale_loss(model(torch.tensor([1, 3, 3])).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    assert model.weight.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 4, 0, 0, 0, 0]
    with session.scale_loss(model.weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad[:, 0].tolist() == [1, 3, 1, 5, 1, 1, 1, 1]
    model.weight.grad = model.weight.grad.to_sparse(1)
    optimizer.step()
    assert session.last_step(optimizer).stepped


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD], ids=["SparseAdam", "SGD"])
def test_sparse_gradients_train_masters_as_float32_would(kind):
    def trained(level):
        torch.manual_seed(0)
        model = nn.Embedding(8, 2, sparse=True)
        optimizer = kind(model.parameters(), lr=0.5)
        session = amp.Session()
        session.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
        for _ in range(3):
            with session.scale_loss(model(torch.tensor([1, 3, 3])).float().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()["weight"]

    assert torch.equal(trained("O2"), trained("O0"))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of Adagrad
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_train_to_the_bits_of_a_loop_without_amp(kind, level, tables, delayed):
    """Accumulated over losses with scales of their own, the last of one row; two embeddings are summed."""

    def trained(use_amp):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Embedding(8, 2, sparse=True) for _ in range(tables))
        optimizer, session = kind(model.parameters(), lr=0.1), amp.Session()
        if use_amp:
            session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=3, verbosity=0)
            session.load_state_dict(
                {f"loss_scaler{k}": {"loss_scale": scale, "unskipped": 0} for k, scale in enumerate((8.0, 32.0, 16.0))}
            )
        for _ in range(3):
            for number, rows in enumerate((64, 64, 1)):
                index = torch.randint(8, (rows,))
                with session.casting() if use_amp else contextlib.nullcontext():
                    loss = sum(table(index) for table in model).float().square().mean()
                if not use_amp:
                    loss.backward()
                    continue
                with session.scale_loss(loss, optimizer, number, delay_unscale=delayed and number < 2) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert_same(trained(use_amp=True), trained(use_amp=False))


@pytest.mark.parametrize("combined", [False, True])
def test_reading_the_buffers_and_a_large_clip_keep_the_bits_of_sparse_gradients(combined):
    def trained(look):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 1))
        optimizer, session = torch.optim.SGD(model.parameters(), lr=0.1), amp.Session()
        session.initialize(model, optimizer, opt_level="O0", combine_grad=combined, loss_scale=8.0, verbosity=0)
        for _ in range(3):
            with session.scale_loss(model(torch.randint(8, (64,))).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            look(session, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    alone = trained(lambda session, optimizer: None)
    assert_same(trained(lambda session, optimizer: session.combined_grads(optimizer)), alone)
    assert_same(trained(lambda session, optimizer: session.clip_grad_norm_(optimizer, 1e9)), alone)
