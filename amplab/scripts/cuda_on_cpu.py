"""Run CUDA calls on the CPU, for this process: the only part of amplab that replaces names of other packages.

    tensor.cuda(), .to("cuda"), device="cuda"   the CPU; a move to the other side copies (`sides`, `cpu_tensors`)
    torch.cuda.FloatTensor, map_location        their CPU counterparts; .type() and isinstance tell the side
    torch.autocast("cuda"), torch.cuda.amp      amplab.autocast on the CPU, with the lists of CUDA (`cpu_autocast`)
    torch.cuda.*                                `cuda_names` lists every name
    torch.version.cuda, cudnn.version()         a version, where torch is built without CUDA
    streams, events, synchronize, empty_cache   do nothing: all work is done when a call returns
    manual_seed, get_rng_state, …               the CPU's generator
    memory counters                             those of the process (`host_memory`)
    pin_memory                                  off
    DataParallel, device_ids, backend "nccl"    the module itself, no device_ids, "gloo"
    nn.SyncBatchNorm                            exchanges statistics over gloo

This runs only for ``amplab run --device cpu``. Code compiled by TorchScript, ``is_cuda`` and ``torch.device("cuda")``
do not change; a device of type cuda is replaced by the functions that receive it.
"""

import collections
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from amplab.parallel.sync_batchnorm import sync_batch_norm_on_cpu
from amplab.scripts.cpu_autocast import redirect_autocast
from amplab.scripts.cpu_streams import Event, Scope, Stream, device_properties, generator_on
from amplab.scripts.cpu_tensors import on_cpu, redirect_tensors
from amplab.scripts.cuda_names import ANSWERS, CUDA_VERSION, CUDNN_VERSION, IDLE, REFUSED, refusal_of
from amplab.scripts.host_memory import HostMemory
from amplab.scripts.redirection import Redirection
from amplab.scripts.user_lines import point_warnings_at_the_script

