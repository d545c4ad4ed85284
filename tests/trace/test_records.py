"""Records as values: what they tell of themselves, and what changed between two traces."""

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


def test_occurrence_phase_and_module_tell_records_apart():
    one, other = record("add", (FLOAT,), (FLOAT,)), record("add", (HALF,), (HALF,))
    assert trace(one, one).changed_since(trace(one, other)) == {1}
    assert trace(one, dataclasses.replace(one, phase="backward")).changed_since(trace(one, one)) == {1}
    assert trace(dataclasses.replace(one, module="other")).changed_since(trace(one)) == {0}


def test_shapes_and_reasons_are_no_change():
    before = trace(record("add", (FLOAT,), (FLOAT,)))
    longer = dataclasses.replace(FLOAT, shape=(9,))
    after = trace(record("add", (longer,), (longer,), reason="another", note="another"))
    assert after.changed_since(before) == set()


def test_a_view_shifts_no_match():
    linear, view = record("linear", (FLOAT,), (FLOAT,)), record("linear", (FLOAT,), (FLOAT,), is_view=True)
    half = record("linear", (HALF,), (HALF,))
    assert trace(view, linear, half).changed_since(trace(linear, half)) == {0}
