"""autocast: the API of `torch.autocast` on amplab's casting engine.

    with amplab.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(x), y)      # linear in float16, mse_loss in float32

How it decorates generators and coroutines is in `decorated_calls`.
"""

import dataclasses
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar, Literal, NamedTuple

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
"""The policy of a region without ``policy=``, on every device: the lists of a GPU."""


class autocast:
    """A region in which a policy chooses the dtype of each op. Has the API of `torch.autocast`, and ``policy=``.

    It is a context manager and a decorator. It decorates functions, ``forward`` (the signature is kept), generators and
    coroutines. Regions nest, and the innermost one applies. One instance may be entered again while it is active, and
    in several threads. A region applies to the thread that enters it: under DataParallel decorate ``forward``.

    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     hidden = torch.ones(2, 2) @ torch.ones(2, 2)
    ...     print(hidden.dtype, torch.softmax(hidden, 0).dtype)
    torch.bfloat16 torch.float32

    Differences from `torch.autocast`:

    * The default policy on the CPU is also that of a GPU: softmax, norms, sums and losses in float32. (torch has other
      lists for the CPU.) Ops on no list of a GPU that have no 16-bit CPU kernel, such as avg_pool3d, ctc_loss, FFTs and
      LAPACK, run in float32 there. `amplab.cpu_half` selects how float16 products are computed there.
    * The flags of torch for ``device_type`` do not change, because setting them would enable torch's casts. Therefore
      `torch.is_autocast_enabled` returns False; use `amplab.is_autocast_enabled` and `amplab.get_autocast_dtype`. Use
      `amplab.custom_fwd`, `custom_bwd` and `checkpoint`, which support both autocasts. Code that disables autocast only
      if `torch.is_autocast_enabled` is True, as transformers 5 does, has no effect: give such modules a float32 rule
      (`amplab.policies.apply_policy`).
    * Only ops called from Python are cast. `torch.ops.*` and ops called from C++, including autograd's backward, are
      not. A tensor subclass chooses its dtypes itself.
    * The weight cache distinguishes dtypes and detects edits. The same instance may be entered twice. The body of a
      decorated generator or coroutine runs in the region. None of this holds in torch.
    * A dtype that is not floating-point is an error, and so is one that contradicts ``policy``.
    * Every device type that torch reports as unavailable disables the region with a warning, not only CUDA.
    * A region of `torch.autocast` with ``enabled=False`` inside disables the casts for its device type until it ends or
      a region of amplab begins. Enabled regions of both in each other both cast: use only one of them.
    * `torch.export` is refused where a cast would be lost. `torch.jit.trace` in a region needs ``cache_enabled=False``,
      as in torch. TorchScript cannot compile a region, and runs what it has compiled without casts.
    * For torch.compile create the region in the function or decorate the function: an instance that was created outside
      cannot be entered inside. It can be entered around the compiled function.

    Args:
        device_type: "cuda", "cpu", …: ops with a tensor on such a device are cast, others are not.
        dtype: the compute dtype of lower-precision ops. None for that of ``policy``, else that of the enclosing
            region, else torch's default for the device (bfloat16 on the CPU, float16 on CUDA).
        enabled: False disables casts, also inside another region.
        cache_enabled: keep casts of Parameters until the outermost region ends. None for the setting of the enclosing
            region, else True.
        policy: the dtype of each op. None for the policy of the enclosing region, else `DEFAULT_POLICY`.

    Raises:
        ValueError: device_type is not a string; dtype is not floating-point; dtype and policy contradict each other;
            policy has module rules, which need a model: apply them with `amplab.policies.apply_policy`.
        RuntimeError: there is no autocast for this device type; bfloat16 on a CUDA device that does not support it.
        TypeError: dtype is not a dtype; policy is not a PrecisionPolicy.

    Warns:
        UserWarning: the device is unavailable, or dtype is not a lower-precision dtype. The region casts nothing.

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
        around, engine = _in_force(self.device)
        self._policy = _checked_policy(policy, dtype) or _policy_around(around, engine)
        if dtype is None and self._policy.simulated:
            policy = self._policy
        chosen = policy.tensor_dtype if policy is not None else dtype
        self.fast_dtype = checked_dtype(_dtype_around(self.device, around, engine) if chosen is None else chosen)
        around_caches = around is None or around.cache_enabled
        self.cache_enabled: bool = around_caches if cache_enabled is None else cache_enabled
        self.enabled = bool(enabled) and enabled_here(
            self.device, torch.float16 if policy is not None and policy.simulated else self.fast_dtype, stacklevel=3
        )
        self._precision = policy.compute_dtype if policy is not None else self.fast_dtype
        self._found: CastingEngine | None = None
        self._was_entered = False

    @property
    def policy(self) -> PrecisionPolicy:
        """The policy in force; its compute dtype is `fast_dtype` if the region is enabled."""
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
        """Begin to cast in this thread."""
        return self._enter(None if is_dynamo_compiling() else sys._getframe(1))

    def _enter(self, frame: FrameType | None) -> "autocast":
        engine, entries = self._engine(), _THREADS.own.entries
        while entries and entries[-1].scope.has_ended():  # its exit was interrupted
            entries.pop()
        scope = Scope(engine)
        self._was_entered = True
        scope.enter(frame)
        entries.append(_Entry(self, engine, scope))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        """Restore the state before the last `__enter__` of this instance in this thread.

        If another thread calls it, for example because the garbage collector closes a generator there, the region ends
        as `Scope.__exit__` says.
        """
        return self._exit(2)

    def _exit(self, depth: int) -> Literal[False]:
        """Leave the entry of the frame at `depth` on the stack."""
        if not self._was_entered:
            raise RuntimeError(f"{self!r} was not entered: expected __enter__, or a `with` statement, before __exit__.")
        own = _THREADS.own
        entry = None
        try:
            entry = own.innermost(self)
            block = None if entry is None else entry.scope.watched  # None where torch.compile traces
            if entry is None or (block is not None and block is not sys._getframe(depth)):
                entry = _entry_of(self, sys._getframe(depth))
            own.leave(entry)
        except BaseException:  # an interrupt; finish anyway
            own.leave(entry or _entry_of(self, sys._getframe(depth)))
            raise
        return False

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``func`` with its body inside the region.

        Raises:
            TypeError: ``func`` is not callable.
        """
        refuse_uncallable(func)
        return run_inside(lambda: _Entered(self), func)

    def _engine(self) -> CastingEngine | None:
        if self.enabled:
            if self._found is not None and not is_dynamo_compiling():
                return self._found
            self._found = engine_for(self._policy, self._precision, self.device, self.cache_enabled)
            return self._found
        if casting_engine(self.device) is None:
            return None
        return engine_for(_NO_CASTS, _NO_CASTS.compute_dtype, self.device, self.cache_enabled)


