"""The loss scales of a session: LossScaler, the scale of one loss, and LossScaling, the block of `scale_loss`.

    enter    gradients are set aside                          yields loss.float() * scale
    leave    gradients are unscaled: found_inf                `LossScaling._decide`
             the scale backs off or grows                     `LossScaler.update`
             after an overflow the next step is skipped       `HookedOptimizer.skip_next_step`
             after 20 overflows that no scale can avoid       `LossScaleCollapse`

Gradients are handled in ``backward/gradients.py`` and `hooked_optimizer`. The rules that move a scale are in
`amplab.scalers.rules`. The scales of `amplab.GradScaler` are on the device: ``pytorch/loss_scale.py``.
"""

import contextlib
import dataclasses
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.apex.hooked_optimizer import HookedOptimizer, await_shards
from amplab.amp.apex.hooks import Hooks
from amplab.amp.apex.iteration_state import keep_of, use
from amplab.amp.arguments import SMALLEST_SCALE, scale_value
from amplab.amp.backward.gradients import ScaledBackward
from amplab.amp.backward.records import ScaledLoss, ScaleRecord
from amplab.policies.casting.function_modes import without_function_modes
from amplab.scalers import DynamicScale, ScaleRule, ScaleState, StaticScale

__all__ = [
    "SKIPS_BEFORE_COLLAPSE",
    "CollapseWatch",
    "LossScaleCollapse",
    "LossScaler",
    "LossScaling",
    "OnCollapse",
    "Subscriber",
    "checked_entry",
    "checked_loss",
    "checked_on_collapse",
    "explaining_backward",
    "load_scalers",
    "save_scalers",
    "scale_rule",
]

SKIPS_BEFORE_COLLAPSE = 20

OnCollapse = Literal["raise", "warn"]

_NEEDS_NO_GRADIENT = "does not require grad"
_NO_SCALAR = "grad can be implicitly created only for scalar outputs"

_SMALLEST_SUBNORMAL = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps

_ARGUMENTS = {  # of DynamicScale, and their names in initialize
    "init_scale": "dynamic_init_scale",
    "growth_factor": "scale_growth_factor",
    "backoff_factor": "scale_backoff_factor",
    "growth_interval": "scale_window",
    "floor": "min_loss_scale",
    "ceiling": "max_loss_scale",
    "DynamicScale": 'loss_scale="dynamic"',
    "StaticScale": "a number as loss_scale",
}


# -- the scale of one loss ---------------------------------------------------------------------------


