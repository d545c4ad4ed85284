"""Casts inside PyTorch's dispatcher: a boxed C++ kernel that executes a cast plan, op by op.

A plan is one mark for each registered overload (`CASTS`, plus `PRODUCT` if float16 on a CPU is multiplied with fp32
accumulation, plus `ON_CPU` if only CPU tensors are cast) and a dtype to compute in. The kernel is registered once per
process under an autocast key that PyTorch does not use, and does nothing until a thread enters a plan. torch.autocast
has other keys and is not affected.
`amplab.policies.CompiledEngine` makes the plans.

Nothing is built or registered on import.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch

from amplab.kernels.builder import BuildReport, KernelLibrary
from amplab.kernels.builder.recipe import casts_recipe
from amplab.kernels.fork_renewal import renew_lock_in_forks

__all__ = ["CASTS", "ON_CPU", "PRODUCT", "CastPlan", "DispatchCasts", "overloads"]

CASTS = ("none", "lower", "float32", "set_dtype", "promote", "match_self", "banned", "banned_in_place")
"""The meaning of each mark; the order is that of the C++ source."""

PRODUCT = 0x80
"""Added to the mark of an op that multiplies and accumulates."""

ON_CPU = 0x40
"""Added to the mark of an op that is cast only if one of its tensors is on the CPU."""

_DTYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}  # c10::ScalarType
_LIBRARY = KernelLibrary(casts_recipe)


class CastPlan:
    """A plan in the form that the kernel reads; deleted with this object.

    Args:
        casts: one mark for each registered overload, in the order of registration.
        dtype: float16, bfloat16 or float32: what "lower" casts to.
        accumulates: whether products of float16 on a CPU are computed in float32 and rounded once.
    """

    def __init__(self, library: ctypes.PyDLL, casts: bytes, dtype: torch.dtype, *, accumulates: bool) -> None:
        self.address = library.amplab_cast_plan(casts, len(casts), _DTYPES[dtype], accumulates)
        weakref.finalize(self, library.amplab_cast_forget, self.address)


class DispatchCasts:
    """The loaded kernel. One per process: `DispatchCasts.load()`.

    Attributes:
        report: its build status.
        enter: (address of a plan or None, graph task, torch nesting) -> None: make it the plan of the calling thread
            for the ops of that graph task, outside disabled regions of torch.autocast; None ends it. Sync: none.
        task: () -> int: the backward pass of the calling thread; -1 outside of one.
        torch_nesting: () -> int: how many regions of torch.autocast are open in the calling thread.
    """

    _lock = threading.RLock()  # taken while the kernel is built
    _loaded: DispatchCasts | None = None

    def __init__(self, report: BuildReport) -> None:
        self.report = report
        [library] = report.libraries
        self._library = _typed(ctypes.PyDLL(str(library)))
        # No wrapper: they are called once per region.
        self.enter, self.task, self.torch_nesting = (
            self._library.amplab_cast_enter,
            self._library.amplab_cast_task,
            self._library.amplab_cast_torch_nesting,
        )
        self._places: dict[str, int] = {}

    @classmethod
    def load(cls) -> DispatchCasts:
        """Return the kernel; build it first if this machine has no build.

        Raises:
            RuntimeError: it cannot be built; the message gives the cause and the remedy.
        """
        with cls._lock:
            if cls._loaded is None:
                cls._loaded = cls(_LIBRARY.require())
            return cls._loaded

    def place(self, overload: str, refusal: str = "") -> int | None:
        """Register an overload such as "add.Tensor" and return its place in a plan; None if torch has no such op.

        Args:
            overload: name without "aten::".
            refusal: the message of the error if the op is banned.
        """
        if overload not in self._places:
            self._places[overload] = self._library.amplab_cast_op(overload.encode(), refusal.encode())
        place = self._places[overload]
        return None if place < 0 else place

    def plan(self, marks: dict[int, int], dtype: torch.dtype, *, accumulates: bool) -> CastPlan:
        """Return a plan. `marks` gives the cast of an op (an index into `CASTS`) by its place; ops that are not in it
        are not cast.
        """
        casts = bytearray(len(self._places))
        for place, mark in marks.items():
            casts[place] = mark
        return CastPlan(self._library, bytes(casts), dtype, accumulates=accumulates)

    def clear(self) -> None:
        """Drop the cached weight casts of the calling thread."""
        self._library.amplab_cast_clear()

    @property
    def kept(self) -> int:
        """The number of cached weight casts of the calling thread."""
        return int(self._library.amplab_cast_kept())


renew_lock_in_forks(DispatchCasts, "_lock")


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
    """Declare the types of the functions; by default ctypes passes C ints, which are too short for an address."""
    for name, result, *arguments in (
        ("amplab_cast_op", ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p),
        ("amplab_cast_plan", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        ("amplab_cast_forget", None, ctypes.c_void_p),
        ("amplab_cast_task", ctypes.c_int64),
        ("amplab_cast_torch_nesting", ctypes.c_int64),
        ("amplab_cast_enter", None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        ("amplab_cast_clear", None),
        ("amplab_cast_kept", ctypes.c_int64),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