class _Entered:
    """One entry of a region. torch.compile can trace a context only if it is created where it is entered."""

    def __init__(self, region: autocast) -> None:
        self._region = region

    def __enter__(self) -> autocast:
        return self._region._enter(None if is_dynamo_compiling() else sys._getframe(1))

    def __exit__(self, *_raised: object) -> bool:
        return self._region._exit(2)


class _Entry(NamedTuple):
    region: autocast
    engine: CastingEngine | None
    scope: Scope


class _AutocastThread:
    """The regions that are active in a thread, innermost last."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def innermost(self, region: autocast, frame: FrameType | None = None) -> _Entry | None:
        """Return the last entry of `region`, of those in `frame` if it is given; None if there is none."""
        for entry in reversed(self.entries):
            if entry.region is region and (frame is None or entry.scope.watched is frame):
                return entry
        return None

    def entered_by_calls(self, region: autocast) -> Iterator[_Entry]:
        """Yield the entries of `region` that only a call ends, such as that of an `ExitStack`; the last one first."""
        for entry in reversed(self.entries):
            if entry.region is region and entry.scope.frame is None and not entry.scope.has_ended():
                yield entry

    def leave(self, entry: _Entry | None) -> None:
        """Leave a region, then its earlier entries whose block has ended; a second call does nothing."""
        while entry is not None:
            entry.scope.leave()
            if entry in self.entries:
                self.entries.remove(entry)
            entry = self.innermost(entry.region)
            if entry is not None and not entry.scope.is_past():
                return


class _AutocastThreads(threading.local):
    """The `_AutocastThread` of each thread."""

    _all: ClassVar[weakref.WeakValueDictionary[int, _AutocastThread]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.own = self._all[threading.get_ident()] = _AutocastThread()

    def others(self) -> Iterator[_AutocastThread]:
        """Yield those of the other threads."""
        for reference in self._all.valuerefs():
            thread = reference()
            if thread is not None and thread is not self.own:
                yield thread


_THREADS = _AutocastThreads()


def _entry_of(region: autocast, frame: FrameType) -> _Entry | None:
    """Return the entry of `region` that `frame` leaves: by its own block, wherever it began, or by a call."""
    own, others = _THREADS.own, _THREADS.others
    return (
        own.innermost(region, frame)
        or next(filter(None, (thread.innermost(region, frame) for thread in others())), None)
        or own.innermost(region)
        or next((entry for thread in others() for entry in thread.entered_by_calls(region)), None)
    )


_NO_CASTS = PrecisionPolicy(table=None)


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """Whether amplab casts ops on ``device_type`` in this thread: in a region, or after `amp.initialize` at O1.

    Args:
        device_type: as for `autocast`; None is "cuda", as in torch.

    Raises:
        ValueError: device_type is not a string.
        RuntimeError: there is no such device type.
    """
    engine = casting_engine("cuda" if device_type is None else _type_of(device_type))
    return engine is not None and engine.policy.table is not None and casts_enabled()


def get_autocast_dtype(device_type: str) -> torch.dtype:
    """Return the compute dtype of lower-precision ops on ``device_type`` in this thread.

    Outside all regions this is torch's default, which a region without ``dtype=`` would use.

    Raises:
        ValueError: device_type is not a string.
        RuntimeError: there is no such device type.
    """
    device_type = _type_of(device_type)
    return _dtype_around(device_type, *_in_force(device_type))


def _type_of(device_type: str) -> str:
    return torch.device(named_by_a_string(device_type)).type


def _in_force(device_type: str) -> tuple[autocast | None, CastingEngine | None]:
    """Return the region and the engine that decide for ``device_type`` in this thread.

    The region is None outside all regions, and where an engine entered later, such as that of `initialize`, decides.
    The engine of a disabled region of torch.autocast has no settings of its own: the region around it gives them.
    """
    deciding = casting_engine(device_type)
    for region, engine, scope in reversed(_THREADS.own.entries):
        if region.device == device_type and not scope.has_ended():
            decides = engine is deciding or (deciding is not None and deciding.ends_casts)
            return (region if decides else None), deciding
    return None, deciding


def _dtype_around(device_type: str, region: autocast | None, engine: CastingEngine | None) -> torch.dtype:
    if region is not None:
        return region.fast_dtype
    return torch.get_autocast_dtype(device_type) if engine is None else engine.policy.tensor_dtype


def _policy_around(region: autocast | None, engine: CastingEngine | None) -> PrecisionPolicy:
    if region is not None:
        return region._policy  # the same object: engines are looked up by identity
    return DEFAULT_POLICY if engine is None or engine.policy.table is None else engine.policy


def _checked_policy(policy: Any, dtype: torch.dtype | None) -> PrecisionPolicy | None:
    if policy is None:
        return None
    if not isinstance(policy, PrecisionPolicy):
        raise TypeError(
            f"policy={policy!r}: expected a PrecisionPolicy, such as PrecisionPolicy.parse('apex/float16')."
        )
    if policy.module_rules:
        raise ValueError(
            f"policy={str(policy)!r} has the module rule {policy.module_rules[0]}, and a region knows no model: "
            "expected one without module_rules. Call amplab.policies.apply_policy(policy, model) once, which casts "
            "in every forward of the model; around the rest, such as the loss, use autocast without module_rules."
        )
    if dtype is not None and dtype is not policy.compute_dtype:
        raise ValueError(
            f"dtype={dtype} contradicts policy={str(policy)!r}, which computes in {policy.compute_dtype}; "
            "omit dtype, or pass a policy with that compute_dtype."
        )
    return policy


_DEVICE_MODULES = ("cuda", "xpu", "mtia")


def named_by_a_string(device_type: Any) -> str:
    """Return ``device_type``.

    Raises:
        ValueError: not a string, for example a `torch.device`.
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
        ValueError: not a string.
        RuntimeError: there is no such device type, or no autocast for it.
    """
    if device_type in ("cpu", "cuda"):
        return str(device_type)
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
    """Return ``dtype`` if it is a floating-point one.

    Raises:
        TypeError: not a dtype.
        ValueError: a dtype of integers, booleans or complex numbers.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: expected a torch.dtype; pass torch.bfloat16 or torch.float16.")
    if not dtype.is_floating_point:
        raise ValueError(
            f"dtype={dtype}: expected a floating-point dtype; pass torch.bfloat16 or torch.float16, or omit it."
        )
    return dtype


