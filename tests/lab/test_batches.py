"""Batches of any iterable as a function of the step."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from amplab.lab.batches import Batches, check_data


class Flipped(Dataset):
    """Examples with random augmentation by torch and by Python."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item(), random.random()])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7.0).split(2))


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


def test_an_old_batch_is_read_again_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr("amplab.lab.batches.KEPT", 2)
    batches = Batches(shuffled(), 0)
    given = [batches.batch(step) for step in range(12)]
    for step in (11, 3, 4, 0, 7, 11, 5):
        assert torch.equal(batches.batch(step), given[step])
    again = Batches(shuffled(), 0)
    assert torch.equal(batches.batch(12), [again.batch(step) for step in range(13)][-1])


def test_a_run_that_continues_does_not_read_the_epochs_before_its_step():
    loader = shuffled()
    reads = []
    read = Flipped.__getitem__
    Flipped.__getitem__ = lambda self, index: reads.append(index) or read(self, index)
    try:
        late = Batches(loader, 0).batch(302)
    finally:
        Flipped.__getitem__ = read
    assert len(reads) <= 10
    walked = Batches(shuffled(), 0)
    assert torch.equal([walked.batch(step) for step in range(303)][-1], late)


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
