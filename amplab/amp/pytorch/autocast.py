"""autocast: the face that scripts know from PyTorch, on amplab's casting engine.

    with amplab.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(x), y)      # linear in float16, mse_loss in float32

The checks of its arguments are in `autocast_arguments`, what it does to functions in `decorated_calls`.
"""

import dataclasses
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch
from torch.compiler import is_dynamo_compiling

from amplab.amp.pytorch.decorated_calls import run_inside
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies import TORCH_CUDA, CastingEngine, PrecisionPolicy, casting_engine, casts_enabled
from amplab.policies.casting.region_engines import engine_for
from amplab.policies.casting.thread_scopes import Scope

__all__ = [
    "autocast",
    "checked_device_type",
    "checked_dtype",
    "enabled_here",
    "get_autocast_dtype",
    "is_autocast_enabled",
    "named_by_a_string",
    "refuse_uncallable",
]

DEFAULT_POLICY = PrecisionPolicy(table=TORCH_CUDA)
"""What a region carries out that is given no policy, on every device: that of a GPU."""


class autocast:
    """A region in which ops run in the dtype of a policy: `torch.autocast` with an additional ``policy=``.

    A context manager and a decorator, of plain functions, of ``forward`` (the signature is kept), of generators and of
    coroutines. Regions nest; the inner one decides. One instance can be entered while it is entered, and in several
    threads. Regions belong to the thread that enters them: under DataParallel decorate ``forward``.

    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     hidden = torch.ones(2, 2) @ torch.ones(2, 2)
    ...     print(hidden.dtype, torch.softmax(hidden, 0).dtype)
    torch.bfloat16 torch.float32

    Differences from `torch.autocast`:

    * The default policy on the CPU is that of a GPU: softmax, norms, sums and losses in float32. (torch has different
      lists for the CPU.) `amplab.cpu_half` selects how float16 products are computed on the CPU.
    * The autocast flags of torch are not set, because that would also enable the casts of torch. Code that reads
      `torch.is_autocast_enabled` sees False; use `amplab.is_autocast_enabled` and `amplab.get_autocast_dtype`, and
      `amplab.custom_fwd`, `custom_bwd` and `checkpoint`, which support both.
    * It casts ops called from Python, but not `torch.ops.*` and ops called from C++, including the backward of
      autograd. Tensor subclasses are not cast.
    * The weight cache distinguishes dtypes and detects changes of a weight; one instance can be entered twice; the
      body of a decorated generator or coroutine runs inside the region. None of this is the case in torch.
    * A dtype that is not floating-point, or that contradicts ``policy``, is an error.
    * If the device is not available, the region is disabled with a warning for every device type, not only for CUDA.
    * A region does not disable an enclosing or inner `torch.autocast`: both cast. Use only one of them.
    * TorchScript cannot compile it. With torch.compile, create the region inside the compiled function or decorate the
      function: an instance created outside cannot be entered inside (it can be entered around the compiled function).

    Args:
        device_type: "cuda", "cpu", …: ops with a tensor on such a device are cast, others are not.
        dtype: what lower-precision ops compute in; that of ``policy``, of the region around, or torch's default for
            the device where None (bfloat16 on the CPU, float16 on CUDA).
        enabled: False makes a region without casts, also inside another.
        cache_enabled: keep casts of Parameters until the outermost region ends; as around where None, else True.
        policy: which op runs in which dtype; that of the region around where None, else `DEFAULT_POLICY`.

    Raises:
        ValueError: device_type is no string; dtype is not floating; dtype and policy contradict each other.
        RuntimeError: no autocast for such a device; bfloat16 on a CUDA device without it.
        TypeError: dtype is no dtype; policy is no PrecisionPolicy.

    Warns:
        UserWarning: the device is not there, or dtype is no lower-precision dtype: the region casts nothing.

    Sync: none.

    Reference: torch.amp.autocast
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: PrecisionPolicy | None = None,
    ) -> None:
        self.device = checked_device_type(device_type)
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled={enabled!r}: expected True or False.")
        around = _innermost(self.device)
        self._policy = _checked_policy(policy, dtype) or _policy_around(self.device)
        if dtype is None and self._policy.simulated:
            policy = self._policy
        chosen = policy.tensor_dtype if policy is not None else dtype
        self.fast_dtype = checked_dtype(get_autocast_dtype(self.device) if chosen is None else chosen)
        around_caches = around is None or around.cache_enabled
        self.cache_enabled: bool = around_caches if cache_enabled is None else cache_enabled
        self.enabled = bool(enabled) and enabled_here(
            self.device, torch.float16 if policy is not None and policy.simulated else self.fast_dtype, stacklevel=3
        )
        self._precision = policy.compute_dtype if policy is not None else self.fast_dtype

    @property
    def policy(self) -> PrecisionPolicy:
        """What is carried out: in a region that is enabled its compute dtype is `fast_dtype`."""
        if not self.enabled or self._policy.compute_dtype is self._precision:
            return self._policy
        return dataclasses.replace(self._policy, compute_dtype=self._precision)

    def __repr__(self) -> str:
        """Show the arguments in force."""
        return (
            f"autocast({self.device!r}, {self.fast_dtype}, enabled={self.enabled}, "
            f"cache_enabled={self.cache_enabled}, policy={str(self.policy)!r})"
        )

    def __enter__(self) -> "autocast":
        """Cast from here on, in this thread."""
        engine = self._engine()
        scope = None if engine is None else engine.active()
        _THREAD.entries.append((self, engine, scope))
        if scope is not None:
            scope.enter(None if is_dynamo_compiling() else sys._getframe(1))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        """Be again as before the last `__enter__` of this instance in this thread."""
        entries = _THREAD.entries
        for index in range(len(entries) - 1, -1, -1):
            region, _, scope = entries[index]
            if region is self:
                del entries[index]
                if scope is not None:
                    scope.leave()
                return False
        raise RuntimeError(f"{self!r} is left in a thread that is not in it; leave it in the thread that entered it.")

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``func`` with its body inside the region.

        Raises:
            TypeError: ``func`` cannot be called.
        """
        refuse_uncallable(func)
        return run_inside(lambda: _Entered(self), func)

    def _engine(self) -> CastingEngine | None:
        if self.enabled:
            return engine_for(self._policy, self._precision, self.device, self.cache_enabled)
        if casting_engine(self.device) is None:
            return None
        return engine_for(_NO_CASTS, _NO_CASTS.compute_dtype, self.device, self.cache_enabled)


