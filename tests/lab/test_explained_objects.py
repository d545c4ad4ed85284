"""Steps with objects of more kinds than plain ones: a rerun leaves them as the loop has made them."""

import os
import queue
import threading
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler
from watched_training import trained

import amplab
from amplab.lab import watch


def loss_of(outputs):
    return outputs.float().square().mean()


class Replay(Dataset):
    """A buffer of past inputs, to which each step adds one."""

    def __init__(self):
        self.kept = []

    def add(self, x):
        self.kept.append(x)

    def __len__(self):
        return len(self.kept)

    def __getitem__(self, index):
        return self.kept[index]


def with_a_replay_buffer(model):
    replay = Replay()

    def step(x):
        replay.add(x)
        return loss_of(model(replay[len(replay) // 2])) / len(replay)

    return step


class Turns(Sampler):
    def __init__(self):
        self.turn = 0

    def __iter__(self):
        self.turn += 1
        return iter([self.turn])


def with_a_sampler(model):
    turns = Turns()
    return lambda x: loss_of(model(x)) / next(iter(turns))


def with_a_critic_that_learns(model):
    """As in a WGAN, where the critic makes its steps inside."""
    critic = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.1)

    def step(x):
        with torch.autocast("cpu", enabled=False):
            optimizer.zero_grad()
            loss_of(critic(model(x).float().detach()) - 1).backward()
            optimizer.step()
        return loss_of(model(x)) * critic.weight.detach().square().sum()

    return step


def with_gradients_of_another_model(model):
    critic = nn.Linear(1, 1)

    def step(x):
        critic(torch.ones(1, 1)).float().sum().backward()
        return loss_of(model(x)) * critic.weight.grad.detach().sum()

    return step


def with_a_gradient_of_a_tensor(model):
    temperature = torch.ones(1, requires_grad=True)

    def step(x):
        (2 * temperature).sum().backward()
        return loss_of(model(x)) * temperature.grad.sum()

    return step


def with_a_teacher_that_is_given_new_data(model):
    """As in MoCo, where each weight of the teacher gets a new tensor."""
    teacher = nn.Linear(8, 1).requires_grad_(False)

    def step(x):
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.data = old.data * 0.9 + new.data * 0.1
        return loss_of(model(x) - teacher(x) + 1)

    return step


def with_a_teacher_that_is_given_a_vector(model):
    teacher = nn.Linear(8, 1).requires_grad_(False)

    def step(x):
        old, new = (parameters_to_vector(each.parameters()).detach() for each in (teacher, model))
        vector_to_parameters(0.9 * old + 0.1 * new, teacher.parameters())
        return loss_of(model(x) - teacher(x) + 1)

    return step


def with_weights_that_are_frozen_in_turn(model):
    critic = nn.Linear(1, 1)

    def step(x):
        critic.requires_grad_(not critic.weight.requires_grad)
        return loss_of(critic(model(x))) * (1 + critic.weight.requires_grad)

    return step


class Counter:
    __slots__ = ("__calls",)

    def __init__(self):
        self.__calls = 0

    def next(self):
        self.__calls += 1
        return self.__calls


def with_a_private_slot(model):
    counter = Counter()
    return lambda x: loss_of(model(x)) / counter.next()


class Key:
    calls = 0

    def next(self):
        self.calls += 1
        return self.calls


def with_an_object_as_a_key(model):
    table = {Key(): 1.0}
    return lambda x: loss_of(model(x)) / sum(key.next() for key in table)


class Marked(torch.Tensor):
    pass


def with_an_attribute_of_a_tensor(model):
    factor = torch.ones(1).as_subclass(Marked)
    factor.calls = 0

    def step(x):
        factor.calls += 1
        return loss_of(model(x)) / factor.calls

    return step


class Warmup(LRScheduler):
    """Steps in the loss, which is its own place to count."""

    calls = 0

    def get_lr(self):
        return [0.1]

    def factor(self):
        self.calls += 1
        return self.calls


def with_a_schedule(model):
    schedule = Warmup(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    return lambda x: loss_of(model(x)) / schedule.factor()


def own_activation():
    calls = [0]

    def activation(x):
        calls[0] += 1
        return torch.relu(x) / calls[0]

    return activation


def encoder_layer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=own_activation(), batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), layer, nn.Flatten(), nn.Linear(8, 1))


def plain(model):
    return lambda x: loss_of(model(x))


def linear():
    return nn.Linear(8, 1)


STEPS = [
    (linear, with_a_replay_buffer),
    (linear, with_a_sampler),
    (linear, with_a_critic_that_learns),
    (linear, with_gradients_of_another_model),
    (linear, with_a_gradient_of_a_tensor),
    (linear, with_a_teacher_that_is_given_new_data),
    (linear, with_a_teacher_that_is_given_a_vector),
    (linear, with_weights_that_are_frozen_in_turn),
    (linear, with_a_private_slot),
    (linear, with_an_object_as_a_key),
    (linear, with_an_attribute_of_a_tensor),
    (linear, with_a_schedule),
    (encoder_layer, plain),
]


@pytest.mark.parametrize(("make_model", "make_step"), STEPS)
def test_weights_are_those_of_the_loop_without_a_watch(make_model, make_step):
    unwatched, watched = (trained(make_model, make_step, torch.amp.GradScaler, each) for each in (False, True))
    assert all(map(torch.equal, unwatched, watched))


def counter_in(values):
    def count(*_):
        values[0] += 1

    return count


def of_a_weight(model, hook):
    return model.weight.register_hook(hook)


def of_several_weights(model, hook):
    return torch.autograd.graph.register_multi_grad_hook([*model.parameters()], hook, mode="any")


def of_all_gradients(model, hook):
    return torch.autograd.graph.register_multi_grad_hook([*model.parameters()], hook)


def of_an_accumulated_gradient(model, hook):
    return model.bias.register_post_accumulate_grad_hook(hook)


def of_all_modules(_model, hook):
    return torch.nn.modules.module.register_module_forward_hook(hook)


HOOKS = [of_a_weight, of_several_weights, of_all_gradients, of_an_accumulated_gradient, of_all_modules]


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_counts_each_step_once(register):
    def count(watched):
        calls, handles = [0], []

        def make_model():
            model = linear()
            handles.append(register(model, counter_in(calls)))
            return model

        try:
            trained(make_model, plain, torch.amp.GradScaler, watched)
        finally:
            handles[0].remove()
        return calls

    assert count(watched=True) == count(watched=False) == [30]


class Prefetcher(threading.Thread):
    """Fills a queue that the step reads."""

    def __init__(self, items):
        super().__init__(daemon=True)
        self.items = queue.Queue()
        for each in items:
            self.items.put(each)


class ReadAhead(Dataset):
    def __init__(self, items):
        self.items = queue.Queue()
        for each in items:
            self.items.put(each)


class QueuedSchedule(Warmup):
    def __init__(self, items):
        super().__init__(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
        self.items = queue.Queue()
        for each in items:
            self.items.put(each)


def optimizer_with_a_queue(items):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.items = queue.Queue()
    for each in items:
        optimizer.items.put(each)
    return optimizer


class Lines:
    """A text file that is a pipe, as of another program."""

    def __init__(self, items):
        reader, writer = os.pipe()
        self.items = self
        with os.fdopen(writer, "w") as lines:
            lines.writelines(f"{each}\n" for each in items)
        self.lines = os.fdopen(reader)

    def get(self, timeout):
        return int(self.lines.readline())


@pytest.mark.filterwarnings("ignore:amplab.watch")
@pytest.mark.parametrize("make", [Prefetcher, ReadAhead, QueuedSchedule, optimizer_with_a_queue, Lines])
def test_a_step_that_takes_the_next_item_of_any_object_is_not_run_again(make):
    owner, taken = make(range(10)), []
    model = linear()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**60)

    def step(x):
        taken.append(owner.items.get(timeout=30))
        with torch.autocast("cpu", torch.float16):
            return loss_of(model(x))

    with watch(model, optimizer, scaler=scaler, step=step) as watched:
        for x in watched.batches(torch.ones(10, 4, 8)):
            optimizer.zero_grad()
            scaler.scale(step(x)).backward()
            scaler.step(optimizer)
            scaler.update()
    if make is Lines:
        owner.lines.close()
    assert taken == [*range(10)]
    assert f"names an object of class {'TextIOWrapper' if make is Lines else 'Queue'}" in watched.failures[0]


class Batch:
    def __init__(self, x):
        self.x, self.reads = x, 0

    def read(self):
        self.reads += 1
        return self.x


def of_an_array(batch):
    batch -= 0.5
    return torch.from_numpy(batch.copy())


def of_an_array_in_a_dict(batch):
    batch["x"][:] *= 0.5
    return torch.from_numpy(batch["x"].copy())


def of_an_object(batch):
    x = batch.read()
    return x / batch.reads


def of_a_namespace(batch):
    batch.reads += 1
    return batch.x / batch.reads


def of_what_is_shared(batch):
    """Of a batch and the data set of which it is a view."""
    batch *= 0.5
    return torch.from_numpy(batch.copy())


BATCHES = {
    of_an_array: lambda x: x.numpy(),
    of_an_array_in_a_dict: lambda x: {"x": x.numpy()},
    of_an_object: Batch,
    of_a_namespace: lambda x: SimpleNamespace(x=x, reads=0),
    of_what_is_shared: lambda x: x.numpy()[:],
}


def state_of(batch):
    values = vars(batch) if hasattr(batch, "__dict__") else batch if isinstance(batch, dict) else {"x": batch}
    return [each.tolist() if isinstance(each, (np.ndarray, torch.Tensor)) else each for each in values.values()]


@pytest.mark.filterwarnings("ignore:amplab.watch")  # a step whose batch is another one now is not explained
@pytest.mark.parametrize("read", BATCHES)
@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
def test_what_a_step_writes_to_its_batch_is_written_once(read, scaler_type):
    def run(watched):
        torch.manual_seed(0)
        model = linear()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), scaler_type("cpu", init_scale=2.0**24)
        batches = [BATCHES[read](x) for x in torch.randn(12, 4, 8, generator=torch.Generator().manual_seed(1))]

        def step(batch):
            with torch.autocast("cpu", torch.float16):
                return loss_of(model(read(batch)))

        def loop(each, loss):
            optimizer.zero_grad()
            scaler.scale(loss(step(each))).backward()
            scaler.step(optimizer)
            scaler.update()

        if watched:
            with watch(model, optimizer, scaler=scaler, step=step) as w:
                for each in w.batches(batches):
                    loop(each, w.loss)
        else:
            for each in batches:
                loop(each, lambda loss: loss)
        return [*map(state_of, batches)], [each.tolist() for each in model.parameters()]

    assert run(watched=True) == run(watched=False)


def test_an_interrupt_where_no_grad_ends_leaves_gradients_on_in_the_loop(monkeypatch):
    """As by Ctrl-C at the first instruction of torch's `no_grad.__exit__`."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def interrupted(*_):
        raise KeyboardInterrupt

    with watch(model, optimizer, step=lambda x: loss_of(model(x))) as watched:
        batches = watched.batches(torch.ones(4, 4, 8))
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(torch.no_grad, "__exit__", interrupted)
            for _ in range(2):
                with suppress(KeyboardInterrupt):
                    next(batches)
        is_on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
    assert is_on
