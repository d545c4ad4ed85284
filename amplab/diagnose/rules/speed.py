"""Rules about why half is no faster: pure functions from a `Trace` to findings, notes all of them.

    shapes-off-multiples-of-8   half products that tensor cores take in a slower way, or not at all
    tiny-ops                    ops so small that starting them takes longer than computing them
    cast-traffic                as many bytes moved by casts as by the ops themselves

They go by shapes and bytes, not by a clock: what they say holds for a GPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from amplab.diagnose.finding import Finding
from amplab.diagnose.remedies.float32 import fewer_casts
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.trace import OpRecord, Trace

__all__ = ["speed_findings"]

MULTIPLE = 8
"""Halves in 16 bytes, the width in which tensor cores are fed."""

OFF = 0.5
"""Share of the multiply-adds in half from which on odd shapes decide about the time."""

TINY = 2**14
"""Elements below which an op is taken for tiny: an assumption, not measured here. Their 64 KiB of float32, read and
written at 1 TB/s, take 0.1 µs, and starting a kernel is commonly put at a few; so the rule says "possible", no more.
"""

CASTS = 0.5
"""Bytes moved by casts for each byte that ops move."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_CONVOLUTION = "convolution"


def speed_findings(trace: Trace, level: str | None = "O1") -> list[Finding]:
    """Apply every rule of this file; a step that multiplies nothing in half has no speed-up to miss.

    Args:
        trace: the step.
        level: in whose words the remedies are, as `remedies.float32` takes it.
    """
    if not any(_is_half_product(record) for record in trace):
        return []
    return [*odd_shapes(trace), *tiny_ops(trace), *cast_traffic(trace, level)]


def odd_shapes(trace: Trace) -> Iterator[Finding]:
    """Products in half with a side that is no multiple of 8, where they are most of the work."""
    products = [record for record in trace if _is_half_product(record)]
    work = {record.index: _multiply_adds(record) for record in products}
    odd = [record for record in products if any(side % MULTIPLE for side in _sides(record))]
    total, off = sum(work.values()), sum(work[record.index] for record in odd)
    if odd and off > OFF * total:
        worst = max(odd, key=lambda record: work[record.index])
        sides = " x ".join(map(str, _sides(worst)))
        yield Finding(
            "shapes-off-multiples-of-8",
            "note",
            f"{off / total:.0%} of the multiply-adds in half are in products with a side that is no multiple of 8.",
            "Tensor cores read 8 halves at a time; other shapes are padded, or computed without them.",
            "# pad the vocabulary, the batch or the width: size = -(-size // 8) * 8",
            "likely",
            op=worst.op,
            module=worst.module,
            evidence={"share": off / total, "sides": sides, "products": len(odd)},
        )


def tiny_ops(trace: Trace) -> Iterator[Finding]:
    """A step whose middle op is smaller than `TINY`."""
    sizes = [max(info.numel for info in record.outputs) for record in trace if not record.folds and record.outputs]
    if sizes and statistics.median(sizes) < TINY:
        yield Finding(
            "tiny-ops",
            "note",
            f"Half of the {len(sizes):,} ops of a step write {statistics.median(sizes):,.0f} elements or fewer.",
            "On a GPU starting such an op takes longer than computing it, in any format; casts add ops.",
            "# a larger batch, CUDA graphs or torch.compile; half will not make this step faster",
            "possible",
            evidence={"median_elements": statistics.median(sizes), "ops": len(sizes)},
        )


def cast_traffic(trace: Trace, level: str | None = "O1") -> Iterator[Finding]:
    """Casts that move more than `CASTS` times the bytes of all other ops."""
    moved = sum(info.nbytes for record in trace if _computes(record) for info in (*record.inputs, *record.outputs))
    if moved and trace.cast_bytes > CASTS * moved:
        modules = {record.module: 0 for record in trace.casts}
        for record in trace.casts:
            modules[record.module] += record.cast_bytes
        worst = max(modules, key=lambda module: modules[module])
        yield Finding(
            "cast-traffic",
            "note",
            f"Casts move {trace.cast_bytes:,} bytes, {trace.cast_bytes / moved:.0%} of what the ops themselves move.",
            "Each change of dtype is a pass over memory; with half weights (O2) there are fewer.",
            fewer_casts(level),
            "likely",
            module=worst,
            evidence={"cast_bytes": trace.cast_bytes, "op_bytes": moved, "casts": len(trace.casts)},
        )


def _computes(record: OpRecord) -> bool:
    return not (record.is_cast or record.is_view)


def _is_half_product(record: OpRecord) -> bool:
    kind = record.aten.split(".")[1]
    return kind in (*_PRODUCTS, _CONVOLUTION) and all(info.dtype in LOW_PRECISION_DTYPES for info in record.outputs)


def _sides(record: OpRecord) -> tuple[int, ...]:
    """Rows, inner size and columns of a product; channels in and out of a convolution."""
    kind = record.aten.split(".")[1]
    if kind == _CONVOLUTION:
        return record.inputs[1].shape[1], record.inputs[1].shape[0]
    place = 1 if kind.startswith(("addmm", "baddbmm")) else 0
    left, right = (info.shape for info in record.inputs[place : place + 2])
    return left[-2], left[-1], right[-1]


def _multiply_adds(record: OpRecord) -> int:
    """Each element that is written takes one for each that it is made of."""
    if record.aten.split(".")[1] == _CONVOLUTION:
        return record.outputs[0].numel * math.prod(record.inputs[1].shape[1:])
    return record.outputs[0].numel * _sides(record)[1]
