"""What a call costs: the operators that it calls, and its time on one thread. For lessons 07 and 13."""

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from amplab.trace.dispatch_mode import DispatchMode, run_op

__all__ = ["milliseconds", "operators_called"]


class _Counter(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        return run_op(func, args, kwargs)


def operators_called(function: Callable[[], object]) -> int:
    """Return how many operators of PyTorch ``function`` calls; on a GPU most of them launch a kernel."""
    counter = _Counter()
    with counter:
        function()
    return counter.calls


def milliseconds(function: Callable[[], object], seconds: float = 0.05) -> float:
    """Return the median time of ``function`` on one thread, repeated for about so many ``seconds``."""
    # Not torch.utils.benchmark: its import looks for CUDA, and prints a warning if the toolkit is there without a GPU.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        function()  # the first call is slower
        times: list[float] = []
        end = perf_counter() + seconds
        while not times or perf_counter() < end:
            start = perf_counter()
            function()
            times.append(perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 1000 * statistics.median(times)
