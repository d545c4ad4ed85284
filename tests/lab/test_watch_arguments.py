"""The arguments and hooks of a watch: it rejects what it cannot follow, and removes hooks it no longer needs."""

import contextlib
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amplab.formats import exponent_histogram
from amplab.lab import WatchCallback, load_run, watch


def loop():
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, ValueError, "every=0:"),
        ({"every": 1.5}, ValueError, "every=1.5:"),
        ({"log": 3}, TypeError, "log=3:"),
        ({"tensorboard": 3}, TypeError, "tensorboard=3:"),
        ({"tensorboard": "s3://bucket/x"}, ValueError, "tensorboard='s3://bucket/x':"),
        ({"log": "s3://bucket/x"}, ValueError, "log='s3://bucket/x':"),
    ],
)
def test_options_of_both(options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        watch(*loop(), **options)
    with pytest.raises(error, match=re.escape(words)):
        WatchCallback(**options)


@pytest.mark.parametrize(
    ("model", "optimizer", "error", "words"),
    [
        (None, None, TypeError, "model=NoneType:"),
        (nn.ReLU(), None, TypeError, "0 optimizers:"),
        (nn.ReLU(), [], TypeError, "0 optimizers:"),
        (nn.ReLU(), [3, "sgd"], TypeError, "optimizer=list of int, str:"),
        (nn.Linear(1, 1, device="meta"), None, ValueError, "model=Linear has tensors on the meta device"),
    ],
)
def test_what_is_watched(model, optimizer, error, words):
    with pytest.raises(error, match=re.escape(words)):
        watch(model, optimizer)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_model_that_is_scripted_in_the_block_says_what_to_do():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = r"call torch\.jit\.script.*after the block of amplab\.watch"
    with watch(model, optimizer, scaler=torch.amp.GradScaler("cpu")), pytest.raises(AttributeError, match=words):
        torch.jit.script(model)
    torch.jit.script(model)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_model_takes_no_hooks():
    _, optimizer = loop()
    with pytest.raises(ValueError, match="is scripted"):
        watch(torch.jit.script(nn.Linear(1, 1)), optimizer)


def test_a_trainer_that_has_no_optimizer_yet():
    with pytest.raises(TypeError, match="optimizer=None"):
        WatchCallback().on_train_begin(None, None, None, model=nn.ReLU(), optimizer=None)


def test_a_wrapper_of_an_optimizer_that_has_no_hooks_of_its_own():
    class Wrapper(torch.optim.Optimizer):
        """Passes on to an optimizer, as those of trainers do."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self, closure=None):
            return self.optimizer.step(closure)

    model, inner = loop()
    optimizer = Wrapper(Wrapper(inner))
    with watch(model, optimizer) as w:
        for _ in range(3):
            w.loss(model(torch.ones(3, 4)).square().sum()).backward()
            optimizer.step()
    assert len(w.history) == 3
    assert w.config.optimizer == "SGD"


@pytest.mark.filterwarnings("ignore:amplab.watch")
def test_an_optimizer_whose_step_is_never_called_is_named_with_the_one_inside():
    class Sharp(torch.optim.Optimizer):
        """Two steps of its own, and one of another optimizer, as in usual implementations of SAM."""

        def __init__(self, params, base, **options):
            super().__init__(params, options)
            self.base_optimizer = base(self.param_groups, **options)
            self.param_groups = self.base_optimizer.param_groups

        def second_step(self):
            self.base_optimizer.step()

    model = nn.Linear(4, 2)
    optimizer = Sharp(model.parameters(), torch.optim.SGD, lr=0.1)
    with watch(model, optimizer) as w:
        for _ in range(8):
            w.loss(model(torch.ones(3, 4)).square().sum()).backward()
            optimizer.second_step()
    (said,) = w.failures
    assert "w.loss was called 8 times, and Sharp.step never" in said
    assert said.endswith("such as optimizer.base_optimizer.")
    with watch(model, optimizer.base_optimizer) as w:
        optimizer.second_step()
    assert (len(w.history), w.failures) == (1, ())


def test_methods():
    with watch(*loop()) as w:
        with pytest.raises(TypeError, match=r"batches\(int\)"):
            next(w.batches(3))
        with pytest.raises(TypeError, match=r"subscribe\(3\)"):
            w.subscribe(3)
        end = w.subscribe(print)
        end()
        end()  # the second time there is nothing to end


@pytest.mark.parametrize("raises", [False, True], ids=["epochs", "a retry"])
def test_a_second_block_is_refused_and_changes_nothing(raises, tmp_path):
    model, optimizer = loop()
    w = watch(model, optimizer, log=tmp_path)

    def epoch():
        with w:
            for x in w.batches([torch.ones(3, 4)] * 2):
                w.loss(model(x).square().sum()).backward()
                optimizer.step()
            if raises:
                raise ArithmeticError

    with pytest.raises(ArithmeticError) if raises else contextlib.nullcontext():
        epoch()
    with pytest.raises(RuntimeError, match=r"has ended: expected a new amplab\.watch.* or one block around all epochs"):
        epoch()
    assert len(w.history) == len(load_run(w.log_path).history) == 2
    assert not model._forward_hooks
    assert w.failures == ()


def test_a_block_within_the_block_is_refused_and_the_outer_one_goes_on():
    model, optimizer = loop()
    with watch(model, optimizer) as w:
        with pytest.raises(RuntimeError, match=r"is in use: expected a new amplab\.watch"), w:
            pass
        w.loss(model(torch.ones(3, 4)).square().sum()).backward()
        optimizer.step()
    assert len(w.history) == 1


@pytest.mark.parametrize("block", ["none", "before", "after"])
def test_batches_that_are_read_outside_of_the_block_are_returned_and_leave_nothing(block):
    model, optimizer = loop()
    given = [torch.ones(3, 4) * number for number in range(3)]
    w = watch(model, optimizer)
    if block == "before":
        with w:
            pass
    begun = w.batches(given)
    got = []

    def train():
        for x in begun:
            got.append(x)
            w.loss(model(x).square().sum()).backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="is read outside of the block of the watch") as warned:
        train()
    if block == "after":
        with w:
            pass
    assert all(map(torch.equal, got, given))
    assert len(got) == 3
    assert len(warned) == len(w.failures) == 1
    assert _get_current_dispatch_mode_stack() == []
    assert not model._forward_hooks
    assert not any(each._backward_hooks for each in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks  # those on all optimizers may stay where there are other threads


def test_batches_that_are_named_before_the_epochs_are_read_in_each():
    model, optimizer = loop()
    with watch(model, optimizer) as w:
        given = [torch.ones(3, 4)] * 3
        batches, once = w.batches(given), w.batches(iter(given))
        for _ in range(2):
            for x in batches:
                w.loss(model(x).square().sum()).backward()
                optimizer.step()
            assert next(batches, None) is None
        assert [len(list(once)) for _ in range(2)] == [3, 0]  # as the iterator itself
    assert len(w.history) == 6
    assert _get_current_dispatch_mode_stack() == []


def test_complex_gradients_are_measured_by_their_parts():
    model = nn.Linear(4, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, every=1) as w:
        w.loss(model(torch.ones(3, 4, dtype=torch.complex64)).abs().sum()).backward()
        parts = [torch.view_as_real(weight.grad).clone() for weight in model.parameters()]
        optimizer.step()
    assert w.history.gradient_samples[0].histogram == exponent_histogram(parts)


torch.manual_seed(5)
BATCHES = [(torch.randn(16, 16), torch.randint(4, (16,))) for _ in range(8)]


def make():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_hooks_are_there_only_while_they_are_needed():
    """With torch's scaler, calls of the model tell the updates of a batch apart."""
    model, optimizer = make()
    with watch(model, optimizer, scaler=torch.amp.GradScaler("cpu"), every=3) as w:
        seen = []
        for number, (x, y) in enumerate(w.batches(BATCHES[:8])):
            optimizer.zero_grad()
            seen.append((len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks)))
            assert number == 0 or len(model._forward_pre_hooks) == 1  # the first step is looked at
            w.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
        assert len(model._forward_pre_hooks) == 1
    assert [sampled for _, sampled in seen] == [1, 0, 0, 1, 0, 0, 1, 0]
    assert [looked for looked, _ in seen] == [3] + [0] * 7
    assert [each.step for each in w.history.gradient_samples] == [0, 3, 6]
