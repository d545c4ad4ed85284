"""Records and traces as values: bytes, casts, the rows and the text of a trace, and differences between two."""

import dataclasses

import pytest
import torch

from amplab.trace import OpRecord, TensorInfo, Trace

HALF, FLOAT, INDEX = (TensorInfo(dtype, (2, 3)) for dtype in (torch.float16, torch.float32, torch.int64))


def record(op, inputs, outputs, *, module="fc", phase="forward", **more):
    given = {"aten": f"aten.{op}.default", "reason": "in no list: runs in its input dtype", **more}
    return OpRecord(0, op, phase=phase, module=module, inputs=inputs, outputs=outputs, **given)


def trace(*records):
    return Trace(tuple(dataclasses.replace(each, index=index) for index, each in enumerate(records)))


def cast(source, target, **more):
    return record("cast", (source,), (target,), is_cast=True, cast_bytes=source.nbytes + target.nbytes, **more)


def test_a_tensor_knows_its_size():
    assert (HALF.numel, HALF.nbytes, FLOAT.nbytes, TensorInfo(torch.float64, ()).nbytes) == (6, 12, 24, 8)
    assert HALF.dtype_name == "float16"


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HALF.shape = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace().records = ()


def test_casts_and_their_bytes():
    step = trace(cast(FLOAT, HALF), record("linear", (HALF, HALF), (HALF,)), cast(HALF, FLOAT))
    assert [each.index for each in step.casts] == [0, 2]
    assert step.cast_bytes == 2 * (24 + 12)
    assert len(step) == 3
    assert list(step) == list(step.records)


@pytest.mark.parametrize(
    ("each", "folds"),
    [
        (record("add", (FLOAT,), (FLOAT,)), False),
        (record("t", (FLOAT,), (FLOAT,), is_view=True), True),
        (record("add_", (INDEX,), (INDEX,)), True),
        (record("embedding", (FLOAT, INDEX), (FLOAT,)), False),
        (record("argmax", (FLOAT,), (INDEX,)), False),
        (record("zeros", (), (FLOAT,)), False),
    ],
)
def test_views_and_ops_on_integers_fold(each, folds):
    assert each.folds is folds


def test_nothing_changed_since_itself():
    step = trace(cast(FLOAT, HALF), record("linear", (HALF, HALF), (HALF,)))
    assert step.changed_since(step) == set()


def test_a_new_cast_shifts_no_match():
    before = trace(record("linear", (FLOAT, FLOAT), (FLOAT,)), record("relu", (FLOAT,), (FLOAT,), module="net"))
    after = trace(cast(FLOAT, HALF), record("linear", (HALF, HALF), (HALF,)), cast(HALF, FLOAT), before.records[1])
    assert after.changed_since(before) == {0, 1, 2}


def test_occurrence_phase_and_module_distinguish_records():
    one, other = record("add", (FLOAT,), (FLOAT,)), record("add", (HALF,), (HALF,))
    assert trace(one, one).changed_since(trace(one, other)) == {1}
    assert trace(one, dataclasses.replace(one, phase="backward")).changed_since(trace(one, one)) == {1}
    assert trace(dataclasses.replace(one, module="other")).changed_since(trace(one)) == {0}


def test_shapes_and_reasons_do_not_count_as_changes():
    before = trace(record("add", (FLOAT,), (FLOAT,)))
    longer = dataclasses.replace(FLOAT, shape=(9,))
    after = trace(record("add", (longer,), (longer,), reason="another", note="another"))
    assert after.changed_since(before) == set()


def test_a_view_shifts_no_match():
    linear, view = record("linear", (FLOAT,), (FLOAT,)), record("linear", (FLOAT,), (FLOAT,), is_view=True)
    half = record("linear", (HALF,), (HALF,))
    assert trace(view, linear, half).changed_since(trace(linear, half)) == {0}


WIDE16, WIDE32, SCALAR = (
    TensorInfo(torch.float16, (4, 8)),
    TensorInfo(torch.float32, (4, 8)),
    TensorInfo(torch.float32, ()),
)
WEIGHT = TensorInfo(torch.float16, (8, 8))
ACCUMULATED = "fp32 accumulate, rounded once"

RECORDS = (
    OpRecord(0, "cast", "aten._to_copy.default", "forward", "fc", (WIDE32,), (WIDE16,), "cast for linear", True, 192),
    OpRecord(1, "cast", "aten._to_copy.default", "forward", "fc", (WIDE32,), (WIDE16,), "cast for linear", True, 384),
    OpRecord(2, "linear", "aten.t.default", "forward", "fc", (WEIGHT,), (WEIGHT,), "a view", is_view=True),
    OpRecord(
        3,
        "linear",
        "aten.addmm.default",
        "forward",
        "fc",
        (WIDE16, WEIGHT),
        (WIDE16,),
        "lower list",
        note=ACCUMULATED,
    ),
    OpRecord(4, "mse_loss", "aten.mse_loss.default", "forward", "", (WIDE32, WIDE32), (SCALAR,), "fp32 list"),
    OpRecord(5, "linear", "aten.mm.default", "backward", "fc", (WIDE16, WEIGHT), (WIDE16,), "gradient of linear #3"),
    OpRecord(6, "linear", "aten.t.default", "backward", "fc", (WIDE16,), (WIDE16,), "a view", is_view=True),
    OpRecord(7, "linear", "aten.mm.default", "backward", "fc", (WIDE16, WIDE16), (WEIGHT,), "gradient of linear #2"),
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
        dataclasses.replace(linear, index=4, outputs=(WIDE32,)),
        dataclasses.replace(linear, index=5, reason="gradient of linear #9"),
    )
    assert [(row["index"], row["times"]) for row in Trace(apart).rows()] == [
        ("0", "1"),
        ("1", "1"),
        ("2", "2"),
        ("3", "1"),
        ("4", "1"),
    ]
