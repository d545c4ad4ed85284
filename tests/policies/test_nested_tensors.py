"""Nested tensors: every container is walked and keeps its type; only floating tensors are cast."""

import collections
import dataclasses
from typing import NamedTuple

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from amplab.policies.nested_tensors import cast_tree, floating_tensors_in, map_tensors, named_tensors_in, tensors_in


class Pair(NamedTuple):
    x: torch.Tensor
    n: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    doubled: torch.Tensor = dataclasses.field(init=False, default=None)


class Row(dict):
    """A dict subclass with an attribute and a constructor of its own."""

    def __init__(self, label):
        super().__init__()
        self.label = label


class Batch:
    """A batch class with `to` alone."""

    def __init__(self, dtype=torch.float32):
        self.dtype = dtype

    def to(self, dtype):
        return Batch(dtype)


def x():
    return torch.ones(2)


def test_tensors_floating_only():
    assert cast_tree(x(), torch.float16).dtype is torch.float16
    for other in (
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.bool),
    ):
        assert cast_tree(other, torch.float16) is other


@pytest.mark.parametrize("container", [list, tuple, collections.UserList])
def test_sequences_keep_their_type(container):
    value = container([x(), 3, None])
    cast = cast_tree(value, torch.float16)
    if container is collections.UserList:
        assert cast is value
    else:
        assert type(cast) is container
        assert cast[0].dtype is torch.float16
        assert list(cast[1:]) == [3, None]


def test_sets_and_frozensets():
    for container in (set, frozenset):
        (tensor,) = cast_tree(container([x()]), torch.float16)
        assert tensor.dtype is torch.float16


def test_namedtuple_and_torch_return_type():
    cast = cast_tree(Pair(x(), 3), torch.float16)
    assert type(cast) is Pair
    assert cast.x.dtype is torch.float16
    assert cast.n == 3
    cast = cast_tree(torch.ones(2, 2).max(0), torch.float16)
    assert cast.values.dtype is torch.float16
    assert cast.indices.dtype is torch.int64


def test_mappings_keep_type_order_and_attributes():
    row = Row("train")
    row["b"], row["a"] = x(), 1
    cast = cast_tree(row, torch.float16)
    assert type(cast) is Row
    assert cast.label == "train"
    assert list(cast) == ["b", "a"]
    assert cast["b"].dtype is torch.float16
    assert row["b"].dtype is torch.float32
    ordered = cast_tree(collections.OrderedDict(x=x()), torch.float16)
    assert type(ordered) is collections.OrderedDict
    assert cast_tree(collections.defaultdict(list, x=x()), torch.float16).default_factory is list


def test_dataclass_frozen_with_field_outside_init():
    value = Frozen(x(), "a")
    object.__setattr__(value, "doubled", x())
    cast = cast_tree(value, torch.float16)
    assert type(cast) is Frozen
    assert cast.name == "a"
    assert cast.x.dtype is cast.doubled.dtype is torch.float16
    assert value.x.dtype is torch.float32


def test_objects_with_to():
    assert cast_tree(Batch(), torch.float16).dtype is torch.float16
    assert cast_tree(pack_sequence([torch.ones(2, 3)]), torch.float16).data.dtype is torch.float16


def test_modules_are_not_cast_in_place():
    module = torch.nn.Linear(1, 1)
    assert cast_tree({"m": module}, torch.float16)["m"] is module
    assert module.weight.dtype is torch.float32


def test_what_needs_no_cast_comes_back_itself():
    for value in (
        [1, torch.tensor(3)],
        {"a": "text"},
        (None,),
        numpy.ones(2),
        "text",
        3,
        torch.Size([2]),
        [x().half()],
    ):
        assert cast_tree(value, torch.float16) is value


def test_nesting_and_autograd():
    leaf = torch.ones(2, requires_grad=True)
    cast = cast_tree({"a": [(leaf,)]}, torch.float16)
    cast["a"][0][0].sum().backward()
    assert leaf.grad.dtype is torch.float32


def test_cast_tree_asks_a_function_for_each_tensor():
    packed, custom = pack_sequence([torch.ones(2)]), torch.nn.Linear(1, 1)
    tree = {
        "half": torch.ones(1).half(),
        "wide": [torch.ones(1)],
        "n": torch.tensor(1),
        "packed": packed,
        "own": custom,
    }
    cast = cast_tree(tree, lambda tensor: torch.bfloat16 if tensor.dtype is torch.float32 else tensor.dtype)
    assert (cast["half"], cast["n"], cast["own"]) == (tree["half"], tree["n"], custom)
    assert cast["wide"][0].dtype is cast["packed"].data.dtype is torch.bfloat16


def test_tensors_are_found_in_order_in_every_container():
    first, second, third, fourth, fifth = tensors = [torch.full((1,), float(number)) for number in range(5)]
    packed = pack_sequence([torch.ones(2)])
    tree = {
        "list": [first, 1, None],
        "pair": Pair(second, 2),
        "fields": Frozen(
            third,
            "name",
        ),
        "user": collections.UserDict(x=fourth),
        "deque": collections.deque([fifth]),
        "no tensors": ("text", b"bytes", range(3), numpy.ones(2), torch.float16, Batch, torch.nn.Linear(1, 1)),
    }
    found = tensors_in(tree)
    assert all(one is other for one, other in zip(found, tensors, strict=True))
    assert [name for name, _ in named_tensors_in(tree, "x")] == [
        "x['list'][0]",
        "x['pair'].x",
        "x['fields'].x",
        "x['user']['x']",
        "x['deque'][0]",
    ]
    assert floating_tensors_in([packed, torch.tensor(1)])[0] is packed.data


def test_map_tensors_keeps_the_structure_and_asks_custom_for_batch_classes():
    batch = Batch()
    tree = [Pair(x(), 3), {"batch": batch}, torch.ones(2, 2).max(0)]
    doubled = map_tensors(tree, lambda tensor: 2 * tensor)
    assert type(doubled[0]) is Pair
    assert doubled[0].x.tolist() == doubled[2].values.tolist() == [2.0, 2.0]
    assert doubled[1] is tree[1]
    assert map_tensors(tree, lambda tensor: tensor, custom=lambda value: value) is tree
    assert map_tensors(tree, lambda tensor: tensor, custom=lambda value: None)[1] == {"batch": None}
