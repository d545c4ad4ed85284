"""What happened in one training step: every op with its dtypes, its place in the model and the reason."""

from amplab.trace.records import OpRecord, TensorInfo, Trace
from amplab.trace.step import trace_step

__all__ = ["trace_step", "Trace", "OpRecord", "TensorInfo"]
