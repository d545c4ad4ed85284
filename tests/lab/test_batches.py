"""Batches of any iterable as a function of the step."""

import itertools
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from amplab.lab.batches import Batches, ReadingStopped, check_data
from amplab.lab.data_generators import DataGenerators


class Flipped(Dataset):
    """Examples with random augmentation by torch and by Python."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item(), random.random()])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7.0).split(2))


class Noisy(Dataset):
    """Examples with noise by a generator of its own."""

    def __init__(self, draw):
        self.transforms = [draw]

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, self.transforms[0].random()])


class Dropping:
    """Leaves out a batch, and its length does not know."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return (batch for number, batch in enumerate(self.loader) if number != 1)


class Bound:
    """A transform that has what it draws from."""

    def __init__(self, generator):
        self.generator = generator

    def random(self):
        return torch.rand((), generator=self.generator).item()


def generator():
    return torch.Generator().manual_seed(5)


HAVE_GENERATORS = {
    "loader": lambda: DataLoader(torch.arange(10), batch_size=4, shuffle=True, generator=generator()),
    "sampler": lambda: DataLoader(
        torch.arange(10), batch_size=4, sampler=RandomSampler(range(10), generator=generator())
    ),
    "loader in one's own": lambda: Dropping(
        DataLoader(torch.arange(20), batch_size=4, shuffle=True, generator=generator())
    ),
    "numpy": lambda: DataLoader(Noisy(np.random.default_rng(5)), batch_size=4, shuffle=True),
    "numpy, old": lambda: DataLoader(Subset(Noisy(np.random.RandomState(5)), range(10)), batch_size=4, shuffle=True),
    "python": lambda: DataLoader(Noisy(random.Random(5)), batch_size=4, shuffle=True),
    "torch": lambda: DataLoader(Noisy(Bound(generator())), batch_size=4),
    "workers": lambda: DataLoader(
        Noisy(np.random.default_rng(5)), batch_size=4, num_workers=1, shuffle=True, generator=generator()
    ),
    "workers that stay": lambda: DataLoader(Flipped(), batch_size=4, num_workers=1, persistent_workers=True),
}


def shuffled():
    return DataLoader(Flipped(), batch_size=4, shuffle=True)


def test_a_shuffling_loader_gives_the_same_batches_after_a_reset():
    first, second, other = Batches(shuffled(), 0), Batches(shuffled(), 0), Batches(shuffled(), 1)
    given = [first.batch(step) for step in range(8)]
    torch.rand(5), random.random()
    assert all(torch.equal(second.batch(step), given[step]) for step in range(8))
    assert not torch.equal(other.batch(0), given[0])
    epochs = [torch.cat(given[start : start + 3])[:, 0] for start in (0, 3)]
    assert [sorted(epoch.tolist()) for epoch in epochs] == [list(range(10))] * 2
    assert not torch.equal(*epochs)


@pytest.mark.parametrize("kind", HAVE_GENERATORS)
def test_data_with_generators_of_their_own_give_the_same_batches_to_every_run(kind):
    data, generators = HAVE_GENERATORS[kind](), DataGenerators()
    first = Batches(data, 0, generators)
    given = [first.batch(step) for step in range(8)]
    again, late = Batches(data, 0, generators), Batches(HAVE_GENERATORS[kind](), 0)
    late.know_epoch(*first.epoch_of(7))
    assert all(torch.equal(again.batch(step), given[step]) for step in range(8))
    assert torch.equal(late.batch(7), given[7])
    again._kept.clear()
    assert torch.equal(again.batch(4), given[4]), "of a second pass"
    assert torch.equal(again.batch(8), first.batch(8)), "the first pass goes on"
    assert not torch.equal(given[0], given[first.epoch_of(7)[0]]), "each epoch has others"


@pytest.mark.parametrize("kind", ["loader", "sampler", "numpy", "torch"])
def test_the_first_pass_is_that_of_the_generators_as_given_and_leaves_them_so(kind):
    data, plain = HAVE_GENERATORS[kind](), HAVE_GENERATORS[kind]()
    torch.manual_seed(1)
    batches = Batches(data, 0)
    given = [batches.batch(step) for step in range(5)][:3]
    if kind == "numpy":  # the order is that of the lab's seed
        draws = np.random.default_rng(5).random(10)
        assert torch.cat(given)[:, 1].tolist() == torch.tensor(draws).float().tolist()
    else:
        assert all(torch.equal(*pair) for pair in zip(given, plain, strict=True))
        plain = HAVE_GENERATORS[kind]()
    torch.manual_seed(1)
    expected = list(plain)
    torch.manual_seed(1)
    assert all(torch.equal(*pair) for pair in zip(data, expected, strict=True))


