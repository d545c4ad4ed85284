"""What an X-ray is read from: rows, casts, and its one line."""

import json
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.trace import xray

ROWS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


@pytest.fixture
def take():
    """X-rays of one net on one batch."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(ROWS, 16), torch.arange(ROWS) % 4
    return lambda **settings: xray(model, (x, y), loss=F.cross_entropy, **settings)


def test_casts_and_their_bytes_by_hand(take):
    casts = [(cast.op, cast.parameter, cast.nbytes) for cast in take(opt_level="O1").casts if cast.phase == "forward"]
    # float32 -> float16 reads 4 bytes and writes 2; the logits come back to float32 for the loss.
    assert casts == [
        ("linear", "", 6 * ROWS * 16),
        ("linear", "fc1.weight", 6 * 16 * 8),
        ("linear", "fc1.bias", 6 * 8),
        ("linear", "fc2.weight", 6 * 8 * 4),
        ("linear", "fc2.bias", 6 * 4),
        ("cross_entropy", "", 6 * ROWS * 4),
    ]


def test_gradients_are_cast_back_for_each_of_them(take):
    casts = [cast for cast in take(opt_level="O1").casts if cast.phase == "backward"]
    assert sum(cast.nbytes for cast in casts) == 6 * (16 * 8 + 8 + 8 * 4 + 4 + ROWS * 4)
    assert {cast.op for cast in casts} == {"linear", "cross_entropy"}
    assert all((cast.source, cast.target) == (torch.float16, torch.float32) for cast in casts if cast.op == "linear")


def test_a_half_product_is_one_record_whatever_computes_it(take):
    """Also where the CPU multiplies halves in float32: the casts inside count for nothing."""
    found = take(opt_level="O1")
    products = [record for record in found.trace if record.aten in ("aten.addmm.default", "aten.mm.default")]
    assert len(products) == 5  # two forward, and the gradients of two weights and one input
    for record in products:
        assert {info.dtype for info in (*record.inputs, *record.outputs)} == {torch.float16}
    assert len(take(opt_level="O3").trace.casts) == 3  # the input, the output, and the gradient of the output
    assert found.trace.cast_bytes == sum(cast.nbytes for cast in found.casts)


def test_rows_are_plain_values(take):
    for settings in ({}, {"opt_level": "O1", "stats": True}):
        rows = take(**settings).rows(every=True)
        assert json.loads(json.dumps(rows)) == rows
        assert [row["index"] for row in rows] == list(range(len(rows)))
    row = next(row for row in rows if row["op"] == "relu")
    assert row["inputs"] == row["outputs"] == [f"float16[{ROWS}, 8]"]
    assert (row["phase"], row["module"], row["aten"]) == ("forward", "Net", "aten.relu.default")
    assert re.fullmatch(r".*test_xray_value\.py:\d+", row["line"])
    assert row["code"] == "return self.fc2(torch.relu(self.fc1(x)))"
    assert row["reason"] == "in no list: runs in its input dtype, float16 from linear"
    assert row["statistics"][0]["numel"] == ROWS * 8


def test_views_are_left_out_unless_asked_for(take):
    found = take()
    assert not any(row["view"] for row in found.rows())
    assert any(row["view"] for row in found.rows(every=True))


def test_its_one_line_says_the_numbers_and_is_the_same_every_time(take):
    pattern = r"XRay\(Net O1: \d+ ops forward, \d+ backward; \d+ casts of [\d.]+ kB, 0 from the weight cache; .*\)"
    assert re.fullmatch(pattern, repr(take(opt_level="O1")))
    assert repr(take(opt_level="O1")) == repr(take(opt_level="O1"))
    assert repr(take()).startswith("XRay(Net as it is: ")


def test_no_tensor_outlives_it(take):
    import gc

    found = take(opt_level="O1", stats=True)
    gc.collect()
    before = sum(type(each) is torch.Tensor for each in gc.get_objects())
    again = take(opt_level="O1", stats=True)
    gc.collect()
    after = sum(type(each) is torch.Tensor for each in gc.get_objects())
    assert after - before <= 3  # its own tables
    assert again.statistics.keys() == found.statistics.keys()


def test_an_index_is_the_number_in_the_table(take):
    found = take(opt_level="O1")
    assert [found[place] for place in range(len(found))] == list(found) == list(found.trace)
    assert found[-1].index == len(found) - 1
    numbered = next(line for line in str(found).splitlines() if " relu " in line)
    assert found[int(numbered.split()[0])].op == "relu"


@pytest.mark.parametrize("index", ["fc1", None, True, 1.0, slice(2)])
def test_no_other_index(take, index):
    with pytest.raises(TypeError, match=r"^xray\[.*\]:"):
        take()[index]


def test_an_index_beyond_the_last(take):
    found = take()
    with pytest.raises(IndexError, match=rf"xray\[{len(found)}\]"):
        found[len(found)]


@pytest.mark.parametrize("other", [None, "O1", [], 3])
def test_a_difference_to_something_else(take, other):
    with pytest.raises(TypeError, match=f"^other={type(other).__name__}:"):
        take().diff(other)


def test_numbers_about_half_are_about_the_values_of_float32_tensors():
    """2^-20 is subnormal in half, 2^-30 is none of its numbers; the text's column counts both."""
    values = torch.tensor([2.0**-20, 2.0**-30, 1.0])
    found = xray(nn.Linear(3, 1), values, stats=True, loss=lambda out: (out * 0).sum() + (values * 1).sum())
    row = next(row for row in found.rows() if row["op"] == "mul" and row["outputs"] == ["float32[3]"])
    assert [row["statistics"][0][name] for name in ("half_subnormals", "half_flushed")] == [2, 1]
