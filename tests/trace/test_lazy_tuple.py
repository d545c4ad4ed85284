"""A sequence that is made as it is read is the tuple that it stands for."""

import pickle

import pytest

from amplab.trace.lazy_tuple import LazyTuple


def made(length=5):
    asked = []

    def make(_, place):
        asked.append(place)
        return place * 10

    return LazyTuple(length, make), asked


def test_an_item_is_made_when_it_is_read_and_once():
    items, asked = made()
    assert (len(items), asked) == (5, [])
    assert (items[3], items[-2], items[3]) == (30, 30, 30)
    assert asked == [3]


def test_it_reads_as_the_tuple():
    items, whole = made()[0], (0, 10, 20, 30, 40)
    assert items == whole
    assert whole == items
    assert items != whole[:-1]
    assert (tuple(items), items[1:4], items[::-2], hash(items), repr(items)) == (
        whole,
        whole[1:4],
        whole[::-2],
        hash(whole),
        repr(whole),
    )
    assert (30 in items, items.index(30), list(reversed(items))) == (True, 3, list(whole[::-1]))


def test_it_is_pickled_as_the_tuple():
    again = pickle.loads(pickle.dumps(made()[0]))
    assert type(again) is tuple
    assert again == (0, 10, 20, 30, 40)


def test_a_place_beyond_the_end_is_refused():
    items, asked = made()
    for place in (5, -6):
        with pytest.raises(IndexError):
            items[place]
    assert asked == []