__all__ = ["CudaOnCpu", "cuda_on_cpu"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
STREAM_CALLS = {
    "current_stream": Stream, "default_stream": Stream, "stream": Scope, "caching_allocator_disabled": Scope,
}  # fmt: skip
STREAM_CLASSES: dict[str, type] = {
    "Stream": Stream, "Event": Event, "StreamContext": Scope, "device": Scope, "device_of": Scope,
}  # fmt: skip
HELD = ("memory_allocated", "memory_reserved", "memory_cached")
PEAKS = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
PEAK_RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")
OTHER_RESETS = (
    "reset_accumulated_memory_stats", "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats",
)  # fmt: skip


def cuda_on_cpu(say: Callable[[str], object] | None = None) -> "CudaOnCpu":
    """Run CUDA calls on the CPU from now on, in every thread.

    Args:
        say: called once for each kind of redirected call, with a line that names it; None prints the line to stderr.

    Returns:
        An object whose ``undo()`` ends this, as does the end of a ``with`` block; the same object until then.
    """
    if not _IN_FORCE:
        _IN_FORCE.append(CudaOnCpu(say or _say_on_stderr))
    return _IN_FORCE[-1]


class CudaOnCpu:
    """The redirections in force; `cuda_on_cpu` makes it."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._redirection = Redirection(say)
        redirect_tensors(self._redirection)
        redirect_autocast(self._redirection)
        point_warnings_at_the_script(self._redirection)
        for replace in (
            self._replace_questions, self._replace_idle, self._replace_random, self._replace_memory,
            self._replace_wrappers, self._refuse,
        ):  # fmt: skip
            replace()

    def __enter__(self) -> "CudaOnCpu":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def undo(self) -> None:
        """Restore torch's own names. A second call does nothing."""
        self._redirection.undo()
        if self in _IN_FORCE:
            _IN_FORCE.remove(self)

    # -- torch.cuda --------------------------------------------------------------------------------

    def _replace_questions(self) -> None:
        self._redirection.stand_in(Tensor, "get_device", "Tensor.get_device() is 0", _answering(0))
        for name, answer in ANSWERS.items():
            self._stand_in(name, f"torch.cuda.{name}() is {answer!r}", _answering(answer))
        self._stand_in(
            "get_device_properties", "torch.cuda.get_device_properties() describes the CPU", device_properties
        )
        if not torch.backends.cuda.is_built():  # which amplab's own builds ask
            self._redirection.replace(torch.version, "cuda", CUDA_VERSION)
            note = f"torch.backends.cudnn.version() is {CUDNN_VERSION}"
            self._redirection.stand_in(torch.backends.cudnn, "version", note, _answering(CUDNN_VERSION))
            note = "torch.backends.cudnn.is_available() is True"
            self._redirection.stand_in(torch.backends.cudnn, "is_available", note, _answering(True))

    def _replace_idle(self) -> None:
        for name in IDLE:
            note = "nvtx marks are dropped" if name.startswith("nvtx.") else f"torch.cuda.{name}() does nothing"
            self._stand_in(name, note, _nothing)
        streams = "streams and events do nothing"
        for name, answer in STREAM_CALLS.items():
            self._stand_in(name, streams, answer)
        self._redirection.stand_in(Tensor, "record_stream", streams, _nothing)
        for name, value in STREAM_CLASSES.items():
            self._replace(name, value)

    def _replace_random(self) -> None:
        self._redirection.replace(torch, "Generator", generator_on(self._device))
        generator = torch.default_generator  # torch.manual_seed would call these functions again
        self._replace("default_generators", (generator,))
        calls: dict[str, Callable[..., Any]] = {
            "manual_seed": lambda seed: _nothing(generator.manual_seed(int(seed))),
            "manual_seed_all": lambda seed: _nothing(generator.manual_seed(int(seed))),
            "seed": lambda: _nothing(generator.seed()),
            "seed_all": lambda: _nothing(generator.seed()),
            "initial_seed": generator.initial_seed,
            "get_rng_state": lambda *_args, **_kwargs: generator.get_state(),
            "get_rng_state_all": lambda: [generator.get_state()],
            "set_rng_state": lambda new_state, *_args, **_kwargs: _nothing(generator.set_state(new_state)),
            "set_rng_state_all": lambda new_states: _nothing(generator.set_state(next(iter(new_states)))),
        }
        for name, call in calls.items():
            self._stand_in(name, f"torch.cuda.{name}() uses the CPU's generator", call)

    def _replace_memory(self) -> None:
        memory = HostMemory()
        calls: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(HELD, lambda *_args, **_kwargs: memory.held()),
            **dict.fromkeys(PEAKS, lambda *_args, **_kwargs: memory.peak()),
            **dict.fromkeys(PEAK_RESETS, lambda *_args, **_kwargs: _nothing(memory.reset_peak())),
            **dict.fromkeys(OTHER_RESETS, _nothing),
            "memory_stats": lambda *_args, **_kwargs: _memory_stats(memory),
            "memory_stats_as_nested_dict": lambda *_args, **_kwargs: {},
            "host_memory_stats": lambda: collections.defaultdict(int),
            "host_memory_stats_as_nested_dict": dict,
            "memory_summary": lambda *_args, **_kwargs: f"held {memory.held()} bytes, at most {memory.peak()} bytes",
            "mem_get_info": lambda *_args, **_kwargs: memory.of_the_machine(),
        }
        for name, call in calls.items():
            self._stand_in(name, memory.note, call)

    def _refuse(self) -> None:
        for name in REFUSED:
            self._replace(name, _refusing(name))

    def _stand_in(self, name: str, note: str, answer: Callable[..., Any]) -> None:
        self._replace(name, self._redirection.noted(name.rpartition(".")[2], note, answer))

    def _replace(self, name: str, value: Any) -> None:
        for owner, last in _places(name):
            self._redirection.replace(owner, last, value)

    # -- what wraps models and data ----------------------------------------------------------------

    def _replace_wrappers(self) -> None:
        redirection, single = self._redirection, "DataParallel runs the module itself"
        redirection.stand_in(nn.DataParallel, "__init__", single, _wrap_in_nothing)
        redirection.stand_in(nn.parallel, "data_parallel", single, _call_itself)
        redirection.adapt(torch.utils.data.DataLoader, "__init__", self._unpinned)
        if torch.distributed.is_available():
            redirection.adapt(nn.parallel.DistributedDataParallel, "__init__", self._without_device_ids)
            redirection.replace(nn.SyncBatchNorm, "forward", sync_batch_norm_on_cpu)
            redirection.replace(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", _nothing)
            for name in ("init_process_group", "new_group"):
                redirection.adapt(torch.distributed, name, self._by_gloo)

    # -- arguments: (args, kwargs) as given -> as they are passed on ---------------------------------

    def _unpinned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        if not kwargs.get("pin_memory"):
            return args, kwargs
        self._redirection.tell("pin_memory does nothing")
        return args, {**kwargs, "pin_memory": False}

    def _without_device_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        ids = (*args[2:4], kwargs.get("device_ids"), kwargs.get("output_device"))
        if any(value is not None for value in ids):
            self._redirection.tell("DistributedDataParallel gets no device_ids")
        return (*args[:2], *(None for _ in args[2:4]), *args[4:]), {**kwargs, **_NO_IDS} if len(args) < 3 else kwargs

    def _by_gloo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        if "nccl" in [*args[:1], kwargs.get("backend")]:
            self._redirection.tell("backend nccl is gloo")
        args = tuple("gloo" if value == "nccl" else value for value in args)
        return args, {name: "gloo" if value == "nccl" else value for name, value in kwargs.items()}

    def _device(self, value: Any) -> Any:
        device = on_cpu(value)
        if device is not value:
            self._redirection.tell("device cuda is the CPU")
        return device


_IN_FORCE: list[CudaOnCpu] = []
_NO_IDS: dict[str, Any] = {"device_ids": None, "output_device": None}


def _say_on_stderr(note: str) -> None:
    print(f"amplab --device cpu: {note}", file=sys.stderr)  # noqa: T201


def _places(name: str) -> list[tuple[Any, str]]:
    """Return where ``torch.cuda.<name>`` is defined too: ``torch.cuda.random.seed`` is ``torch.cuda.seed``."""
    path, _, last = name.rpartition(".")
    if path:
        return [(getattr(torch.cuda, path), last)] if hasattr(torch.cuda, path) else []
    homes = (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams, torch.cuda.graphs)
    own = getattr(torch.cuda, name, None)
    return [(home, name) for home in homes if home is torch.cuda or vars(home).get(name, home) is own]


def _refusing(name: str) -> type:
    """Return the replacement of ``torch.cuda.<name>``: a class, for isinstance, that raises if it is called."""

    def refuse(cls: type, *_args: Any, **_kwargs: Any) -> Any:
        del cls
        raise RuntimeError(refusal_of(name))

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__module__": "torch.cuda"})


def _memory_stats(memory: HostMemory) -> dict[str, int]:
    """Return torch.cuda.memory_stats() with the bytes that are known; all else is 0."""
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    now = {f"{kind}.all.current": memory.held() for kind in kinds}
    return collections.defaultdict(int, now | {f"{kind}.all.peak": memory.peak() for kind in kinds})


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer


def _wrap_in_nothing(
    self: "nn.DataParallel[nn.Module]", module: nn.Module, *_args: Any, dim: int = 0, **_kwargs: Any
) -> None:
    """Initialize a DataParallel as torch does without a device."""
    nn.Module.__init__(self)
    self.dim, self.module, self.device_ids = dim, module, []


def _call_itself(
    module: nn.Module, inputs: Any, *_args: Any, module_kwargs: dict[str, Any] | None = None, **_kwargs: Any
) -> Any:
    return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))
