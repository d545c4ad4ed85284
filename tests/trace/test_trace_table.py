"""The rows and the text of a trace, sign by sign."""

import dataclasses

import torch

from amplab.trace import OpRecord, TensorInfo, Trace

HALF, FLOAT, SCALAR = (
    TensorInfo(torch.float16, (4, 8)),
    TensorInfo(torch.float32, (4, 8)),
    TensorInfo(torch.float32, ()),
)
WEIGHT = TensorInfo(torch.float16, (8, 8))
ACCUMULATED = "fp32 accumulate, rounded once"

RECORDS = (
    OpRecord(0, "cast", "aten._to_copy.default", "forward", "fc", (FLOAT,), (HALF,), "cast for linear", True, 192),
    OpRecord(1, "cast", "aten._to_copy.default", "forward", "fc", (FLOAT,), (HALF,), "cast for linear", True, 384),
    OpRecord(2, "linear", "aten.t.default", "forward", "fc", (WEIGHT,), (WEIGHT,), "a view", is_view=True),
    OpRecord(
        3, "linear", "aten.addmm.default", "forward", "fc", (HALF, WEIGHT), (HALF,), "lower list", note=ACCUMULATED
    ),
    OpRecord(4, "mse_loss", "aten.mse_loss.default", "forward", "", (FLOAT, FLOAT), (SCALAR,), "fp32 list"),
    OpRecord(5, "linear", "aten.mm.default", "backward", "fc", (HALF, WEIGHT), (HALF,), "gradient of linear #3"),
    OpRecord(6, "linear", "aten.t.default", "backward", "fc", (HALF,), (HALF,), "a view", is_view=True),
    OpRecord(7, "linear", "aten.mm.default", "backward", "fc", (HALF, HALF), (WEIGHT,), "gradient of linear #2"),
)

TEXT = """\
#  op         module  in                out      cast bytes  note              reason
-- forward -----------------------------------------------------------------------------------------
0  cast ×2    fc      float32           float16         576                    cast for linear
3  linear     fc      float16, float16  float16              fp32 accumulate,  lower list
                                                             rounded once
4  mse_loss   -       float32, float32  float32                                fp32 list
-- backward ----------------------------------------------------------------------------------------
5  linear ×2  fc      float16, float16  float16                                gradient of linear #3
6 ops: 4 forward, 2 backward; 2 casts, 576 bytes; 2 views and index ops folded"""


def test_the_text_is_an_aligned_table():
    assert Trace(RECORDS).text().splitlines() == TEXT.splitlines()
    assert str(Trace(RECORDS)) == TEXT


def test_the_text_of_every_record_has_a_line_for_each():
    lines = Trace(RECORDS).text(every=True).splitlines()
    assert [line.split()[0] for line in lines[1:-1] if line[0] not in "- "] == list("01234567")
    assert lines[-1] == "8 ops: 5 forward, 3 backward; 2 casts, 576 bytes"


def test_an_empty_trace_prints():
    assert (
        Trace(()).text().splitlines()[-1]
        == "0 ops: 0 forward, 0 backward; 0 casts, 0 bytes; 0 views and index ops folded"
    )


def test_a_long_reason_is_cut_in_the_text_and_whole_in_the_row():
    reason = "x" * 78 + ", and more"
    step = Trace((dataclasses.replace(RECORDS[4], reason=reason),))
    assert "xxx…" in step.text()
    assert max(map(len, step.text().splitlines())) <= 100
    assert "and more" not in step.text()
    assert step.rows()[0]["reason"] == reason


def test_a_row_is_plain_strings():
    first, product = Trace(RECORDS).rows()[:2]
    assert first == {
        "index": "0",
        "op": "cast",
        "aten": "aten._to_copy.default",
        "module": "fc",
        "phase": "forward",
        "in": "float32",
        "out": "float16",
        "shapes": "4x8 -> 4x8",
        "cast": "yes",
        "cast_bytes": "576",
        "times": "2",
        "view": "no",
        "reason": "cast for linear",
        "note": "",
    }
    assert (product["in"], product["shapes"], product["note"]) == ("float16, float16", "4x8, 8x8 -> 4x8", ACCUMULATED)
    assert (product["cast"], product["cast_bytes"], product["times"]) == ("no", "", "1")
    assert Trace(RECORDS).rows()[2]["shapes"] == "4x8, 4x8 -> scalar"


def test_rows_of_every_record_are_one_each():
    rows = Trace(RECORDS).rows(every=True)
    assert [row["index"] for row in rows] == list("01234567")
    assert [row["view"] for row in rows] == ["no", "no", "yes", "no", "no", "no", "yes", "no"]
    assert rows[0]["cast_bytes"] == "192"


def test_only_neighbours_of_one_op_and_module_share_a_row():
    linear = RECORDS[5]
    apart = (
        dataclasses.replace(linear, index=0),
        dataclasses.replace(linear, index=1, module="other"),
        dataclasses.replace(linear, index=2),
        dataclasses.replace(linear, index=3, note=ACCUMULATED),
        dataclasses.replace(linear, index=4, outputs=(FLOAT,)),
        dataclasses.replace(linear, index=5, reason="gradient of linear #9"),
    )
    assert [(row["index"], row["times"]) for row in Trace(apart).rows()] == [
        ("0", "1"),
        ("1", "1"),
        ("2", "2"),
        ("3", "1"),
        ("4", "1"),
    ]