def enabled_here(device_type: str, dtype: torch.dtype, stacklevel: int) -> bool:
    """Return whether casts to ``dtype`` are possible on ``device_type``; if not, warn with the reason.

    Args:
        device_type: the type of a device that has autocast.
        dtype: a floating-point dtype.
        stacklevel: as in `warnings.warn` called from this function.

    Raises:
        RuntimeError: bfloat16 on a CUDA device that does not support it.
    """
    if not _is_available(device_type):
        name = device_type.upper()
        _warn_disabled(
            f"autocast({device_type!r}): {name} is not available. Disabling autocast. "
            "Pass the type of the device that your tensors are on, e.g. device_type='cpu'.",
            stacklevel,
        )
        return False
    if device_type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise RuntimeError("Current CUDA Device does not support bfloat16. Please switch dtype to float16.")
    if dtype in LOW_PRECISION_DTYPES or (device_type == "cuda" and dtype is torch.float32):
        return True
    _warn_disabled(
        f"In {device_type.upper()} autocast, but the target dtype is not supported: {dtype}. Disabling autocast.\n"
        f"{device_type.upper()} Autocast only supports dtypes of torch.bfloat16, torch.float16 currently; pass one "
        "of these, or enabled=False.",
        stacklevel,
    )
    return False


def refuse_uncallable(func: Any) -> None:
    """Check that ``func`` can be decorated.

    Raises:
        TypeError: ``func`` is not callable.
    """
    if not callable(func):
        raise TypeError(
            f"autocast()(func) requires a callable, but got {type(func).__name__}. Did you mean to use autocast as a "
            "context manager? For example:\n    with amplab.autocast(device_type=...):\n        output = model(input)"
        )


def _is_available(device_type: str) -> bool:
    if device_type in _DEVICE_MODULES:
        available: Callable[[], bool] = torch.get_device_module(device_type).is_available
        return available()
    if device_type == "mps":
        return torch.backends.mps.is_available()
    return True  # the CPU, and device types that only their own package can check


def _warn_disabled(message: str, stacklevel: int) -> None:
    warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
