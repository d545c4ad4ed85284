"""Rules about why 16-bit dtypes are no faster: pure functions from a `Trace` to findings, all of them notes.

    shapes-not-multiple-of-8   16-bit products whose shapes tensor cores handle slowly, or not at all
    launch-bound               ops so small that launching them takes longer than computing them
    cast-traffic               casts that move many bytes compared with the ops

The rules use shapes and bytes, not measured times, and apply to a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding, Number
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.remedies.rule_cost import is_half_product, multiply_adds, sides
from amplab.trace import OpRecord, Trace

__all__ = ["speed_findings"]

MULTIPLE = 8
"""16-bit numbers in 16 bytes, the width of a tensor core's load."""

OFF = 0.5
"""Share of the 16-bit multiply-adds above which odd shapes dominate the time."""

TINY = 2**14
"""Ops with fewer elements count as tiny. This is an assumption, not a measurement: to read and write 64 KiB of float32
at 1 TB/s takes 0.1 µs, and a kernel launch is commonly said to take a few; so the certainty is "possible".
"""

CASTS = 0.5
"""Ratio of the bytes moved by casts to those moved by other ops."""


def speed_findings(trace: Trace, api: Api | None = None) -> list[Finding]:
    """Apply every rule of this file; without 16-bit products there are no findings.

    Args:
        trace: the step.
        api: what the training loop uses, for the remedies.
    """
    if not any(is_half_product(record) for record in trace):
        return []
    return [*odd_shapes(trace), *launch_bound(trace), *cast_traffic(trace, api)]


def odd_shapes(trace: Trace) -> Iterator[Finding]:
    """16-bit products with a side that is not a multiple of 8, where they are most of the work."""
    products = [record for record in trace if is_half_product(record)]
    work = {record.index: multiply_adds(record) for record in products}
    odd = [record for record in products if any(side % MULTIPLE for side in sides(record))]
    total, off = sum(work.values()), sum(work[record.index] for record in odd)
    if odd and off > OFF * total:
        worst = max(odd, key=lambda record: work[record.index])
        shape = " x ".join(map(str, sides(worst)))
        yield finding(
            "shapes-not-multiple-of-8",
            certainty="likely",
            op=worst.op,
            module=worst.module,
            evidence={"share": off / total, "sides": shape, "products": len(odd)},
        )


def launch_bound(trace: Trace) -> Iterator[Finding]:
    """A step whose median op is smaller than `TINY`."""
    sizes = [max(info.numel for info in record.outputs) for record in trace if not record.folds and record.outputs]
    if sizes and statistics.median(sizes) < TINY:
        evidence: dict[str, Number] = {"median_elements": statistics.median(sizes), "ops": len(sizes)}
        yield finding("launch-bound", certainty="possible", evidence=evidence)


def cast_traffic(trace: Trace, api: Api | None = None) -> Iterator[Finding]:
    """Casts that move more than `CASTS` times the bytes of all other ops."""
    moved = sum(info.nbytes for record in trace if _computes(record) for info in (*record.inputs, *record.outputs))
    if moved and trace.cast_bytes > CASTS * moved:
        modules = {record.module: 0 for record in trace.casts}
        for record in trace.casts:
            modules[record.module] += record.cast_bytes
        worst = max(modules, key=lambda module: modules[module])
        yield finding(
            "cast-traffic",
            "weights" if _casts_each_weight_once(trace) else "",
            api=api,
            certainty="likely",
            module=worst,
            evidence={"cast_bytes": trace.cast_bytes, "op_bytes": moved, "casts": len(trace.casts)},
            share=trace.cast_bytes / moved,
        )


def _casts_each_weight_once(trace: Trace) -> bool:
    """Whether weights are cast in forward, none of them twice: one region already surrounds what uses them."""
    names = [record.parameter for record in trace.casts if record.phase == "forward" and record.parameter]
    return bool(names) and len(names) == len(set(names))


def _computes(record: OpRecord) -> bool:
    return not (record.is_cast or record.is_view)
