"""Tensors while CUDA calls run on the CPU: moves, factories, tensor types, checkpoints and modules.

`cuda_on_cpu` puts these functions in place of torch's; `sides` knows which tensors stand for those of a GPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amplab.scripts.redirection import Redirection
from amplab.scripts.sides import (
    CPU,
    CUDA,
    HOST,
    PINNED,
    STANDS_FOR,
    copied,
    device_of,
    is_marked,
    mark,
    mark_storage,
    moved,
    side_of,
    side_of_device,
    side_of_storage,
)

__all__ = ["FACTORIES", "STORAGE_TYPES", "TENSOR_TYPES", "on_cpu", "redirect_tensors"]

FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_strided",
    "eye", "full", "full_like", "hamming_window", "hann_window", "linspace", "logspace", "normal", "ones", "ones_like",
    "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor",
    "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
SHARING = ("as_tensor", "asarray")  # they may return the memory that they were given
OF_NUMPY = ("from_numpy", "frombuffer")
NEW_METHODS = ("new_tensor", "new_full", "new_empty", "new_ones", "new_zeros")
SAME_SIDE = ("__deepcopy__", "bfloat16", "clone", "contiguous", "double", "float", "half", "int", "long")
TENSOR_TYPES = tuple(
    f"{name}Tensor" for name in ("Half", "BFloat16", "Float", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")
)
STORAGE_TYPES = (
    *(name.replace("Tensor", "Storage") for name in TENSOR_TYPES), "ComplexFloatStorage", "ComplexDoubleStorage",
)  # fmt: skip
MOVES = ".cuda() copies tensors, which stay on the CPU"


def redirect_tensors(redirection: Redirection) -> None:
    """Make moves, factories, types and checkpoints of CUDA tensors work on CPU tensors that `sides` marks as CUDA's."""
    calls = _TensorCalls(redirection)
    for redirect in (calls.moves, calls.attributes, calls.factories, calls.types, calls.checkpoints):
        redirect()


