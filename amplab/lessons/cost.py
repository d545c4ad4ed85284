"""What a call costs: the operators that it calls, and its time on one thread. For lessons 07 and 13."""

from collections.abc import Callable
from typing import Any

from torch.utils.benchmark import Timer

from amplab.trace.dispatch_mode import DispatchMode

__all__ = ["milliseconds", "operators_called"]


class _Counter(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operators_called(function: Callable[[], object]) -> int:
    """Return how many operators of PyTorch ``function`` calls; on a GPU most of them launch a kernel."""
    counter = _Counter()
    with counter:
        function()
    return counter.calls


def milliseconds(function: Callable[[], object], seconds: float = 0.05) -> float:
    """Return the median time of ``function`` on one thread, repeated for about so many ``seconds``."""
    timer = Timer("function()", globals={"function": function}, num_threads=1)
    return 1000 * float(timer.blocked_autorange(min_run_time=seconds).median)