class _Entered:
    """One entry of a region; torch.compile can trace a context that is made where it is entered."""

    def __init__(self, region: autocast) -> None:
        self._region = region

    def __enter__(self) -> autocast:
        return self._region.__enter__()

    def __exit__(self, *raised: Any) -> bool:
        return self._region.__exit__(*raised)


class _AutocastThread(threading.local):
    """The regions that this thread is in, innermost last, each with its engine and what ends it."""

    def __init__(self) -> None:
        self.entries: list[tuple[autocast, CastingEngine | None, Scope | None]] = []


_THREAD = _AutocastThread()
_NO_CASTS = PrecisionPolicy(table=None)


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """Whether amplab casts ops on ``device_type`` in this thread: in a region, or after `amp.initialize` at O1.

    Args:
        device_type: as for `autocast`; None is "cuda", as in torch.

    Raises:
        ValueError: device_type is no string.
        RuntimeError: no such device.
    """
    engine = casting_engine("cuda" if device_type is None else _type_of(device_type))
    return engine is not None and engine.policy.table is not None and casts_enabled()


def get_autocast_dtype(device_type: str) -> torch.dtype:
    """Return what lower-precision ops on ``device_type`` compute in, in this thread.

    Outside of every region that is what a region would have if it were given no dtype: torch's default.

    Raises:
        ValueError: device_type is no string.
        RuntimeError: no such device.
    """
    device_type = _type_of(device_type)
    region = _innermost(device_type)
    if region is not None:
        return region.fast_dtype
    engine = casting_engine(device_type)
    return torch.get_autocast_dtype(device_type) if engine is None else engine.policy.tensor_dtype


def _type_of(device_type: str) -> str:
    return torch.device(named_by_a_string(device_type)).type


def _innermost(device_type: str) -> autocast | None:
    """The region that decides about ``device_type`` here; None where something else does."""
    deciding = casting_engine(device_type)
    for region, engine, _ in reversed(_THREAD.entries):
        if region.device == device_type:
            return region if engine is deciding else None
    return None


def _policy_around(device_type: str) -> PrecisionPolicy:
    region, engine = _innermost(device_type), casting_engine(device_type)
    if region is not None:
        return region._policy  # the very object, by which its engine is found again
    return DEFAULT_POLICY if engine is None or engine.policy.table is None else engine.policy