def test_a_loader_with_a_generator_has_the_order_of_a_plain_loop_in_the_first_epoch_alone():
    def loader():
        return DataLoader(torch.arange(12), batch_size=4, shuffle=True, generator=generator())

    batches, plain = Batches(loader(), 0), loader()
    epochs = [torch.cat([batches.batch(step) for step in range(start, start + 3)]) for start in (0, 3)]
    in_plain_loop = [torch.cat(list(plain)) for _ in epochs]
    assert [torch.equal(*pair) for pair in zip(epochs, in_plain_loop, strict=True)] == [True, False]


def test_a_function_that_makes_its_generator_gives_what_it_makes():
    batches = Batches(HAVE_GENERATORS["loader"], 0)
    given = [batches.batch(step) for step in range(6)]
    assert all(torch.equal(*pair) for pair in zip(given, [*HAVE_GENERATORS["loader"]()] * 2, strict=True))


def test_the_generators_of_the_process_follow_the_seed_though_data_have_them():
    def loader(draw):
        return DataLoader(Noisy(draw), batch_size=4)

    for draw in (random, Bound(torch.default_generator), np.random.random.__self__):
        first, second = [[Batches(loader(draw), seed).batch(0) for _ in range(2)] for seed in (0, 1)]
        assert torch.equal(*first)
        assert not torch.equal(first[0], second[0])


def test_a_length_that_is_not_exact_is_not_taken_for_the_length_of_an_epoch():
    data = Dropping(DataLoader(torch.arange(10), batch_size=4))  # 2 of 3
    batches = Batches(data, 0)
    assert [batches.batch(step).tolist()[0] for step in range(6)] == [0, 8] * 3
    batches._passes.clear(), batches._kept.clear()
    assert batches.batch(5).tolist() == [8, 9]
    late = Batches(data, 0)
    late.know_epoch(*batches.epoch_of(5))
    assert late.batch(5).tolist() == [8, 9]
    assert late.epoch_of(5) == (4, 2)
    assert late.batch(2).tolist()[0] == 0


def test_an_old_batch_is_read_again_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr("amplab.lab.batches.KEPT", 2)
    batches = Batches(shuffled(), 0)
    given = [batches.batch(step) for step in range(12)]
    for step in (11, 3, 4, 0, 7, 11, 5):
        assert torch.equal(batches.batch(step), given[step])
    again = Batches(shuffled(), 0)
    assert torch.equal(batches.batch(12), [again.batch(step) for step in range(13)][-1])


def test_a_run_that_continues_does_not_read_the_epochs_before_its_step():
    walked = Batches(shuffled(), 0)
    batch = [walked.batch(step) for step in range(303)][-1]
    late = Batches(shuffled(), 0)
    late.know_epoch(*walked.epoch_of(302))
    reads = []
    read = Flipped.__getitem__
    Flipped.__getitem__ = lambda self, index: reads.append(index) or read(self, index)
    try:
        assert torch.equal(late.batch(302), batch)
    finally:
        Flipped.__getitem__ = read
    assert len(reads) <= 10


class Longer(list):
    """Has a batch more than its length says, as a length that leaves out the last, smaller batch does."""

    def __len__(self):
        return super().__len__() - 1


@pytest.mark.parametrize("step", range(6))
def test_a_batch_beyond_a_length_that_is_too_small_is_not_left_out_in_a_run_that_continues(step):
    batches = Batches(Longer(torch.arange(3)), 0)
    given = [batches.batch(number).item() for number in range(step)]
    late = Batches(Longer(torch.arange(3)), 0)
    late.know_epoch(*batches.epoch_of(step))
    assert [*given, *(late.batch(number).item() for number in range(step, 6))] == [0, 1, 2] * 2