class LossScaler:
    """The scale of one loss, under the names of ``apex.amp.scaler.LossScaler``. It does not unscale gradients.

    Args:
        loss_scale: "dynamic", or a number for a static scale.
        init_scale: start of a dynamic scale, not above ``max_loss_scale``.
        scale_factor: the scale is multiplied by it to grow and divided by it to back off; > 1. (apex always uses 2.)
        scale_window: clean calls of `update_scale` after which the scale grows.
        min_loss_scale: floor of a dynamic scale; float32's smallest normal number if None or 0.
        max_loss_scale: ceiling; None for no ceiling.

    Attributes:
        rule: moves the scale.
        state: the scale, and the number of clean backwards since it last moved.
        unchecked: found_inf of a backward with ``delay_overflow_check``, which no one has read yet.

    Raises:
        ValueError, TypeError: as `scale_rule`.

    >>> scaler = LossScaler("dynamic")
    >>> scaler._overflow_buf.fill_(1)
    tensor([1], dtype=torch.int32)
    >>> scaler.update_scale(), scaler.loss_scale()
    (True, 32768.0)
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        dynamic = isinstance(loss_scale, str) and loss_scale == "dynamic"
        self._follow(
            scale_rule(
                loss_scale if dynamic else scale_value("loss_scale", loss_scale),
                init_scale=init_scale,
                growth_factor=scale_factor,
                backoff_factor=1.0 / scale_value("scale_factor", scale_factor),
                growth_interval=scale_window,
                floor=min_loss_scale,
                ceiling=max_loss_scale,
            )
        )

    @classmethod
    def under(cls, rule: ScaleRule) -> Self:
        """Make a scaler whose scale is moved by ``rule``."""
        scaler = cls.__new__(cls)
        scaler._follow(rule)
        return scaler

    def _follow(self, rule: ScaleRule) -> None:
        self.rule, self.state = rule, rule.start()
        self.unchecked: Tensor | None = None
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)
        keep_of(self, "state", "unchecked")

    @property
    def scale(self) -> float:
        """The factor of the next loss."""
        return self.state.scale

    @property
    def dynamic(self) -> bool:
        """Whether an overflow skips the step and moves the scale."""
        return self.rule.skips_on_overflow

    def update(self, found_inf: bool) -> None:
        """Move the scale after one backward. apex counts backwards, not steps."""
        use(self)
        self.state = self.rule.next(self.state, found_inf)

    def take_unchecked(self) -> Tensor | None:
        """Return `unchecked` and clear it."""
        found_inf, self.unchecked = self.unchecked, None
        return found_inf

    def state_dict(self) -> dict[str, float | int]:
        """Return apex's entry: the scale, and the number of clean backwards since it last moved."""
        return {"loss_scale": self.state.scale, "unskipped": self.state.clean_steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a saved scale, raised to the floor if it is lower, and count. A static scaler keeps its own scale.

        Raises:
            ValueError: not an entry of apex; the scale is negative or does not fit float32, or the count is not an
                integer >= 0.
        """
        scale, clean_steps = checked_entry(saved)
        if isinstance(self.rule, DynamicScale):
            # A count from a longer window lets the scale grow at the next clean backward.
            clean_steps = min(clean_steps, self.rule.growth_interval - 1)
            self.state = ScaleState(max(scale, self.rule.floor or SMALLEST_SCALE), clean_steps)
        else:
            self.state = replace(self.state, clean_steps=clean_steps)

    # -- the names of apex -------------------------------------------------------------------------

    def loss_scale(self) -> float:
        """Return the factor of the next loss."""
        return self.state.scale

    @property
    def _loss_scale(self) -> float:
        return self.state.scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.state = dataclasses.replace(self.state, scale=scale_value("_loss_scale", value))

    @property
    def _unskipped(self) -> int:
        return self.state.clean_steps

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.state = dataclasses.replace(self.state, clean_steps=int(value))

    @property
    def _has_overflow(self) -> bool:
        return bool(self._overflow_buf.any())

    def clear_overflow_state(self) -> None:
        """Set ``_overflow_buf`` to 0. Sync: none."""
        self._overflow_buf = torch.zeros_like(self._overflow_buf)

    def update_scale(self) -> bool:
        """Move the scale by ``_overflow_buf``, and by found_inf of a backward with ``delay_overflow_check``.

        Returns:
            Whether the step should be skipped. The caller has to skip it.

        Sync: one.
        """
        unchecked = self.take_unchecked()
        found_inf = self._has_overflow or (unchecked is not None and bool(unchecked.any()))
        self.clear_overflow_state()
        self.update(found_inf and self.dynamic)
        return found_inf and self.dynamic

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"amp._amp_state.loss_scalers[…].{name} does not exist in amplab: expected loss_scale(), _loss_scale, "
            "_unskipped, dynamic, _overflow_buf, update_scale() or clear_overflow_state(). Gradients are unscaled by "
            "amp.scale_loss."
        )


def scale_rule(loss_scale: float | str, **arguments: float | None) -> ScaleRule:
    """Make the rule of a call of `initialize`. Error messages use the argument names of that call.

    Args:
        loss_scale: "dynamic", or the number of a static scale, for which ``arguments`` are not used.
        arguments: those of `DynamicScale`; a ``floor`` of None or 0 becomes `SMALLEST_SCALE`.

    Raises:
        ValueError: an argument out of its range.
        TypeError: an argument that is not a number.
    """
    if not isinstance(loss_scale, str):
        return StaticScale(_float32_scale("loss_scale", loss_scale))
    for name, value in arguments.items():
        left_out = value is None and name in ("floor", "ceiling")
        if not left_out and (isinstance(value, bool) or not isinstance(value, Real)):
            raise TypeError(f"{_ARGUMENTS[name]}={value!r}: expected a number; leave it out for the default of apex.")
    chosen: dict[str, Any] = {**arguments, "floor": arguments["floor"] or SMALLEST_SCALE}
    try:
        return DynamicScale(**chosen)
    except ValueError as error:
        words = "|".join(_ARGUMENTS)
        raise ValueError(re.sub(rf"\b({words})\b", lambda word: _ARGUMENTS[word.group()], str(error))) from None


# -- the block of scale_loss -------------------------------------------------------------------------


class Subscriber(NamedTuple):
    """Functions that are called about all backwards, or about those that reach one optimizer.

    Attributes:
        callback: called with the record of a backward.
        at_loss: called with its loss, before it; None for no call.
        optimizer: None for all backwards.
    """

    callback: Callable[[ScaleRecord], object]
    at_loss: Callable[[ScaledLoss], object] | None
    optimizer: Optimizer | None

    def hears_of(self, hooked: Sequence[HookedOptimizer]) -> bool:
        """Whether to call the functions about a backward that reaches the optimizers of ``hooked``."""
        return self.optimizer is None or any(each.belongs_to(self.optimizer) for each in hooked)


class LossScaling:
    """The loss scalers of one `initialize`, and their effect on its optimizers.

    Args:
        hooks: the models and optimizers of the session.
        scalers: one for each ``loss_id``.
        subscribers: told each `ScaleRecord`; the session's own list.
        on_collapse: as `CollapseWatch`.
        master_weights: whether optimizers step masters, so that gradients need work at every scale.
    """

    def __init__(
        self,
        hooks: Hooks,
        scalers: Sequence[LossScaler],
        subscribers: list[Subscriber],
        *,
        on_collapse: OnCollapse,
        master_weights: bool,
    ) -> None:
        self.scalers = tuple(scalers)
        self._hooks, self._subscribers, self._master_weights = hooks, subscribers, master_weights
        self._watches = [CollapseWatch(on_collapse) for _ in self.scalers]

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of ``loss_id``.

        Raises:
            TypeError: not an integer.
            IndexError: no scaler has that number.
        """
        if isinstance(loss_id, bool) or not isinstance(loss_id, int):
            raise TypeError(f"loss_id={loss_id!r}: expected a whole number; they are numbered from 0.")
        if not 0 <= loss_id < len(self.scalers):
            raise IndexError(
                f"loss_id={loss_id}: there are {len(self.scalers)} loss scalers, numbered from 0; "
                "pass num_losses to amp.initialize to have more."
            )
        return self.scalers[loss_id]

    @contextlib.contextmanager
    def scaled(
        self, loss: Tensor, optimizers: Any, loss_id: int, *, delay_unscale: bool, delay_overflow_check: bool
    ) -> Iterator[Tensor]:
        """The body of `Session.scale_loss`; see there for the arguments."""
        scaler = self.scaler(loss_id)
        hooked = self._hooked(optimizers, scaler)
        self._hooks.refuse_sharded_since()
        scale = scaler.scale
        if self._nothing_to_do(scaler, hooked):
            yield loss.float()
            return
        for each in hooked:
            each.refuse_another_scale(scale)
        with ScaledBackward(hooked, scale) as backward:
            for each in () if delay_unscale else hooked:
                each.begin_averaging({f"the loss scale of loss_id {loss_id}": f"{scale}"})
            scaled = loss.float() * scale
            self._tell_of_loss(ScaledLoss(loss, scaled, backward.all_aside), hooked)
            yield scaled
            if delay_unscale or self._hooks.await_average(hooked) or await_shards(hooked):
                for each, aside in backward.aside:
                    each.keep_scaled(aside, scale)
                return
            found_inf = scaler.take_unchecked()
            with without_function_modes():
                for each, aside in backward.aside:
                    found_inf = each.unscale_new(aside, scale, found_inf)
        if delay_overflow_check:
            scaler.unchecked = found_inf
        else:
            self._decide(found_inf, loss_id, scaler, hooked, loss)

    def _tell_of_loss(self, loss: ScaledLoss, hooked: Sequence[HookedOptimizer]) -> None:
        for subscriber in list(self._subscribers):
            if subscriber.at_loss is not None and subscriber.hears_of(hooked):
                subscriber.at_loss(loss)

    def _hooked(self, optimizers: Any, scaler: LossScaler) -> list[HookedOptimizer]:
        if optimizers is None or (isinstance(optimizers, list | tuple) and not optimizers):
            raise TypeError(
                f"scale_loss got optimizers={optimizers}: expected the optimizer, or a list of the optimizers, whose "
                "parameters this backward reaches; for the gradients of inputs alone use amp.scaled_grad."
            )
        chosen = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        if self._leaves_gradients(scaler):
            # Scripts rely on it with optimizers of inputs, which initialize has not seen.
            chosen = [each for each in chosen if not isinstance(each, Optimizer) or self._hooks.knows(each)]
        return list(dict.fromkeys(self._hooks.hooked(each) for each in chosen))

    def _leaves_gradients(self, scaler: LossScaler) -> bool:
        """Whether apex leaves the gradients of a backward as they are, does not check them, and does not count it."""
        return scaler.scale == 1.0 and not (scaler.dynamic or self._master_weights)

    def _nothing_to_do(self, scaler: LossScaler, hooked: Sequence[HookedOptimizer]) -> bool:
        quiet = self._leaves_gradients(scaler) and not self._subscribers
        return quiet and all(each.passes_gradients_through for each in hooked)

    def _decide(
        self,
        found_inf: Tensor | None,
        loss_id: int,
        scaler: LossScaler,
        hooked: Sequence[HookedOptimizer],
        loss: Tensor,
    ) -> None:
        """Read ``found_inf``, move the scale, and skip the next step after an overflow. Sync: as `scale_loss`."""
        scale = scaler.scale
        found = (scaler.dynamic or bool(self._subscribers)) and found_inf is not None and bool(found_inf)
        skipped = found and scaler.dynamic
        first = self._hooks.first_nonfinite(hooked) if found else None
        if not self._leaves_gradients(scaler):
            scaler.update(skipped)
        record = ScaleRecord(loss_id, scale, scaler.scale, found, skipped, first, loss.detach())
        for each in hooked if skipped else ():
            each.skip_next_step(record, scaler.loss_scale)
        for subscriber in list(self._subscribers):
            if subscriber.hears_of(hooked):
                subscriber.callback(record)
        with without_function_modes():
            self._watches[loss_id].see(record, loss)


def checked_loss(loss: Any) -> Tensor:
    """Return the loss. Its shape, and whether it requires a gradient, matter only to a backward from it, as in apex.

    Raises:
        TypeError: not a tensor, or a tensor of integers, booleans or complex numbers.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"scale_loss got a loss of type {type(loss).__name__}: expected the tensor to run backward from."
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"scale_loss got a loss of {loss.dtype}: expected a floating-point tensor, since only those have "
            "gradients; pass the loss before it is rounded or counted, not an accuracy."
        )
    return loss


@contextlib.contextmanager
def explaining_backward(loss: Tensor) -> Iterator[None]:
    """Explain a backward that fails in the block because of ``loss``; torch's own message does not name the loss.

    Raises:
        RuntimeError: the loss requires no gradient, or has several elements.
    """
    try:
        yield
    except RuntimeError as error:
        explanation = _explanation(loss, str(error))
        if explanation is None:
            raise
        raise RuntimeError(explanation) from error


def _explanation(loss: Tensor, message: str) -> str | None:
    if not loss.requires_grad and _NEEDS_NO_GRADIENT in message:
        return (
            "scale_loss got a loss that requires no gradient: expected one computed from parameters that do; look for "
            "detach(), torch.no_grad(), torch.tensor(...) around a loss, or parameters that are all frozen."
        )
    if loss.numel() != 1 and _NO_SCALAR in message:
        return (
            f"scale_loss got a loss of shape {tuple(loss.shape)}: expected one element to run backward from; call "
            "scaled_loss.mean().backward() or scaled_loss.sum().backward()."
        )
    return None


# -- a scale that no backoff can save ----------------------------------------------------------------


class LossScaleCollapse(RuntimeError):
    """Raised at the end of `scale_loss` when every recent step was skipped and no smaller scale can avoid that.

    A skip counts if the loss was not finite before scaling, or if the scale was 1 or less. It is raised after
    `SKIPS_BEFORE_COLLAPSE` of them in a row. The scale has been updated and the step will be skipped,
    so training can continue.

    Attributes:
        record: the last of the skips, with the loss scale and the gradient that was reached first.
        skips: how many there were in a row.
        loss_was_finite: whether the last loss was finite before it was scaled.
    """

    def __init__(self, message: str, record: ScaleRecord, skips: int, *, loss_was_finite: bool) -> None:
        super().__init__(message)
        self.record, self.skips, self.loss_was_finite = record, skips, loss_was_finite

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (str(self), self.record, self.skips, self.loss_was_finite)


class CollapseWatch:
    """Count the skips of one loss scaler that no smaller scale would have avoided.

    Args:
        on_collapse: "raise" `LossScaleCollapse`, or "warn" once until the next clean backward.
    """

    def __init__(self, on_collapse: OnCollapse) -> None:
        self._on_collapse = on_collapse
        self._skips = 0
        keep_of(self, "_skips")

    def see(self, record: ScaleRecord, loss: Tensor) -> None:
        """Count one backward.

        Args:
            record: its result.
            loss: the loss before scaling, any shape.

        Raises:
            LossScaleCollapse: after `SKIPS_BEFORE_COLLAPSE` skips.

        Sync: one after a skip, else none.
        """
        use(self)
        if not record.skipped:
            self._skips = 0
            return
        finite = bool(loss.detach().isfinite().all())
        self._skips = 0 if finite and record.loss_scale > 1.0 else self._skips + 1
        if self._skips < SKIPS_BEFORE_COLLAPSE:
            return
        collapse = LossScaleCollapse(_message(record, self._skips, finite), record, self._skips, loss_was_finite=finite)
        if self._on_collapse == "raise":
            raise collapse
        if self._skips == SKIPS_BEFORE_COLLAPSE:
            warnings.warn(str(collapse), stacklevel=7)  # the line of the block of scale_loss


def checked_on_collapse(value: str) -> OnCollapse:
    """Return ``value``.

    Raises:
        ValueError: neither "raise" nor "warn".
    """
    if value == "raise":
        return "raise"
    if value == "warn":
        return "warn"
    raise ValueError(
        f'on_collapse={value!r}: expected "raise" (LossScaleCollapse), or "warn" to continue after a collapse.'
    )


def _message(record: ScaleRecord, skips: int, finite: bool) -> str:
    cause = (
        f"gradients are not finite at a loss scale of {record.loss_scale}, which does not enlarge them"
        if finite
        else "the loss is not finite before it is scaled"
    )
    first = record.first_nonfinite
    where = f"the backward reached the gradient of {first} first" if first else "no parameter could be identified"
    return (
        f"Loss scaler {record.loss_id} has skipped {skips} steps in a row, and further backoff cannot help: {cause}. "
        f"Of the non-finite gradients, {where}. The loss scale is now {record.next_loss_scale}. Look for inf or NaN in "
        "the batch, the weights and the forward, lower the learning rate, or pass "
        'on_collapse="warn" to amp.initialize to continue.'
    )


def _unpickled(message: str, record: ScaleRecord, skips: int, loss_was_finite: bool) -> LossScaleCollapse:
    return LossScaleCollapse(message, record, skips, loss_was_finite=loss_was_finite)


# -- saved scales ------------------------------------------------------------------------------------


def save_scalers(scalers: Sequence[LossScaler], destination: Any = None) -> Any:
    """Return ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}, …}``, in ``destination`` if one is given."""
    saved = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(scalers):
        saved[f"loss_scaler{index}"] = scaler.state_dict()
    return saved


def load_scalers(scalers: Sequence[LossScaler], saved: Mapping[str, Any]) -> None:
    """Load what `save_scalers` returned, by the number in each key. Entries without a scaler print a line.

    Raises:
        TypeError: ``saved`` is not a mapping.
        RuntimeError: unknown keys; the other entries are loaded first.
        ValueError: as `LossScaler.load_state_dict`.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"amp.load_state_dict got an object of type {type(saved).__name__}: expected the mapping that "
            'amp.state_dict() returned; with a checkpoint pass checkpoint["amp"].'
        )
    if len(saved) != len(scalers):
        _say(f"Warning: state_dict contains {len(saved)} entries, while {len(scalers)} loss_scalers are used")
    unexpected = []
    for key, entry in saved.items():
        number = re.fullmatch(r"loss_scaler(\d+)", key)
        if number is None:
            unexpected.append(f'"{key}"')
        elif int(number[1]) < len(scalers):
            _load(key, scalers[int(number[1])], entry)
        else:
            _say(f"Skipping loss_scaler[{number[1]}], since num_losses was set to {len(scalers)}")
    if unexpected:
        names = ", ".join(unexpected)
        raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}. ")


