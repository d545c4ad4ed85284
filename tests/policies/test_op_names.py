"""Ops and tables are found by name, and what is not found is answered with the nearest names."""

import re

import pytest
import torch
from torch.nn import functional as F

from amplab.policies import APEX, TABLES, TORCH_CPU, TORCH_CUDA, PrecisionPolicy
from amplab.policies.tables.op_names import find_op, find_row, find_table, nearest


def test_tables_are_found_by_their_own_names():
    assert {name: table.name for name, table in TABLES.items()} == {name: name for name in TABLES}
    assert [find_table(name) for name in ("apex", "torch_cuda", "torch_cpu")] == [APEX, TORCH_CUDA, TORCH_CPU]


def test_an_unknown_table_is_refused_with_the_nearest_names():
    message = (
        "op table 'torch-cuda': expected one of apex, torch_cuda, torch_cpu; did you mean torch_cuda or torch_cpu? "
        "Pass one of these names, an OpTable, or None to cast nothing."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PrecisionPolicy("torch-cuda")
    with pytest.raises(ValueError, match=r"op table 'xyz': expected one of apex, torch_cuda, torch_cpu\. Pass one of"):
        PrecisionPolicy("xyz")


@pytest.mark.parametrize(
    ("name", "func"),
    [
        ("relu", torch.relu),
        ("F.relu", F.relu),
        ("torch.nn.functional.relu", F.relu),
        ("Tensor.add_", torch.Tensor.add_),
        ("gelu", F.gelu),
        ("svdvals", torch.linalg.svdvals),
        ("entr", torch.special.entr),
    ],
)
def test_ops_are_found_by_name_and_by_path(name, func):
    assert find_op(name) == func


def test_an_unknown_op_is_refused_with_the_nearest_names():
    message = (
        "op 'F.softmx': torch has no function of this name; did you mean softmax or softmin or log_softmax? "
        "Expected a name such as 'softmax', a path such as 'F.softmax' or 'Tensor.add_', or the function itself."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PrecisionPolicy().explain("F.softmx")
    with pytest.raises(ValueError, match=r"op 'nn': torch has no function of this name"):
        find_op("nn")


def test_rows_are_found_by_the_tables_own_names():
    assert find_row("add_", APEX).op == "add_"
    assert find_row("relu", APEX) is None
    assert find_row("softmax", None) is None


def test_nothing_near_adds_nothing():
    assert nearest("qqqqq", TABLES) == ""
