"""What happened in one training step: every op with its dtypes, its module and the reason for its dtypes."""

from amplab.trace.gradient_range import GradientRange, gradient_range
from amplab.trace.lines import CodeLine
from amplab.trace.records import OpRecord, TensorInfo, Trace
from amplab.trace.step import trace_step
from amplab.trace.xray import xray
from amplab.trace.xray_difference import XRayDifference
from amplab.trace.xray_value import Cast, XRay

__all__ = [
    "trace_step",
    "Trace",
    "OpRecord",
    "TensorInfo",
    "CodeLine",
    "xray",
    "XRay",
    "Cast",
    "XRayDifference",
    "gradient_range",
    "GradientRange",
]
