"""Run CUDA calls on the CPU, for this process: the only file in which amplab replaces names of other packages.

    tensor.cuda(), .to("cuda"), device="cuda"   the CPU; a tensor on the CPU is returned unchanged
    torch.cuda.FloatTensor, map_location        their CPU counterparts
    torch.cuda.is_available(), device_count()   True, 1
    streams, events, synchronize, empty_cache   do nothing: all work is done when a call returns
    manual_seed, get_rng_state, …               the CPU's generator
    memory counters                             0
    pin_memory                                  off
    DataParallel, device_ids, backend "nccl"    the module itself, no device_ids, "gloo"
    nn.SyncBatchNorm                            exchanges statistics over gloo

This runs only for ``amplab run --device cpu``. Code compiled by TorchScript, ``is_cuda`` and ``torch.device("cuda")``
do not change; a device of type cuda is replaced by the functions that receive it.
"""

import collections
import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from amplab.parallel.sync_batchnorm import sync_batch_norm_on_cpu
from amplab.scripts.cpu_streams import DEVICE_NAME, Event, Scope, Stream, device_properties, generator_on

__all__ = ["CudaOnCpu", "ReplacedNames", "cuda_on_cpu"]

_ABSENT = object()
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
CPU = torch.device("cpu")
FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_strided",
    "eye", "full", "full_like", "hamming_window", "hann_window", "linspace", "logspace", "normal", "ones", "ones_like",
    "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor",
    "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