def _checked_policy(policy: Any, dtype: torch.dtype | None) -> PrecisionPolicy | None:
    if policy is None:
        return None
    if not isinstance(policy, PrecisionPolicy):
        raise TypeError(
            f"policy={policy!r}: expected a PrecisionPolicy; pass e.g. PrecisionPolicy.parse('apex/float16')."
        )
    if dtype is not None and dtype is not policy.compute_dtype:
        raise ValueError(
            f"dtype={dtype} contradicts policy={str(policy)!r}, which computes in {policy.compute_dtype}; "
            "leave dtype out, or give the policy that compute_dtype."
        )
    return policy


_MODULES_THAT_KNOW = ("cuda", "xpu", "mtia")


def named_by_a_string(device_type: Any) -> str:
    """Return ``device_type``, which is to be a string.

    Raises:
        ValueError: it is no string, such as a `torch.device`.
    """
    if not isinstance(device_type, str):
        raise ValueError(  # the type that torch raises here
            f"Expected `device_type` of type `str`, got: `{type(device_type)}`; "
            "pass the type of a device, such as 'cuda' or 'cpu' (tensor.device.type)."
        )
    return device_type


def checked_device_type(device_type: Any) -> str:
    """Return ``device_type``, without an index, if torch has autocast for such devices.

    Raises:
        ValueError: it is no string.
        RuntimeError: there is no such device, or no autocast for it.
    """
    try:
        available = torch.amp.is_autocast_available(named_by_a_string(device_type))
    except RuntimeError:
        available = False
    if not available:
        raise RuntimeError(
            f"User specified an unsupported autocast device_type '{device_type}': expected the type of a device that "
            "has autocast, such as 'cuda', 'cpu', 'xpu' or 'mps'; pass tensor.device.type of the tensors to cast."
        )
    return torch.device(device_type).type


def checked_dtype(dtype: Any) -> torch.dtype:
    """Return ``dtype`` if it is a floating one.

    Raises:
        TypeError: no dtype.
        ValueError: a dtype of integers, booleans or complex numbers.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: expected a torch.dtype; pass torch.bfloat16 or torch.float16.")
    if not dtype.is_floating_point:
        raise ValueError(
            f"dtype={dtype}: expected a floating dtype; pass torch.bfloat16 or torch.float16, or leave it out."
        )
    return dtype


def enabled_here(device_type: str, dtype: torch.dtype, stacklevel: int) -> bool:
    """Whether casts to ``dtype`` are possible on ``device_type``; a UserWarning says why not.

    Args:
        device_type: the type of a device that has autocast.
        dtype: a floating dtype.
        stacklevel: whose line the warning names, as in `warnings.warn` called from here.

    Raises:
        RuntimeError: bfloat16 on a CUDA device that has none.
    """
    if not _is_there(device_type):
        name = device_type.upper()
        _turned_off(
            f"autocast({device_type!r}): {name} is not available. Disabling autocast. "
            "Pass the type of the device that your tensors are on, e.g. device_type='cpu'.",
            stacklevel,
        )
        return False
    if device_type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise RuntimeError("Current CUDA Device does not support bfloat16. Please switch dtype to float16.")
    if dtype in LOW_PRECISION_DTYPES or (device_type == "cuda" and dtype is torch.float32):
        return True
    _turned_off(
        f"In {device_type.upper()} autocast, but the target dtype is not supported: {dtype}. Disabling autocast.\n"
        f"{device_type.upper()} Autocast only supports dtypes of torch.bfloat16, torch.float16 currently; pass one "
        "of these, or enabled=False.",
        stacklevel,
    )
    return False


def refuse_uncallable(func: Any) -> None:
    """Raise what `torch.autocast` raises where it is to decorate something else than a callable.

    Raises:
        TypeError: ``func`` cannot be called.
    """
    if not callable(func):
        raise TypeError(
            f"autocast()(func) requires a callable, but got {type(func).__name__}. Did you mean to use autocast as a "
            "context manager? For example:\n    with amplab.autocast(device_type=...):\n        output = model(input)"
        )


def _is_there(device_type: str) -> bool:
    if device_type in _MODULES_THAT_KNOW:
        available: Callable[[], bool] = torch.get_device_module(device_type).is_available
        return available()
    if device_type == "mps":
        return torch.backends.mps.is_available()
    return True  # cpu; and devices whose presence only their own package can tell


def _turned_off(message: str, stacklevel: int) -> None:
    warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