def test_data_that_reuse_their_memory_give_other_batches():
    def reuse():
        memory = torch.zeros(2)
        return (memory.fill_(number) for number in range(6))

    batches = Batches(reuse, 0)
    assert [batches.batch(step)[0].item() for step in (0, 1, 4, 2, 3, 0)] == [0, 1, 4, 2, 3, 0]


def test_random_states_of_the_process_are_kept():
    torch.manual_seed(3), random.seed(3)
    expected = torch.rand(()).item(), random.random()
    torch.manual_seed(3), random.seed(3)
    batches = Batches(shuffled(), 0)
    [batches.batch(step) for step in range(5)]
    assert (torch.rand(()).item(), random.random()) == expected


def test_few_batches_are_held(monkeypatch):
    monkeypatch.setattr("amplab.lab.batches.KEPT_BYTES", 100)
    batches = Batches(lambda: (torch.zeros(10) for _ in range(5)), 0)
    for step in range(20):
        batches.batch(step)
    assert len(batches._kept) == 2


def test_a_batch_is_a_copy():
    data = [{"x": torch.zeros(3), "names": ["a"]}]
    batches = Batches(data, 0)
    batches.batch(0)["x"].fill_(7)
    assert batches.batch(0)["x"].sum() == 0 == data[0]["x"].sum()


def test_a_stream_without_a_length_and_a_function():
    batches = Batches(DataLoader(Stream(), batch_size=None), 0)
    assert [batches.batch(step).tolist() for step in (3, 4)] == [[6.0], [0.0, 1.0]]
    assert Batches(lambda: iter([torch.tensor(1), torch.tensor(2)]), 0).batch(3) == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (iter([1]), "read only once"),
        ((each for each in [1]), "read only once"),
        (torch.zeros(3, 4), r"data=\[batch\]"),
        ({"x": torch.zeros(1)}, r"data=\[batch\]"),
        ((torch.zeros(3), torch.zeros(3)), r"data=\[\(inputs, labels\)\]"),
        (TensorDataset(torch.zeros(3)), "single examples"),
        (3, "data=int"),
    ],
)
def test_other_data_are_refused(data, words):
    with pytest.raises(TypeError, match=words):
        check_data(data)


def test_data_without_a_batch_are_refused():
    with pytest.raises(ValueError, match="yields no batch"):
        Batches([], 0).batch(0)


def test_data_that_draw_from_the_system_are_read():
    class Augmented(Dataset):
        def __init__(self):
            self.draw = random.SystemRandom()

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor(index + 0 * self.draw.random())

    assert Batches(DataLoader(Augmented()), seed=0).batch(0).shape == (1,)


class Flaky(Dataset):
    """Fails to read an example once, as a disk of the network does."""

    def __init__(self):
        self.fails = True

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5 and self.fails:
            self.fails = False
            raise OSError("the disk does not answer")
        return torch.tensor([float(index), torch.rand(()).item()])


def flaky_function():
    dataset = Flaky()
    return lambda: (dataset[number] for number in range(12))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Flaky(), batch_size=1),
        lambda: DataLoader(Flaky(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)),
        flaky_function,
    ],
)
def test_a_batch_that_cannot_be_read_once_is_read_the_next_time(make):
    failures = []

    def read(batches, step):
        try:
            return batches.batch(step)
        except OSError as failure:
            failures.append(failure)
            return batches.batch(step)

    flaky = Batches(make(), 0)
    seen = [read(flaky, step) for step in range(16)]
    again = Batches(flaky._data, 0)
    assert all(torch.equal(each, again.batch(step)) for step, each in enumerate(seen))
    assert len(failures) == 1


