"""Skipped steps, accumulation and failures, against float32 training in which steps are left out by hand.

``patch_torch_functions=False`` at O1 is float32 with dynamic scaling: powers of two scale without rounding, so every
comparison with plain torch is exact.
"""

import copy
import threading

import pytest
import torch
from torch.nn import functional as F

from amplab import amp

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adadelta": torch.optim.Adadelta,
}


def initialized(model, optimizer, **overrides):
    session = amp.Session()
    overrides = {"opt_level": "O1", "patch_torch_functions": False, "verbosity": 0, **overrides}
    session.initialize(model, optimizer, **overrides)
    return session


def same(left, right):
    """Whether two nests of dicts, lists and tensors agree bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_are_steps_left_out(problem, name):
    model, by_hand = problem.model(), problem.model()
    optimizer, hand_optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](by_hand.parameters())
    session = initialized(model, optimizer)
    for step in range(8):
        overflows = step in (0, 3, 4)
        with session.scale_loss(problem.loss(model, step), optimizer) as scaled_loss:
            (scaled_loss * (float("inf") if overflows else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        problem.loss(by_hand, step).backward()
        if not overflows:
            hand_optimizer.step()
        hand_optimizer.zero_grad()
        assert session.last_step(optimizer).stepped is not overflows
    assert session.loss_scale() == 2.0**13
    assert same(model.state_dict(), by_hand.state_dict())
    assert same(optimizer.state_dict(), hand_optimizer.state_dict())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_leaves_no_trace(problem, level):
    model = problem.model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    session = amp.Session()
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    problem.train(session, model, optimizer, range(3))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with torch.no_grad(), session.casting():
        model.eval()
        before = model(problem.inputs)
    with session.scale_loss(problem.loss(model, 3), optimizer) as scaled_loss:
        (scaled_loss * float("nan")).backward()
    optimizer.step()
    assert same(model.state_dict(), weights)
    assert same(optimizer.state_dict(), state)
    with torch.no_grad(), session.casting():
        assert torch.equal(model(problem.inputs), before)


def test_a_skipped_step_says_so_in_the_words_of_apex(problem, capsys):
    model = problem.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = initialized(model, optimizer, verbosity=1, num_losses=3)
    capsys.readouterr()
    for loss_id in (2, 0, 2):
        with session.scale_loss(problem.loss(model, 0), optimizer, loss_id=loss_id) as scaled_loss:
            (scaled_loss * float("inf")).backward()
    assert capsys.readouterr().out == ""
    optimizer.step()
    optimizer.step()
    printed = capsys.readouterr().out
    assert printed == "Gradient overflow.  Skipping step, loss scaler 2 reducing loss scale to 16384.0\n"


def test_a_skipped_step_is_silent_at_verbosity_0(problem, capsys):
    model = problem.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = initialized(model, optimizer)
    with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    optimizer.step()
    assert capsys.readouterr().out == ""


def test_exactly_the_optimizers_passed_in_are_skipped(problem):
    models = [problem.model(seed) for seed in range(3)]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    session = initialized(models, optimizers)
    loss = sum(problem.loss(model, 0) for model in models)
    with session.scale_loss(loss, optimizers) as scaled_loss:
        scaled_loss.backward()
    loss = problem.loss(models[0], 1) + problem.loss(models[2], 1)
    with session.scale_loss(loss, (optimizers[0], optimizers[2])) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [session.last_step(optimizer).stepped for optimizer in optimizers] == [False, True, False]


def test_a_clean_backward_does_not_take_back_the_skip(problem):
    model = problem.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = initialized(model, optimizer)
    for factor in (float("inf"), 1.0):
        with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
            (scaled_loss * factor).backward()
    optimizer.step()
    assert not session.last_step(optimizer).stepped
    assert session.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 1}}


def test_a_skip_keeps_gradients_and_schedulers_do_not_warn(problem, recwarn):
    model = problem.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    session = initialized(model, optimizer)
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    assert not model[0].weight.grad.isfinite().any()
    assert not recwarn.list


@pytest.mark.parametrize("skipping", [False, True])
def test_a_step_that_raises_is_recovered_from(problem, skipping):
    """An exception inside step runs no post-hook: the next backward ends it. Gradients that overflowed are dropped."""

    class Fragile(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("disk full")
            return super().step(closure)

    model = problem.model()
    optimizer = Fragile(model.parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with session.casting(), session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        (scaled_loss * (float("inf") if skipping else 1.0)).backward()
    grads = [param.grad for param in model.parameters()]
    with pytest.raises(RuntimeError, match="disk full"):
        optimizer.step()
    optimizer.fails = False
    with session.scale_loss(model[0].weight.sum() * 0, optimizer) as scaled_loss:
        scaled_loss.backward()
    if skipping:
        assert not any(param.grad is not None and param.grad.any() for param in model.parameters())
    else:
        assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    with session.casting():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    optimizer.step()
    assert session.last_step(optimizer).stepped


def test_a_step_that_raised_in_another_thread_stays_there(problem):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError

    model = problem.model()
    optimizer = Failing(model.parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def step():
        with pytest.raises(RuntimeError):
            optimizer.step()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    with session.casting():
        with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_within_a_step_is_one_step(problem, level, capsys):
    """torch runs the hooks again for super().step() where the base class has been used on its own."""

    class Derived(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    model = problem.model()
    optimizer = Derived(model.parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level=level)
    capsys.readouterr()
    for factor in (float("inf"), 1.0):
        before = model[0].weight.detach().clone()
        with session.casting(), session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
            (scaled_loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert session.last_step(optimizer).stepped is (factor == 1.0)
        assert torch.equal(model[0].weight, before) is (factor != 1.0)
    assert capsys.readouterr().out.count("Gradient overflow.") == 1


def test_step_runs_without_casts(problem):
    class Whitening(torch.optim.SGD):
        def step(self, closure=None):
            self.seen = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    model = problem.model()
    optimizer = Whitening(model.parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with session.casting():
        optimizer.step()
        assert optimizer.seen == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


def test_a_closure_works_if_no_step_can_be_skipped(problem):
    model, by_hand = problem.model(batch_norm=False), problem.model(batch_norm=False)
    optimizer, hand_optimizer = (torch.optim.LBFGS(each.parameters(), max_iter=3) for each in (model, by_hand))
    session = initialized(model, optimizer, loss_scale=4.0)

    def closure():
        optimizer.zero_grad()
        loss = problem.loss(model, 0)
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    def hand_closure():
        hand_optimizer.zero_grad()
        loss = problem.loss(by_hand, 0)
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), hand_optimizer.step(hand_closure))
    assert torch.equal(optimizer.step(closure=closure), hand_optimizer.step(hand_closure))
    assert same(model.state_dict(), by_hand.state_dict())


def test_unsupported_closures_are_refused(problem):
    model = problem.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = initialized(model, optimizer)

    def closure():
        with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
            (scaled_loss * float("inf")).backward()

    with pytest.raises(RuntimeError, match=r"overflowed at loss scale 65536.0 inside the closure of SGD.step\(\)"):
        optimizer.step(closure)
    assert session.loss_scale() == 2.0**15
    closure()
    with pytest.raises(RuntimeError, match=r"^Currently, Amp does not support closure use with optimizers\."):
        optimizer.step(lambda: None)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match=r"^Currently, Amp does not support closure use with optimizers\."):
        optimizer.step(closure=lambda: None)


def test_a_step_on_scaled_gradients_is_refused(problem):
    model = problem.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = initialized(model, optimizer)
    with session.scale_loss(problem.loss(model, 0), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match=r"^SGD.step\(\) with gradients still scaled by 65536.0: the last backward"):
        optimizer.step()


def test_a_backward_outside_of_scale_loss_is_noticed_at_o2(problem):
    model = problem.model(batch_norm=False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    problem.loss(model, 0).backward()
    with pytest.raises(RuntimeError, match="found gradients on half parameters that never reached their masters"):
        optimizer.step()
    model.zero_grad()
    problem.train(session, model, optimizer, [0])


def test_the_overflow_check_can_wait_for_the_next_backward(problem):
    model = problem.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = initialized(model, optimizer)
    with session.scale_loss(problem.loss(model, 0), optimizer, delay_overflow_check=True) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    assert session.loss_scale() == 2.0**16
    with session.scale_loss(problem.loss(model, 1), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert (session.loss_scale(), session.last_step(optimizer).stepped) == (2.0**15, False)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_parameters_added_later_are_trained(problem, level):
    model = problem.model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    problem.train(session, model, optimizer, [0])
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.05})
    before = model[3].weight.detach().clone()
    problem.train(session, model, optimizer, [1, 2])
    assert not torch.equal(model[3].weight, before)
    kinds = {param.dtype for param in session.master_params(optimizer)}
    assert kinds == {torch.float16 if level == "O3" else torch.float32}


def test_parameters_unfrozen_later_are_unscaled(problem):
    model = problem.model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    problem.train(session, model, optimizer, [0])
    model[0].weight.requires_grad_(True)
    with session.scale_loss(F.mse_loss(model[0].weight.float(), torch.zeros(32, 16)), optimizer) as scaled_loss:
        scaled_loss.backward()
    master = next(session.master_params(optimizer))
    torch.testing.assert_close(master.grad, 2 * master.detach() / 512, rtol=2e-3, atol=1e-6)


def test_clipping_acts_on_what_the_optimizer_steps(problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = [param.detach().clone() for param in session.master_params(optimizer)]
    torch.nn.utils.clip_grad_norm_(session.master_params(optimizer), 0.01)
    optimizer.step()
    moved = [old - new for old, new in zip(before, session.master_params(optimizer), strict=True)]
    assert torch.linalg.vector_norm(torch.cat([m.flatten() for m in moved])).item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_step_without_gradients_is_reported_as_such(problem, level, kind):
    model = problem.model()
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind](model.parameters(), lr=0.1, weight_decay=0.1)
    if level == "O3":
        optimizer.param_groups[0]["eps"] = 1e-4
    session = amp.Session()
    session.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss = problem.loss(model, 0)
    before["1.num_batches_tracked"] += 1
    before["1.running_mean"], before["1.running_var"] = (
        model.state_dict()[f"1.running_{each}"] for each in ("mean", "var")
    )
    versions = [param._version for param in model.parameters()]
    with session.scale_loss(loss, optimizer):
        pass
    optimizer.step()
    assert same(model.state_dict(), before)
    assert versions == [param._version for param in model.parameters()]  # written, they would end the graph of `loss`
    assert session.last_step(optimizer) == amp.StepOutcome(
        False, "no parameter had a gradient: no backward has reached one since gradients were cleared"
    )
    with session.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert session.last_step(optimizer).stepped
