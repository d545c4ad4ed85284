"""An op of an X-ray as a dict of plain values, for `XRay.rows`."""

import math
from collections.abc import Mapping
from typing import Any

from amplab.kernels import TensorStats
from amplab.trace.records import OpRecord, Trace
from amplab.trace.statistics import OpStatistics

__all__ = ["row_of"]

_MEASURED = ("absmax", "smallest_nonzero", "zeros", "half_subnormals", "half_flushed", "half_overflows")
_MEASURED += ("infs", "nans", "numel")


def row_of(record: OpRecord, trace: Trace, statistics: Mapping[int, OpStatistics] | None) -> dict[str, Any]:
    """Return one op with the keys that `XRay.rows` names."""
    row = {
        "index": record.index,
        "phase": record.phase,
        "op": record.op,
        "aten": record.aten,
        "module": record.module,
        "line": str(record.line or ""),
        "code": record.line.source if record.line else "",
        "inputs": list(map(str, record.inputs)),
        "outputs": list(map(str, record.outputs)),
        "cast": record.is_cast,
        "cast_bytes": record.cast_bytes,
        "parameter": record.parameter,
        "from_cache": [trace.records[index].parameter for index in record.served],
        "view": record.is_view,
        "reason": record.reason,
        "note": record.note,
    }
    if statistics is not None:
        measured = statistics.get(record.index, OpStatistics(()))
        row["statistics"] = [_plain(stats) for stats in measured.outputs]
        row["cast_from"] = _plain(measured.cast_from) if measured.cast_from else None
    return row


def _plain(stats: TensorStats) -> dict[str, float | int | None]:
    row = {name: getattr(stats, name) for name in _MEASURED}
    if math.isinf(row["smallest_nonzero"]):  # there is none, and JSON has no inf
        row["smallest_nonzero"] = None
    return row