class Parents(Dataset):
    """Interrupts the process of its worker, as Ctrl-C does all processes of a terminal."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return torch.tensor([float(index)])


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_go_on_after_ctrl_c(persistent):
    loader = DataLoader(
        Parents(),
        batch_size=1,
        num_workers=1,
        persistent_workers=persistent,
        worker_init_fn=print,
    )
    batches = Batches(loader, 0)
    seen = [batches.batch(step).item() for step in range(14)]
    assert seen == [*range(12), 0.0, 1.0]
    assert (loader.persistent_workers, loader.worker_init_fn) == (persistent, print)


class Counting:
    """Counts its epochs, and shuffles by them."""

    epoch = 0

    def __init__(self, _data=None):
        pass

    def __len__(self):
        return 6

    def __iter__(self):
        self.epoch += 1
        yield from torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Continuing(IterableDataset):
    """Goes on where it was read last, or by another stream."""

    def __init__(self, sources=()):
        self.epoch, self.sources = 0, sources

    def __iter__(self):
        self.epoch += 1
        if self.sources:
            return (value for source in self.sources for value in source)
        return iter(torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def that_count(kind):
    counting = Continuing() if "stream" in kind else Counting()
    if kind in ("data", "stream"):
        data = counting
    elif kind == "loader of a stream":
        data = DataLoader(counting, batch_size=1)
    elif kind == "streams":
        data = DataLoader(Continuing([counting]), batch_size=1)
    elif kind == "sampler":
        data = DataLoader(torch.arange(6), batch_size=1, sampler=counting)
    else:
        data = DataLoader(torch.arange(6), batch_sampler=BatchSampler(counting, 1, drop_last=False))
    return data, counting


COUNTING = ["data", "sampler", "sampler of batches", "stream", "loader of a stream", "streams"]


@pytest.mark.parametrize("kind", COUNTING)
def test_an_epoch_that_begins_again_has_the_same_batches(kind):
    """As after a run has been put aside and has come back, or a batch could not be read."""
    data, _ = that_count(kind)
    whole, rested = Batches(data, 0), Batches(data, 0)
    seen = []
    for step in range(20):
        if step in (4, 8, 9, 14):
            rested.rest()
        seen.append(int(rested.batch(step)))
    assert seen == [int(whole.batch(step)) for step in range(20)]


@pytest.mark.parametrize("kind", COUNTING)
def test_what_data_keep_at_the_beginning_of_an_epoch_is_known_after_others_were_read_ahead(kind):
    """As by Twin, which trains on the next batches."""
    data, _ = that_count(kind)
    whole, ahead = Batches(data, 0), Batches(data, 0)
    seen = [int(whole.batch(step)) for step in range(20)]
    for step in (*range(8), 40):
        ahead.batch(step)
    epoch = ahead.epoch_of(8)
    again = Batches(that_count(kind)[0], 0)
    again.know_epoch(*epoch, ahead.state_of(epoch[1])[0])
    assert [int(again.batch(step)) for step in range(8, 20)] == seen[8:]


@pytest.mark.parametrize("kind", COUNTING)
def test_data_that_count_their_epochs_give_every_run_the_same_batches(kind):
    data, counting = that_count(kind)
    first, second = Batches(data, 0), Batches(data, 0)
    seen = [int(first.batch(step)) for step in range(15)]
    assert [int(second.batch(step)) for step in range(15)] == seen
    assert sorted(seen[:6]) == sorted(seen[6:12]) == list(range(6))
    assert seen[:6] != seen[6:12]
    assert counting.epoch == 0


def test_a_slow_loader_that_has_only_the_next_batch_to_read_is_not_told(monkeypatch):
    monkeypatch.setattr("amplab.lab.batches._PATIENCE", -1.0)
    batches = Batches([torch.tensor(each) for each in range(3)], seed=0)
    told = []
    batches.goes_on = told.append  # None: a reading that asks stops
    assert [batches.batch(step).item() for step in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert not told


def test_reading_that_is_stopped_goes_on_where_it_was(monkeypatch):
    monkeypatch.setattr("amplab.lab.batches._PATIENCE", 0.0)
    read, wanted = [], [True, True, False, True]

    def stream():
        for number in itertools.count():
            read.append(number)
            yield torch.tensor(number)

    batches = Batches(stream, 0)
    batches.goes_on = lambda _left: wanted.pop(0) if wanted else True
    with pytest.raises(ReadingStopped):
        batches.batch(20)
    assert read == [0, 1, 2]
    assert batches.batch(20) == 20
    assert read == list(range(21))


class Buckets:
    """A sampler of batches whose sampler is a property."""

    sampler = property(lambda _self: None)

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


def test_a_sampler_of_batches_that_lets_no_one_set_its_sampler_is_read():
    batches = Batches(DataLoader(torch.arange(4), batch_sampler=Buckets()), 0)
    assert [batches.batch(step).tolist() for step in range(3)] == [[0, 1], [2, 3], [0, 1]]
