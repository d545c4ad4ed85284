"""Rows are found by function object; marks and double claims are noticed."""

import pickle

import pytest
import torch
from torch.nn import functional as F

from amplab.policies import APEX, CastPolicy, OpRule, OpTable
from amplab.policies.policy.policy_rows import policy_rows
from amplab.policies.tables.op_rows import rows
from amplab.policies.tables.op_table import absent, resolve


def test_rule_is_found_by_object_in_every_spelling():
    assert APEX.rule(torch.nn.functional.softmax).op == "softmax"
    assert APEX.rule(torch.Tensor.softmax) is APEX.rule(F.softmax)
    assert APEX.rule(torch._C._VariableFunctions.lstm).op == "lstm"
    assert APEX.rule(torch.relu) is None


def test_rows_of_partition_the_table():
    assert sum(len(APEX.rows_of(cast)) for cast in CastPolicy) == len(APEX.rows)
    assert all(row.cast is CastPolicy.BANNED for row in APEX.rows_of(CastPolicy.BANNED))


def test_op_names_are_unique():
    names = [row.op for row in APEX.rows]
    assert len(names) == len(set(names))


def test_two_rows_cannot_claim_one_function():
    rows = (
        OpRule("mm", CastPolicy.FP32, "mm: one", ("torch.mm",)),
        OpRule("spmm", CastPolicy.PROMOTE, "spmm: two", ("torch.mm",)),
    )
    with pytest.raises(ValueError, match=r"op table 'twice': .*'mm' and 'spmm' both name torch.mm"):
        OpTable("twice", rows).rule(torch.mm)


def test_marks_say_where_a_spelling_is_absent():
    assert not absent("torch.mm")
    assert not absent("torch.mm>=2.0")
    assert absent("torch.mm<2.0")
    assert absent("torch.mm>=99.0")
    assert resolve("torch.mm>=2.0") == torch.mm
    assert resolve("torch.no_such_op>=99.0") is None


def test_marks_of_aten_names_are_applied_when_a_row_is_made():
    (row,) = rows(CastPolicy.FP32, ("mm", "one", ("torch.mm",)), aten={"mm": "mm<2.0 mm_now>=2.0 mm_later>=99.0 bmm"})
    assert row.aten == ("mm_now", "bmm")


def test_a_row_whose_spellings_are_all_of_other_versions_has_no_effect():
    later = OpRule("later", CastPolicy.FP32, "later: one", ("torch.later>=99.0", "torch.Tensor.later>=99.0"))
    here = OpRule("mm", CastPolicy.FP32, "mm: one", ("torch.mm", "torch.mm2>=99.0"))
    own = OpRule("own", CastPolicy.FP32, "own: one")
    assert [row.exists for row in (later, here, own)] == [False, True, True]
    assert OpTable("later", (later, here)).by_function == {torch.mm: here}
    shown = policy_rows([later, here, own], table="later", lower=dict.fromkeys([later, here, own], ""), title="later")
    assert [row["op"] for row in shown] == ["mm", "own"]


def test_a_table_survives_pickling():
    assert pickle.loads(pickle.dumps(APEX)) == APEX