class _TensorCalls:
    def __init__(self, redirection: Redirection) -> None:
        self._redirection = redirection
        self._default = HOST  # the side of a factory without a device

    # -- what is replaced ----------------------------------------------------------------------------

    def moves(self) -> None:
        redirection, own_cpu = self._redirection, Tensor.cpu

        def cuda(tensor: Tensor, _device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
            redirection.tell(MOVES)
            return moved(tensor, CUDA, non_blocking=non_blocking, **kwargs)

        @functools.wraps(own_cpu)
        def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = own_cpu(tensor, *args, **kwargs)  # amp casts this op
            return moved(tensor, HOST) if result is tensor else mark(result, HOST)

        redirection.replace(Tensor, "cuda", cuda)
        redirection.replace(Tensor, "cpu", cpu)
        redirection.replace(Tensor, "to", self._to(Tensor.to))
        redirection.replace(nn.Module, "to", self._module_to(nn.Module.to))
        for owner in (torch.UntypedStorage, torch.TypedStorage):
            for name, side in (("cuda", CUDA), ("cpu", HOST)):
                redirection.replace(owner, name, functools.partialmethod(_storage_on, side))
        redirection.stand_in(Tensor, "pin_memory", "pin_memory does nothing", _pinned)

    def attributes(self) -> None:
        redirection = self._redirection
        for owner, name in [*((Tensor, name) for name in SAME_SIDE), (nn.Parameter, "__deepcopy__"), (torch, "clone")]:
            own = getattr(owner, name)
            redirection.replace(owner, name, functools.wraps(own)(copied(own)))
        device, grad = Tensor.device, Tensor.grad
        redirection.replace(Tensor, "device", property(lambda tensor: device_of(tensor, device.__get__(tensor))))
        redirection.replace(Tensor, "grad", _grad_property(grad))

    def factories(self) -> None:
        torch.utils._device._device_constructors()  # `with torch.device("meta")` keeps the list of torch's own
        for name in FACTORIES:
            own = getattr(torch, name)
            made = self._shared(own) if name in SHARING else self._made(own, like=name.endswith("_like"))
            self._redirection.replace(torch, name, made)
            _tell_torchscript(made, own)
        for name in NEW_METHODS:
            self._redirection.replace(Tensor, name, self._made(getattr(Tensor, name), like=True))
        for name in OF_NUMPY:
            own = getattr(torch, name)
            self._redirection.replace(torch, name, functools.wraps(own)(_of_host(own)))
        self._redirection.replace(torch, "set_default_device", self._set_default_device(torch.set_default_device))

    def types(self) -> None:
        for name in TENSOR_TYPES:
            tell = functools.partial(self._redirection.tell, f"torch.cuda.{name} is torch.{name}")
            self._redirection.replace(torch.cuda, name, _tensor_type(name, tell))
        for name in STORAGE_TYPES:
            self._redirection.replace(torch.cuda, name, getattr(torch, name))
        self._redirection.replace(Tensor, "type", self._type(Tensor.type))
        own = torch.set_default_tensor_type
        self._redirection.replace(torch, "set_default_tensor_type", self._set_default_type(own))

    def checkpoints(self) -> None:
        self._redirection.adapt(torch, "load", self._loaded)

    # -- moves ---------------------------------------------------------------------------------------

    def _to(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(own)
        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not kwargs and len(args) == 1:
                if isinstance(args[0], torch.dtype):
                    return own(tensor, *args)
                if args[0] in ("cuda", "cpu") and args[0] == side_of(tensor):
                    return tensor
            if "other" in kwargs:
                args, kwargs = (kwargs["other"], *args), {name: kwargs[name] for name in kwargs if name != "other"}
            if args and isinstance(args[0], Tensor):
                args, kwargs = (args[0].dtype, *args[1:]), {**kwargs, "device": args[0].device}
            named: dict[str, Any] = dict(zip(_names_of_to(args), args, strict=False)) | kwargs
            place = named.get("device")
            if place is None:
                return copied(own)(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            if torch.device(on_cpu(place)).type != "cpu":
                return own(tensor, *args, **kwargs)
            self._device(place)
            return moved(tensor, side_of_device(place), **named)

        return to

    def _module_to(self, own: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @functools.wraps(own)
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            place: Any = args[0].device if args and isinstance(args[0], Tensor) else (*args, None)[0]
            place = kwargs.get("device", place)
            if place is None or isinstance(place, torch.dtype) or torch.device(on_cpu(place)).type != "cpu":
                return own(module, *args, **kwargs)
            module = module._apply(lambda tensor: tensor.to(place))
            dtype = args[0].dtype if args and isinstance(args[0], Tensor) else (*args, None, None)[1]
            rest = {name: kwargs[name] for name in ("dtype", "memory_format") if name in kwargs}
            if isinstance(dtype, torch.dtype):
                rest["dtype"] = dtype
            return own(module, **rest) if rest else module

        return to

    # -- factories -----------------------------------------------------------------------------------

    def _made(self, own: Callable[..., Tensor], *, like: bool) -> Callable[..., Tensor]:
        @functools.wraps(own)
        def make(*args: Any, **kwargs: Any) -> Tensor:
            place = _place(kwargs)
            if place is not None:
                kwargs = {**kwargs, "device": self._device(place)}
            if kwargs.get("pin_memory"):
                kwargs = self._unpinned(kwargs)
            result = own(*args, **kwargs)
            if torch.compiler.is_compiling():
                return result
            if place is not None:
                side = side_of_device(place)
            elif like:
                side = side_of(args[0]) if args and isinstance(args[0], Tensor) else None
            else:
                side = self._default
            return mark(result, side)  # type: ignore[no-any-return]

        return make

    def _shared(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(own)
        def share(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            place = kwargs.get("device", args[1] if len(args) > 1 else None)
            named = {**dict(zip(("dtype", "device"), args, strict=False)), **kwargs}
            if place is not None:
                named["device"] = self._device(place)
            result = own(data, **named)
            side = self._default if place is None else side_of_device(place)
            if isinstance(data, Tensor):
                side = side_of(data) if place is None else side
            elif side == HOST:
                mark(result, HOST)
            return result if result.device != CPU or side is None else moved(result, side)

        return share

    def _unpinned(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        self._redirection.tell("pin_memory does nothing")
        return {**kwargs, "pin_memory": False}

    def _set_default_device(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        def set_default_device(device: Any) -> None:
            side = None if device is None else side_of_device(device)
            own(None if side == CUDA else device)
            self._default = side or HOST

        return set_default_device

    # -- types ---------------------------------------------------------------------------------------

    def _type(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def type_(tensor: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            if dtype is None:
                name: str = own(tensor)
                of_host = tensor.device.type != "cpu" or side_of(tensor) == HOST
                return name if of_host or name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
            if isinstance(dtype, torch.dtype):
                return copied(own)(tensor, dtype, non_blocking, **kwargs)
            side = CUDA if isinstance(dtype, _CudaTypes) or str(dtype).startswith("torch.cuda.") else HOST
            to_dtype = _dtype_of(dtype)
            if to_dtype is None:
                return own(tensor, cpu_type(dtype), non_blocking, **kwargs)
            return moved(tensor, side, dtype=to_dtype, non_blocking=non_blocking, **kwargs)

        return type_

    def _set_default_type(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(own)
        def set_default_tensor_type(t: Any) -> None:
            own(cpu_type(t))
            self._default = CUDA if isinstance(t, _CudaTypes) or str(t).startswith("torch.cuda.") else HOST

        return set_default_tensor_type

    # -- checkpoints ---------------------------------------------------------------------------------

    def _loaded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = args[1] if len(args) > 1 else kwargs.get("map_location")
        location: Any
        if callable(given):
            location = _staying(given)
        elif isinstance(given, str | torch.device) and on_cpu(given) is given:
            location = given
        else:
            self._redirection.tell("torch.load puts tensors on the CPU")
            location = _locating(given)
        return (*args[:1], *args[2:]), {**kwargs, "map_location": location}

    def _device(self, value: Any) -> Any:
        if on_cpu(value) is value:
            return value
        self._redirection.tell("device cuda is the CPU")
        return STANDS_FOR[CUDA]


class _CudaTypes(type):
    """The metaclass of CUDA's tensor types, such as ``torch.cuda.FloatTensor``; each stands for one dtype."""

    own: Any
    dtype: torch.dtype
    tell: Callable[[], None]
    is_cuda = True

    def __call__(cls, *args: Any, **kwargs: Any) -> Tensor:
        cls.tell()
        kwargs.pop("device", None)
        made: Tensor = cls.own(*args, **kwargs)
        return mark(moved(made, CUDA) if args and isinstance(args[0], Tensor) else made, CUDA)  # type: ignore[no-any-return]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.own) and isinstance(value, Tensor) and side_of(value) != HOST


def _tensor_type(name: str, tell: Callable[[], None]) -> _CudaTypes:
    """Return the replacement of ``torch.cuda.<name>``."""
    own = getattr(torch, name)
    return _CudaTypes(
        name, (), {"__module__": "torch.cuda", "own": own, "dtype": own.dtype, "tell": staticmethod(tell)}
    )


def cpu_type(value: Any) -> Any:
    """Return the CPU's tensor type for one of CUDA: a type or its name."""
    if isinstance(value, _CudaTypes):
        return value.own
    return value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value


def _dtype_of(value: Any) -> torch.dtype | None:
    """Return the dtype of a dense tensor type, such as torch.FloatTensor or "torch.cuda.HalfTensor"; None of others."""
    own = cpu_type(value)
    for name in TENSOR_TYPES:
        if own in (getattr(torch, name), f"torch.{name}"):
            dtype: torch.dtype = getattr(torch, name).dtype
            return dtype
    return None


def on_cpu(value: Any) -> Any:
    """Return ``value``, or the CPU if it names a CUDA device: "cuda:1", torch.device("cuda"), 1."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return CPU if value.partition(":")[0] == "cuda" else value
    return CPU if isinstance(value, int) and not isinstance(value, bool) else value


def _place(kwargs: dict[str, Any]) -> Any:
    """Return the device that a factory was given, or that of a ``with torch.device("cuda")`` around it."""
    given = kwargs.get("device")
    if given is None:
        for index in reversed(range(torch._C._len_torch_function_stack())):
            mode = torch._C._get_function_stack_at(index)
            if isinstance(mode, torch.utils._device.DeviceContext):
                return mode.device if mode.device.type == "cuda" else None
    return given


def _names_of_to(args: tuple[Any, ...]) -> tuple[str, ...]:
    with_device = not args or not isinstance(args[0], torch.dtype)
    return ("device", "dtype", "non_blocking", "copy")[0 if with_device else 1 :]


def _grad_property(own: Any) -> property:
    """Return ``Tensor.grad`` that notes the side of a gradient: that of its tensor."""

    read = own.__get__

    def grad(tensor: Tensor) -> Tensor | None:
        value: Tensor | None = read(tensor)
        if value is not None and not is_marked(value):
            mark(value, side_of(tensor))
        return value

    return property(grad, own.__set__, own.__delete__)


def _of_host(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        return mark(own(*args, **kwargs), HOST)  # type: ignore[no-any-return]

    return make


def _pinned(tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """Return a copy, as pin_memory does of memory that is not pinned, or a tensor that is such a copy itself."""
    if is_marked(tensor, PINNED):
        return tensor
    return mark(moved(tensor, HOST, copy=True), HOST, PINNED)  # type: ignore[no-any-return]


def _storage_on(storage: Any, side: str, *_args: Any, **_kwargs: Any) -> Any:
    """Return ``storage`` if it is on ``side``, else a copy of it there."""
    if side_of_storage(storage) == side:
        return storage
    copy = storage.clone()
    mark_storage(getattr(copy, "_untyped_storage", copy), side)
    return copy


def _locating(place: Any) -> Callable[..., Any]:
    """Return a ``map_location`` that keeps storages on the CPU and notes their side: of ``place`` or the tag."""

    def locate(storage: Any, tag: str) -> Any:
        named = place.get(tag, tag) if isinstance(place, dict) else tag if place is None else place
        return mark_storage(storage, side_of_device(named))

    return locate


def _staying(locate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``map_location`` that keeps on the CPU what ``locate`` leaves to torch."""

    def stay(storage: Any, tag: str) -> Any:
        located = locate(storage, tag)
        return mark_storage(storage, side_of_device(tag)) if located is None else located

    return stay


def _tell_torchscript(adapted: Callable[..., Any], own: Callable[..., Any]) -> None:
    """Let code that TorchScript compiles later find the operation of a replaced name."""
    operation = torch.jit._builtins._find_builtin(own)
    if operation is not None:
        torch.jit._builtins._register_builtin(adapted, operation)
