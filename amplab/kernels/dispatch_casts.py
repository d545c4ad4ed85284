"""Casts inside PyTorch's dispatcher: a boxed kernel in C++ that carries out a plan, op by op.

A plan is one mark for each registered overload (`CASTS`, with `PRODUCT` added where halves on a CPU may be multiplied
with fp32 accumulation) and a dtype to compute in. The kernel hangs on an autocast key that PyTorch itself leaves
empty, registered once per process and silent until a thread enters a plan; torch.autocast, which has keys of its own,
is not touched. Who makes plans is `amplab.policies.CompiledEngine`.

Nothing is built or registered on import.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch

from amplab.kernels.build import BuildReport, KernelLibrary
from amplab.kernels.recipe import casts_recipe

__all__ = ["CASTS", "PRODUCT", "CastPlan", "DispatchCasts", "overloads"]

CASTS = ("none", "lower", "float32", "set_dtype", "promote", "match_self", "banned", "banned_in_place")
"""What a mark means, by its number; in the order of the C++ source."""

PRODUCT = 0x80
"""Added to the mark of an op that multiplies and accumulates."""

_DTYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}  # c10::ScalarType
_LIBRARY = KernelLibrary(casts_recipe)


class CastPlan:
    """A plan as the kernel reads it; lives as long as this object.

    Args:
        casts: one mark for each registered overload, in the order of registration.
        dtype: float16, bfloat16 or float32: what "lower" casts to.
        accumulates: whether products of CPU halves are computed in float32 and rounded once.
    """

    def __init__(self, library: ctypes.PyDLL, casts: bytes, dtype: torch.dtype, *, accumulates: bool) -> None:
        self.address = library.amplab_cast_plan(casts, len(casts), _DTYPES[dtype], accumulates)
        weakref.finalize(self, library.amplab_cast_forget, self.address)


class DispatchCasts:
    """The loaded kernel. One per process: `DispatchCasts.load()`.

    Attributes:
        report: how it was built or loaded.
        enter: (address of a plan or None, graph task) -> None: make it the calling thread's, for the ops of that graph
            task; None ends it. Sync: none.
        task: () -> int: the backward pass that the calling thread is in; -1 outside of one.
    """

    _lock = threading.Lock()
    _loaded: DispatchCasts | None = None

    def __init__(self, report: BuildReport) -> None:
        self.report = report
        [library] = report.libraries
        self._library = _typed(ctypes.PyDLL(str(library)))
        self.enter, self.task = self._library.amplab_cast_enter, self._library.amplab_cast_task  # once a region: direct
        self._places: dict[str, int] = {}

    @classmethod
    def load(cls) -> DispatchCasts:
        """Return the kernel, built first where it is not there yet, once per machine.

        Raises:
            RuntimeError: It cannot be built; says why and what to do.
        """
        with cls._lock:
            if cls._loaded is None:
                cls._loaded = cls(_LIBRARY.require())
            return cls._loaded

    def place(self, overload: str, refusal: str = "") -> int | None:
        """Register an overload such as "add.Tensor" and return its place in a plan; None where torch has no such op.

        Args:
            overload: name without "aten::".
            refusal: what the error says where the op is banned.
        """
        if overload not in self._places:
            self._places[overload] = self._library.amplab_cast_op(overload.encode(), refusal.encode())
        place = self._places[overload]
        return None if place < 0 else place

    def plan(self, marks: dict[int, int], dtype: torch.dtype, *, accumulates: bool) -> CastPlan:
        """Return a plan from place -> mark; places that are not named are left alone."""
        casts = bytearray(len(self._places))
        for place, mark in marks.items():
            casts[place] = mark
        return CastPlan(self._library, bytes(casts), dtype, accumulates=accumulates)

    def clear(self) -> None:
        """Drop the casts of weights that the calling thread keeps."""
        self._library.amplab_cast_clear()

    @property
    def kept(self) -> int:
        """How many casts of weights the calling thread keeps."""
        return self._library.amplab_cast_kept()


def overloads(names: Sequence[str]) -> Iterator[str]:
    """Yield the overloads of ATen ops that a plan can name: all but those that write into `out`.

    >>> sorted(overloads(["mm"]))
    ['mm', 'mm.dtype']
    """
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            schema = getattr(packet, overload)._schema
            if not any(argument.is_out for argument in schema.arguments):
                yield name if overload == "default" else f"{name}.{overload}"


def _typed(library: ctypes.PyDLL) -> ctypes.PyDLL:
    """Say what the functions take and return; ctypes takes ints for C ints, and an address is longer."""
    for name, result, *arguments in (
        ("amplab_cast_op", ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p),
        ("amplab_cast_plan", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        ("amplab_cast_forget", None, ctypes.c_void_p),
        ("amplab_cast_task", ctypes.c_int64),
        ("amplab_cast_enter", None, ctypes.c_void_p, ctypes.c_int64),
        ("amplab_cast_clear", None),
        ("amplab_cast_kept", ctypes.c_int64),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