def _load(key: str, scaler: LossScaler, entry: Mapping[str, Any]) -> None:
    scaler.load_state_dict(entry)
    if entry["loss_scale"] != scaler.scale:
        kept = "its floor" if scaler.dynamic else "static"
        _say(f"Warning: {key} was saved at {entry['loss_scale']}; its loss scale stays {scaler.scale} ({kept})")


def _say(line: str) -> None:
    print(line)  # noqa: T201  apex prints these at every verbosity


def checked_entry(saved: Any) -> tuple[float, int]:
    """Return the scale and the count of one saved entry. Raises: ValueError, as `LossScaler.load_state_dict`."""
    try:
        scale, clean_steps = float(saved["loss_scale"]), int(saved["unskipped"])
        count = float(saved["unskipped"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{saved!r}: expected {{'loss_scale': float, 'unskipped': int}}, as amp.state_dict() returns."
        ) from None
    if clean_steps < 0 or count != clean_steps:
        raise ValueError(
            f"unskipped={saved['unskipped']!r}: expected a whole number >= 0, the backwards since the scale last "
            "moved; use 0 to start counting again."
        )
    # apex checkpoints of a collapsed run hold 0.0; training continues from the floor.
    return scale if scale == 0.0 else _float32_scale("loss_scale", scale), clean_steps


def _float32_scale(name: str, value: float) -> float:
    scale = scale_value(name, value)
    if not _SMALLEST_SUBNORMAL <= scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"{name}={scale}: expected a number in the range of float32, from 2^-149 to 2^128, since losses are "
            "multiplied by it in float32; a dynamic scale starts at 65536.0."
        )
    return scale