NEW_METHODS = ("new_tensor", "new_full", "new_empty", "new_ones", "new_zeros")
TENSOR_TYPES = tuple(
    f"{name}Tensor" for name in ("Half", "BFloat16", "Float", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")
)
STREAM_CALLS = {
    "current_stream": Stream, "default_stream": Stream, "stream": Scope, "device": Scope, "device_of": Scope,
}  # fmt: skip
IDLE_CALLS = (
    "init", "synchronize", "empty_cache", "ipc_collect", "set_device", "set_stream", "set_per_process_memory_fraction",
)  # fmt: skip
MEMORY_COUNTERS = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached",
)  # fmt: skip
MEMORY_RESETS = (
    "reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached",
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
        self._say = say
        self._said: set[str] = set()
        self._names = ReplacedNames()
        for replace in (
            self._replace_moves, self._replace_factories, self._replace_types, self._replace_questions,
            self._replace_idle, self._replace_random, self._replace_memory, self._replace_wrappers,
            self._replace_autocast,
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
        self._names.restore()
        if self in _IN_FORCE:
            _IN_FORCE.remove(self)

    # -- tensors and modules -----------------------------------------------------------------------

    def _replace_moves(self) -> None:
        note = ".cuda() leaves tensors and modules on the CPU"
        for owner in (Tensor, nn.Module, torch.UntypedStorage, torch.TypedStorage):
            self._stand_in(owner, "cuda", note, lambda self, *_args, **_kwargs: self)
        self._stand_in(Tensor, "pin_memory", "pin_memory does nothing", lambda self, *_args, **_kwargs: self)
        self._stand_in(Tensor, "record_stream", "streams and events do nothing", _nothing)
        for owner in (Tensor, nn.Module):
            self._adapt(owner, "to", self._moved)
        self._adapt(Tensor, "type", self._typed)
        self._adapt(torch, "load", self._loaded)
        self._adapt(torch, "set_default_device", self._moved_argument)

    def _replace_factories(self) -> None:
        for name in FACTORIES:
            own = getattr(torch, name)
            self._adapt(torch, name, self._made)
            _tell_torchscript(getattr(torch, name), own)
        for name in NEW_METHODS:
            self._adapt(Tensor, name, self._made)

    def _replace_types(self) -> None:
        for name in TENSOR_TYPES:
            own = getattr(torch, name)
            tell = functools.partial(self._tell, f"torch.cuda.{name} is torch.{name}")
            self._names.replace(torch.cuda, name, _TensorType(own, tell))
        self._adapt(torch, "set_default_tensor_type", lambda args, kwargs: (tuple(map(_cpu_type, args)), kwargs))

    # -- torch.cuda --------------------------------------------------------------------------------

    def _replace_questions(self) -> None:
        answers = {
            "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
            "is_current_stream_capturing": False, "can_device_access_peer": False, "get_device_capability": (7, 0),
            "get_device_name": DEVICE_NAME,
        }  # fmt: skip
        self._stand_in(Tensor, "get_device", "Tensor.get_device() is 0", _answering(0))
        for name, answer in answers.items():
            self._stand_in(torch.cuda, name, f"torch.cuda.{name}() is {answer!r}", _answering(answer))
        note = "torch.cuda.get_device_properties() describes the CPU"
        self._stand_in(torch.cuda, "get_device_properties", note, device_properties)

    def _replace_idle(self) -> None:
        for name in IDLE_CALLS:
            self._stand_in(torch.cuda, name, f"torch.cuda.{name}() does nothing", _nothing)
        for name, answer in STREAM_CALLS.items():
            self._stand_in(torch.cuda, name, "streams and events do nothing", answer)
        self._names.replace(torch.cuda, "Stream", Stream)
        self._names.replace(torch.cuda, "Event", Event)
        for name in ("range_push", "range_pop", "mark"):
            self._stand_in(torch.cuda.nvtx, name, "nvtx marks are dropped", _nothing)
        for name in ("start", "stop"):
            self._stand_in(torch.cuda.profiler, name, "torch.cuda.profiler does nothing", _nothing)

    def _replace_random(self) -> None:
        self._names.replace(torch, "Generator", generator_on(self._device))
        generator = torch.default_generator  # torch.manual_seed would call these functions again
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
            self._stand_in(torch.cuda, name, f"torch.cuda.{name}() uses the CPU's generator", call)

    def _replace_memory(self) -> None:
        for names, answer in ((MEMORY_COUNTERS, _answering(0)), (MEMORY_RESETS, _nothing)):
            for name in names:
                self._stand_in(torch.cuda, name, "memory counters of torch.cuda are 0", answer)
        for name, value in {
            "memory_stats": collections.defaultdict(int),
            "memory_summary": "",
            "mem_get_info": (0, 0),
        }.items():
            self._stand_in(torch.cuda, name, "memory counters of torch.cuda are 0", _answering(value))

    # -- torch's own autocast ----------------------------------------------------------------------

    def _replace_autocast(self) -> None:
        self._adapt(torch.autocast, "__init__", self._autocast_on_cpu)
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            self._adapt(
                torch, name, lambda args, kwargs: (("cpu",), {}) if _asks_for_cuda(args, kwargs) else (args, kwargs)
            )

    # -- what wraps models and data ----------------------------------------------------------------

    def _replace_wrappers(self) -> None:
        single = "DataParallel runs the module itself"
        self._stand_in(nn.DataParallel, "__init__", single, _wrap_in_nothing)
        self._stand_in(nn.parallel, "data_parallel", single, _call_itself)
        self._adapt(torch.utils.data.DataLoader, "__init__", self._unpinned)
        if torch.distributed.is_available():
            self._adapt(nn.parallel.DistributedDataParallel, "__init__", self._without_device_ids)
            self._names.replace(nn.SyncBatchNorm, "forward", sync_batch_norm_on_cpu)
            self._names.replace(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", _nothing)
            for name in ("init_process_group", "new_group"):
                self._adapt(torch.distributed, name, self._by_gloo)

    # -- arguments: (args, kwargs) as given -> as they are passed on ---------------------------------

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        return (*args[:1], *map(self._device, args[1:2]), *args[2:]), self._with_device(kwargs)

    def _moved_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        return tuple(map(self._device, args)), self._with_device(kwargs)

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        return args, self._with_device(self._without(kwargs, "pin_memory")) if kwargs else kwargs

    def _typed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        cpu = (*args[:1], *map(_cpu_type, args[1:2]), *args[2:])
        return cpu, {name: _cpu_type(value) if name == "dtype" else value for name, value in kwargs.items()}

    def _loaded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        given = args[1] if len(args) > 1 else kwargs.get("map_location")
        location: Any
        if callable(given):
            location = _staying(given)
        elif isinstance(given, str | torch.device) and _on_cpu(given) is given:
            location = given
        else:
            self._tell("torch.load puts tensors on the CPU")
            location = CPU
        return (*args[:1], *args[2:]), {**kwargs, "map_location": location}

    def _autocast_on_cpu(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        own, *words = args
        named = dict(zip(("device_type", "dtype", "enabled", "cache_enabled"), words, strict=False)) | kwargs
        if named.get("device_type") != "cuda":
            return args, kwargs
        self._tell("autocast for cuda is torch's autocast for the CPU, which has other op lists")
        return (own,), {**named, "device_type": "cpu", "dtype": named.get("dtype") or torch.float16}

    def _unpinned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        return args, self._without(kwargs, "pin_memory")

    def _without_device_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        ids = (*args[2:4], kwargs.get("device_ids"), kwargs.get("output_device"))
        if any(value is not None for value in ids):
            self._tell("DistributedDataParallel gets no device_ids")
        return (*args[:2], *(None for _ in args[2:4]), *args[4:]), {**kwargs, **_NO_IDS} if len(args) < 3 else kwargs

    def _by_gloo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        if "nccl" in [*args[:1], kwargs.get("backend")]:
            self._tell("backend nccl is gloo")
        args = tuple("gloo" if value == "nccl" else value for value in args)
        return args, {name: "gloo" if value == "nccl" else value for name, value in kwargs.items()}

    def _with_device(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "device": self._device(kwargs["device"])} if "device" in kwargs else kwargs

    def _without(self, kwargs: dict[str, Any], name: str) -> dict[str, Any]:
        if not kwargs.get(name):
            return kwargs
        self._tell(f"{name} does nothing")
        return {**kwargs, name: False}

    def _device(self, value: Any) -> Any:
        moved = _on_cpu(value)
        if moved is not value:
            self._tell("device cuda is the CPU")
        return moved

    # -- putting in place --------------------------------------------------------------------------

    def _stand_in(self, owner: Any, name: str, note: str, answer: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``answer``, which reports ``note`` at its first call."""

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if note not in self._said and not _torch_calls():
                self._tell(note)
            return answer(*args, **kwargs)

        stand_in.__name__ = name
        self._names.replace(owner, name, stand_in)

    def _adapt(self, owner: Any, name: str, arguments: Callable[..., Any]) -> None:
        """Make ``owner.name`` receive its arguments through ``arguments``."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def adapted(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = arguments(args, kwargs)
            return own(*args, **kwargs)

        self._names.replace(owner, name, adapted)

    def _tell(self, note: str) -> None:
        """Report ``note``, once."""
        if note not in self._said:
            self._said.add(note)
            self._say(note)


class ReplacedNames:
    """Replaces attributes of modules and classes until `restore`.

    >>> class Color:
    ...     name = "red"
    >>> replaced = ReplacedNames()
    >>> replaced.replace(Color, "name", "blue")
    >>> Color.name
    'blue'
    >>> replaced.restore()
    >>> Color.name
    'red'
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value``; `restore` deletes a name that ``owner`` did not define itself."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Undo every `replace`, the last one first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class _TensorType:
    """``torch.cuda.FloatTensor``: makes and recognizes tensors of the CPU type."""

    def __init__(self, own: Any, tell: Callable[[], None]) -> None:
        self.own, self._tell = own, tell

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self._tell()
        kwargs.pop("device", None)
        made: Tensor = self.own(*args, **kwargs)
        return made

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self.own)


_IN_FORCE: list[CudaOnCpu] = []
_NO_IDS: dict[str, Any] = {"device_ids": None, "output_device": None}


def _say_on_stderr(note: str) -> None:
    print(f"amplab --device cpu: {note}", file=sys.stderr)  # noqa: T201


def _torch_calls() -> bool:
    """Return whether torch or this package made the redirected call, and not the user's code."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "amplab")


def _on_cpu(value: Any) -> Any:
    """Return ``value``, or the CPU if it names a CUDA device: "cuda:1", torch.device("cuda"), 1."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return CPU if value.partition(":")[0] == "cuda" else value
    return CPU if isinstance(value, int) and not isinstance(value, bool) else value


def _asks_for_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a query about autocast means CUDA: it names CUDA or, in the old spelling, no device."""
    return (*args, *kwargs.values()) in ((), ("cuda",))


def _cpu_type(value: Any) -> Any:
    if isinstance(value, _TensorType):
        return value.own
    return value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value


def _staying(locate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``map_location`` that keeps on the CPU what ``locate`` leaves to torch."""

    def stay(storage: Any, location: str) -> Any:
        located = locate(storage, location)
        return storage if located is None else located

    return stay


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


def _tell_torchscript(adapted: Callable[..., Any], own: Callable[..., Any]) -> None:
    """Let code that TorchScript compiles later find the operation of a replaced name."""
    operation = torch.jit._builtins._find_builtin(own)
    if operation is not None:
        torch.jit._builtins._register_builtin(adapted, operation)
