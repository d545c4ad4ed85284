"""The statistics of an X-ray against numpy in float64, op by op and gradient by gradient."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from amplab.trace import xray
from amplab.trace.reasons import is_view
from amplab.trace.step import trace_step


class Copies:
    """An observer that keeps what each op wrote, as it was at that moment."""

    def __init__(self) -> None:
        self.outputs: list[list[np.ndarray]] = []

    def before(self, overload, args, kwargs):
        return None

    def after(self, seen, event, result):
        several = result if isinstance(result, list | tuple) else (result,)
        tensors = [each for each in several if isinstance(each, torch.Tensor) and each.is_floating_point()]
        self.outputs.append([] if is_view(event.overload) else [each.double().clone().numpy() for each in tensors])


def by_numpy(values: np.ndarray) -> dict[str, float]:
    sizes = np.abs(values)
    counted = sizes[np.isfinite(sizes) & (sizes > 0)]
    return {
        "absmax": counted.max(initial=0.0),
        "smallest_nonzero": counted.min() if counted.size else None,
        "zeros": int((sizes == 0).sum()),
        "half_subnormals": int((counted < 2.0**-14).sum()),
        "half_flushed": int((counted <= 2.0**-25).sum()),
        "half_overflows": int((counted >= 65520).sum()),
        "infs": int(np.isinf(values).sum()),
        "nans": int(np.isnan(values).sum()),
        "numel": values.size,
    }


def test_every_op_of_every_model_against_numpy(scenario, every_model):
    model, loss = scenario(every_model)
    copies = Copies()
    trace = trace_step(model, loss, observer=copies)
    found = xray(model, step=loss, stats=True)
    expected = [
        (record.aten, list(map(by_numpy, outputs)))
        for record, outputs in zip(trace, copies.outputs, strict=True)
        if record.aten != "aten.detach.default"
    ]
    rows = [row for row in found.rows(every=True) if row["aten"] != "aten.detach.default"]
    assert [(row["aten"], row["statistics"]) for row in rows] == expected


@pytest.mark.parametrize("waits", [0, 2**40])
def test_an_op_in_place_does_not_change_what_was_measured(monkeypatch, waits):
    monkeypatch.setattr("amplab.trace.statistics._MOST_BYTES", waits)
    model = nn.Linear(4, 4)
    found = xray(model, step=lambda: model(torch.ones(2, 4)).mul(0).add_(3).sum(), stats=True)
    measured = {row["op"]: row["statistics"][0] for row in found.rows() if row["phase"] == "forward"}
    assert (measured["mul"]["zeros"], measured["mul"]["absmax"]) == (8, 0.0)
    assert (measured["add_"]["zeros"], measured["add_"]["absmax"]) == (0, 3.0)


def test_a_cast_counts_what_half_loses_of_what_it_reads():
    values = torch.tensor([[1e-9, 1e-6, 1.0, 1e5, float("inf"), float("nan"), 0.0, 65519.0]])
    found = xray(nn.Linear(8, 2), values, opt_level="O1", stats=True)
    row = next(row for row in found.rows() if row["cast"] and row["inputs"] == ["float32[1, 8]"])
    read, written = row["cast_from"], row["statistics"][0]
    assert (read["half_flushed"], read["half_subnormals"], read["half_overflows"]) == (1, 2, 1)
    assert (read["infs"], read["nans"], read["zeros"]) == (1, 1, 1)
    assert (written["infs"], written["nans"], written["zeros"]) == (2, 1, 2)


def test_the_gradients_histograms(scenario, every_model):
    model, loss = scenario(every_model)
    seen = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda leaf, name=name: seen.__setitem__(name, leaf.grad))
    with torch.random.fork_rng():
        loss().backward()
    found = xray(model, step=loss, stats=True)
    assert {name for name, _ in found.gradients} == set(seen)
    for name, histogram in found.gradients:
        counted = np.abs(seen[name].double().numpy())
        counted = counted[counted > 0]
        exponents, counts = np.unique(np.floor(np.log2(counted)).astype(int), return_counts=True)
        assert histogram.total == seen[name].numel()
        assert {
            int(exponent): int(count)
            for exponent, count in zip(histogram.exponents, histogram.counts, strict=True)
            if count
        } == dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def test_sparse_gradients_are_counted_by_their_values():
    model = nn.Embedding(16, 4, sparse=True)
    found = xray(model, torch.tensor([1, 1, 3]), stats=True)
    ((name, histogram),) = found.gradients
    assert (name, histogram.total, histogram.zeros) == ("weight", 8, 0)


@pytest.mark.parametrize("status", ["reference", "building", "failed", "built"])
def test_it_says_when_the_slower_reference_has_measured(monkeypatch, status):
    monkeypatch.setattr("amplab.kernels.report", lambda: SimpleNamespace(status=status))
    found = xray(nn.Linear(2, 2), torch.ones(1, 2), stats=True)
    assert ("Measured by the PyTorch reference" in str(found)) == (status != "built")
    assert "reference" not in str(xray(nn.Linear(2, 2), torch.ones(1, 2)))


def test_without_statistics_there_are_none():
    found = xray(nn.Linear(2, 2), torch.ones(1, 2))
    assert found.statistics is None
    assert found.gradients is None
    assert "statistics" not in found.rows()[0]
    with pytest.raises(ValueError, match="underflow\\(\\) of an X-ray without statistics"):
        found.underflow()


def test_rows_are_strict_json_also_for_zeros():
    found = xray(nn.Linear(2, 2), torch.zeros(1, 2), loss=lambda out: (out * 0).sum(), stats=True)
    rows = found.rows(every=True)
    json.dumps(rows, allow_nan=False)
    assert any(each["smallest_nonzero"] is None for row in rows for each in row["statistics"])
