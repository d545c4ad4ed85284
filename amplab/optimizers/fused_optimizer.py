"""The part that all fused optimizers share: one pass over the gradients, and one over everything.

    check_gradients()    reads the gradients: found_inf of each device, and their norm if the step clips
    unscale_gradients_() the same, and grad <- grad / scale, for float32 gradients under amplab's GradScaler
    step()               factor = 1 / grad_scale * min(1, max_grad_norm / (norm + 1e-6));  the rule, unless found_inf
                         grad <- grad / grad_scale, if that is left to do

The rule uses the product of a gradient and the factor in float32. After the step gradients are unscaled, and not
clipped, as those of torch's fused optimizers. State is float32 for 16-bit parameters. The lists for the kernels are
reused as long as the groups have the same parameters, the same parameters have gradients, and nobody replaced their
state. The rules are in ``fused_sgd.py`` and its neighbors, the kernels in `amplab.kernels.steps`.
"""

import functools
import inspect
import itertools
import operator
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.kernels import is_refusal, unscale_, unscaled_norm
from amplab.kernels.builder import checked_mode
from amplab.kernels.operators import without_gradients
from amplab.optimizers.group_settings import REQUIRED, check_settings, groups_with_rates
from amplab.policies.casting.function_modes import without_function_modes
from amplab.scalers import is_sharded, local_shard, to_device

__all__ = ["FusedOptimizer", "StepBatch", "new_state"]

_MASTER = "master"
_SHARED_STATE = {"step", _MASTER}  # of every rule


@dataclass(frozen=True)
class StepBatch:
    """The parameters of one group that one call of a kernel steps.

    Args:
        group: the group, with the rule's settings.
        params: on one device; a 16-bit parameter with a float32 master is replaced by it, a sharded one by the shard
            of this rank.
        copies: the parameters of those masters; empty if there are none.
        states: the state of each.
        places: the index of each among all parameters of the optimizer.
        first: this is their first step, if the rule treats it differently.
    """

    group: dict[str, Any]
    params: list[Tensor]
    copies: list[Tensor]
    states: list[dict[str, Any]]
    places: list[int]
    first: bool

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.params[0].device

    def state(self, name: str) -> list[Tensor]:
        """Return one entry of the state of each parameter, of a sharded one the shard of this rank."""
        return [local_shard(state[name]) for state in self.states]


@dataclass(frozen=True)
class _Plan:
    """The batches of a step, and what they depend on."""

    batches: list[StepBatch]
    groups: list[dict[str, Any]]
    listed: list[Tensor]
    has_grad: list[bool]
    states: list[dict[str, Any]]
    settings: tuple[Any, ...]

    def fits(
        self,
        groups: list[dict[str, Any]],
        listed: list[Tensor],
        grads: list[Tensor | None],
        states: Mapping[Tensor, Any],
        settings: tuple[Any, ...],
    ) -> bool:
        """Return whether another step may reuse it. Replaced state is another object; cleared state is empty.

        The groups are others after `load_state_dict`.
        """
        return (
            settings == self.settings
            and len(groups) == len(self.groups)
            and all(map(operator.is_, groups, self.groups))
            and _same(listed, self.listed)
            and len(states) == len(self.states)
            and all(map(operator.is_, states.values(), self.states))
            and all(self.states)
            and self.has_grad == [grad is not None for grad in grads]
        )


class FusedOptimizer(Optimizer):
    """An optimizer whose step unscales, clips and skips in the pass that steps.

    It works alone, under ``amp.initialize``, and under ``torch.amp.GradScaler`` and `amplab.amp.GradScaler`, which set
    its ``grad_scale`` and ``found_inf`` during a step. A subclass calls the rule's kernel (`_run`) and makes its state
    (`_begin_state`).

    Attributes:
        keeps_grads_scaled: after a step under a ``grad_scale``, leave ``.grad`` multiplied by it. False by default:
            what reads gradients after the step, such as a log of their norm, sees them unscaled. After a skipped step
            they may be scaled. Set it to True to save the writes. A clip by ``max_grad_norm`` never changes ``.grad``.

    Reference: ``torch.optim.Optimizer``; the protocol of ``_step_supports_amp_scaling`` in ``torch.amp.GradScaler``.
    """

    keeps_grads_scaled = False
    _step_supports_amp_scaling = True
    _plan: _Plan | None = None
    _checked: tuple[Tensor, Tensor] | None = None  # from check_gradients to the step with its found_inf

    # A key that the state of every stepped parameter has, and that of another rule has not.
    _leading_state = "exp_avg"
    _counts_in_groups = False  # whether group["step"] is the number of steps, as in apex
    _reads_whole_tensors = False  # whether the rule uses a norm of each tensor
    _sharded = False  # whether a parameter is a DTensor; the kernels then take the shards of this rank
    _counts: Sequence[Any] = ()  # group["step"] of each group, as this optimizer wrote it

    def __init__(self, params: Any, *settings: Any, **named: Any) -> None:
        """Check the settings by their names in torch's constructor of the same rule, and call it.

        A learning rate that is `REQUIRED` must be in every group.
        """
        checked_mode()
        bound = inspect.signature(super().__init__).bind(params, *settings, **named)
        given = bound.arguments.get("defaults", bound.arguments)
        in_groups = given.get("lr") is REQUIRED
        if in_groups:
            bound.arguments["params"] = groups_with_rates(type(self).__name__, params)
            given["lr"] = 0.0  # unused: every group has its own rate
        check_settings(type(self).__name__, given)
        super().__init__(*bound.args, **bound.kwargs)
        if in_groups:
            del self.defaults["lr"]

    @abstractmethod
    def _begin_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        """Complete the state of a parameter; return whether its first step differs from later ones."""

    @abstractmethod
    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Call the kernel."""

    def _keeps_state(self, group: dict[str, Any]) -> bool:
        """Return whether the parameters of a group have any state."""
        del group
        return True

    def _settings(self) -> tuple[Any, ...]:
        """Return what the batches depend on, besides the parameters and their state."""
        return ()

    def _asks_before_it_begins(self) -> bool:
        """Return whether a skipped first step must not leave state."""
        return False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once, and leave gradients unscaled; see ``keeps_grads_scaled``.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returns.

        Raises:
            RuntimeError: a sparse, complex or integer gradient.

        Sync: none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        norm = self._norm_found_with(found_inf)
        with without_function_modes():
            self._step_all(scale, found_inf, norm)
        return loss

    @without_gradients
    def _step_all(self, scale: Tensor | None, found_inf: Tensor | None, norm: Tensor | None) -> None:
        for group, count in zip(self.param_groups, self._counts, strict=False):
            if group.get("step") is not count:
                self._count_from(group)
        batches, grads = self._current(found_inf)
        if batches:
            self._step(batches, grads, scale, found_inf, norm)
            if scale is not None and not self.keeps_grads_scaled:
                self._unscale([grad for grad in grads if grad is not None], scale, found_inf)
            if self._counts_in_groups:
                self._count(found_inf)

    @torch.no_grad()
    def check_gradients(self) -> dict[torch.device, Tensor]:
        """Check whether the gradients are finite, and compute their norm if the step will clip; write nothing.

        Returns:
            For every device with gradients ``()`` float32: > 0 if one of them is inf or NaN.

        Sync: none.
        """
        with without_function_modes():
            grads = [grad for grad in self._grads(self._listed()) if grad is not None]
            if not grads:
                return {}
            found, norm = self._check(grads)
        self._checked = None if norm is None else (next(iter(found.values())), norm)
        return found

    @torch.no_grad()
    def unscale_gradients_(self, scale: Tensor) -> dict[torch.device, Tensor] | None:
        """Divide the gradients by ``scale`` in the pass that checks them.

        Args:
            scale: one element.

        Returns:
            As `check_gradients`; None if nothing was written: with ``keeps_grads_scaled``, and for gradients that are
            16-bit (which would be rounded before the step), sparse, on several devices or in shared memory.

        Sync: none.
        """
        with without_function_modes():
            grads = [grad for grad in self._grads(self._listed()) if grad is not None]
            if self.keeps_grads_scaled or not grads or any(grad.dtype in LOW_PRECISION_DTYPES for grad in grads):
                return None
            inverse = to_device(_inverse(scale), grads[0].device)
            try:
                found, norm = _check_device(grads, bool(self._max_norm), inverse)
            except RuntimeError as error:
                if not is_refusal(error):
                    raise
                return None
        self._checked = None if norm is None else (found, norm)
        return {found.device: found}

    def _norm_found_with(self, found_inf: Tensor | None) -> Tensor | None:
        """Return the norm of the check that made ``found_inf``; None if another check made it."""
        checked, self._checked = self._checked, None
        if checked is None or found_inf is None or found_inf.data_ptr() != checked[0].data_ptr():
            return None
        return checked[1]

    def _check(self, grads: list[Tensor]) -> tuple[dict[torch.device, Tensor], Tensor | None]:
        """Return found_inf of each device, and the norm of all gradients if the step clips."""
        try:
            found, norm = _check_device(grads, bool(self._max_norm))
            return {found.device: found}, norm
        except RuntimeError as error:
            if not is_refusal(error):  # sparse, or on several devices
                raise
            return self._check_by_device(grads)

    def _check_by_device(self, grads: list[Tensor]) -> tuple[dict[torch.device, Tensor], Tensor | None]:
        """Do the same for gradients that one call of the kernel does not take."""
        grads = [grad._values() if grad.is_sparse else grad for grad in grads]
        checked = [_check_device(here, bool(self._max_norm)) for here in _by_device(grads).values()]
        return {found.device: found for found, _ in checked}, _total([norm for _, norm in checked if norm is not None])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: to None, or to zeros if the optimizer was made with ``set_grad_none=False``."""
        super().zero_grad(self.defaults.get("set_grad_none", True) if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this or torch's optimizer of the same rule; 16-bit parameters keep float32 state."""
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for key, param in zip(saved, self._listed(), strict=False):  # a hook may have loaded something else
            if param.dtype in LOW_PRECISION_DTYPES:
                _keep_exact(self.state.get(param, {}), state_dict["state"].get(key, {}), param.dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            RuntimeError: an option that the kernels do not support.
            TypeError: a setting of the wrong type.
            ValueError: a number out of its range; no ``lr``, if the optimizer was made without one.
        """
        if isinstance(param_group, dict):  # else torch raises
            if "lr" not in self.defaults:
                groups_with_rates(type(self).__name__, [param_group], first=len(self.param_groups))
            check_settings(type(self).__name__, param_group)
        super().add_param_group(param_group)
        self._refuse(self.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle contains; torch's leaves out attributes."""
        state: dict[str, Any] = super().__getstate__()
        return state | ({"keeps_grads_scaled": True} if self.keeps_grads_scaled else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state of any optimizer of the same rule."""
        defaults = state.get("defaults") or self.defaults  # a pickle has them, a state_dict does not
        names = set(defaults)
        for group in state["param_groups"]:
            has_count = "step" in group
            for name, default in defaults.items():
                group.setdefault(name, default)
            if "fused" in defaults:  # torch's class has this option, and the state of torch's says None
                group["fused"] = True
            self._refuse(group)
            for param in group["params"]:
                if param in state["state"]:
                    _refuse_foreign_state(type(self).__name__, state["state"][param], self._leading_state)
                    self._adopt_state(param, group, state["state"][param])
            if self._counts_in_groups:
                _adopt_count(group, state["state"], has_count)
        super().__setstate__(state)
        for name in set(self.defaults) - names:  # torch adds "differentiable"; the next copy's groups would have it
            del self.defaults[name]
        if self._counts_in_groups:
            self._counts = [group.get("step") for group in self.param_groups]

    def _adopt_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Convert the state of another optimizer into the form that the kernels take."""
        if self._leading_state in state and "step" in group:
            state.setdefault("step", float(group["step"]))  # apex has one count for a whole group
        for name, value in state.items():
            if name == "step":
                state[name] = torch.as_tensor(value, dtype=torch.float32, device=param.device).reshape(())
            elif isinstance(value, Tensor) and value.dtype in LOW_PRECISION_DTYPES:
                state[name] = value.float()

    def _refuse(self, group: dict[str, Any]) -> None:
        """Raise if a group has an option, or parameters, that the kernels do not support."""
        name = type(self).__name__
        for option in ("amsgrad", "differentiable", "foreach"):
            if group.get(option):
                raise RuntimeError(
                    f"{name} got {option}=True: expected False; use torch.optim.{name.removeprefix('Fused')} for that."
                )
        self._sharded = self._sharded or any(map(is_sharded, group["params"]))
        if self._sharded and (self._reads_whole_tensors or self._max_norm > 0):
            rule = "uses the norm of each tensor" if self._reads_whole_tensors else f"max_grad_norm={self._max_norm}"
            raise RuntimeError(
                f"{name} ({rule}) got a sharded parameter (DTensor), of which each rank holds a part: expected whole "
                "ones. Use FusedAdamW or FusedSGD without max_grad_norm, and clip with scaler.unscale_and_clip_."
            )

    def _add_defaults(self, own: dict[str, Any], max_grad_norm: float | None) -> None:
        """Add the settings that torch's constructor does not know to the defaults and groups."""
        check_settings(type(self).__name__, {**own, "max_grad_norm": max_grad_norm})
        self.defaults.update(own, max_grad_norm=max_grad_norm)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            self._refuse(group)

    @property
    def _max_norm(self) -> float:
        """The bound of the norm of all gradients; 0.0 for no clipping."""
        return self.defaults.get("max_grad_norm") or 0.0

    def _listed(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))

    def _grads(self, listed: list[Tensor]) -> list[Tensor | None]:
        """Return the gradient of each parameter, of a sharded one the shard of this rank."""
        grads = [param.grad for param in listed]
        return [None if grad is None else local_shard(grad) for grad in grads] if self._sharded else grads

    def _current(self, found_inf: Tensor | None) -> tuple[list[StepBatch], list[Tensor | None]]:
        """Return the batches of this step, and the gradient of each parameter."""
        listed, settings = self._listed(), self._settings()
        grads = self._grads(listed)
        plan = self._plan
        if plan is None or not plan.fits(self.param_groups, listed, grads, self.state, settings):
            if found_inf is not None and self._asks_before_it_begins() and found_inf.item() != 0:
                return [], grads
            batches = list(self._make_batches(grads))
            has_grad = [grad is not None for grad in grads]
            plan = _Plan(batches, [*self.param_groups], listed, has_grad, list(self.state.values()), settings)
            self._plan = None if any(batch.first for batch in batches) else plan
        return plan.batches, grads

    def _make_batches(self, grads: list[Tensor | None]) -> Iterator[StepBatch]:
        place = itertools.count()
        for group in self.param_groups:
            batches: dict[tuple[Any, ...], StepBatch] = {}
            for param in group["params"]:
                here = next(place)
                if grads[here] is None:
                    continue
                state = self.state[param] if self._keeps_state(group) else {}
                master = _master_of(param, state) if group.get("master_weights") else None
                first = self._begin_state(param, group, state)
                key = (param.device, first, master is not None)
                batch = batches.setdefault(key, StepBatch(group, [], [], [], [], first))
                batch.params.append(local_shard(param if master is None else master))
                batch.copies.extend([] if master is None else [local_shard(param)])
                batch.states.append(state)
                batch.places.append(here)
            yield from batches.values()

    def _step(
        self,
        batches: list[StepBatch],
        grads: list[Tensor | None],
        scale: Tensor | None,
        found_inf: Tensor | None,
        norm: Tensor | None,
    ) -> None:
        if self._max_norm and norm is None:
            norm = self._check([grad for grad in grads if grad is not None])[1]
        factor = _factor(scale, norm, self._max_norm)
        for batch in batches:
            mine = [grad for place in batch.places if (grad := grads[place]) is not None]
            try:
                self._run(batch, mine, _on(batch.device, factor), _on(batch.device, found_inf))
            except RuntimeError as error:
                if not is_refusal(error):
                    raise
                raise _with_names(error, self.param_groups, batch.places) from error

    def _unscale(self, grads: list[Tensor], scale: Tensor, found_inf: Tensor | None) -> None:
        """Divide gradients by ``scale`` in place, unless the step was skipped. Sync: none."""
        if found_inf is not None and found_inf.device.type == "cpu" and found_inf.item() != 0:
            return
        inverse = _inverse(scale)
        if found_inf is not None and found_inf.device.type != "cpu":
            skipped = to_device(found_inf, inverse.device).reshape(()) != 0
            inverse = torch.where(skipped, 1.0, inverse)
        try:
            for device, here in _by_device(grads).items():
                unscale_(here, torch.zeros((), dtype=torch.float32, device=device), to_device(inverse, device))
        except RuntimeError as error:
            if not is_refusal(error):  # gradients that share memory, or that are expanded
                raise
            for param in self._listed():
                if param.grad is not None:
                    param.grad = param.grad * to_device(inverse, param.device)

    def _count(self, found_inf: Tensor | None) -> None:
        """Count a step in every group, unless it was skipped. Sync: none; on a GPU the count is then a tensor."""
        taken: int | Tensor = 1
        if found_inf is not None:
            not_skipped = found_inf.reshape(()) == 0
            taken = int(not_skipped) if found_inf.device.type == "cpu" else not_skipped.int()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + taken
        self._counts = [group["step"] for group in self.param_groups]

    def _count_from(self, group: dict[str, Any]) -> None:
        """Give the parameters of a group the count that a script has written to it."""
        for param in group["params"]:
            if "step" in (state := self.state.get(param, {})) and group.get("step") is not None:
                state["step"].fill_(int(group["step"]))


def new_state(param: Tensor) -> Tensor:
    """Return zeros in the layout of ``param``, in float32 if it has 16 bits."""
    dtype = torch.float32 if param.dtype in LOW_PRECISION_DTYPES else param.dtype
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _factor(scale: Tensor | None, norm: Tensor | None, max_norm: float) -> Tensor | None:
    """Return ``1 / scale`` times the clipping coefficient of gradients with the scaled norm ``norm``; None for 1."""
    inverse = None if scale is None else _inverse(scale)
    if norm is None:
        return inverse
    if norm.device.type == "cpu" and (inverse is None or inverse.device.type == "cpu"):
        number = 1.0 if inverse is None else inverse.item()  # as Python numbers: no torch call for each operation
        return torch.full((), number * _clipping(norm.item() * number, max_norm), dtype=torch.float32)
    factor = _one(norm.device) if inverse is None else to_device(inverse, norm.device)
    return factor * torch.clamp(max_norm / (norm * factor + 1e-6), max=1.0)


def _inverse(scale: Tensor) -> Tensor:
    """Return ``1 / scale``, ``()`` float32, computed in float64."""
    if scale.device.type == "cpu":
        value = scale.item()
        return torch.full((), 1.0 / value if value != 0.0 else float("inf"), dtype=torch.float32)
    return scale.double().reciprocal().float().reshape(())


def _clipping(norm: float, max_norm: float) -> float:
    """Return the coefficient of ``torch.nn.utils.clip_grad_norm_``; NaN if the norm is NaN."""
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


def _master_of(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    """Return the float32 master of a 16-bit parameter, made from it if there is none yet."""
    if param.dtype not in LOW_PRECISION_DTYPES:
        return None
    if _MASTER not in state:
        state[_MASTER] = param.detach().float()
    master: Tensor = state[_MASTER]
    return master


def _adopt_count(group: dict[str, Any], states: Mapping[Tensor, Any], has_count: bool) -> None:
    """Set the count of a loaded group to that of its parameters, or theirs to its own if that was set back.

    A group counts on while a parameter of it has no gradient, so a count above those of all parameters is not a change.
    Sync: one for each parameter on a GPU.
    """
    steps = [states[param]["step"] for param in group["params"] if "step" in states.get(param, {})]
    counts = [int(step) for step in steps]
    if not counts:
        return
    if has_count and int(group["step"]) < max(counts):
        group["step"] = int(group["step"])
        for step in steps:
            step.fill_(group["step"])
    else:
        group["step"] = max(counts)


def _keep_exact(loaded: dict[str, Any], saved: dict[str, Any], dtype: torch.dtype) -> None:
    """Undo the rounding of `torch.optim.Optimizer.load_state_dict`, which casts all state to the parameter's dtype."""
    for name, exact in saved.items():
        value = loaded.get(name)
        if not (isinstance(value, Tensor) and isinstance(exact, Tensor)):
            continue
        both = exact.dtype == torch.float32 == value.dtype
        if both and torch.equal(value, exact.to(value.device, dtype).float()):
            value.copy_(exact)


def _by_device(grads: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    return by_device


def _check_device(grads: list[Tensor], with_norm: bool, factor: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return found_inf of gradients on one device, and their norm if requested; ``()`` float32 each.

    If there is a factor, the gradients are multiplied by it first, in place.
    """
    device = grads[0].device
    found, norm = (
        torch.zeros((), dtype=torch.float32, device=device),
        torch.zeros((), dtype=torch.float32, device=device) if with_norm else None,
    )
    if factor is None:
        unscaled_norm(grads, found, _one(device), norm=norm)
    else:
        unscale_(grads, found, factor, norm=norm)
    return found, norm


@functools.cache
def _one(device: torch.device) -> Tensor:
    """Return ``()`` float32, 1.0, which must not be written."""
    return torch.ones((), dtype=torch.float32, device=device)


def _total(norms: list[Tensor]) -> Tensor | None:
    if len(norms) < 2:
        return norms[0] if norms else None
    total: Tensor = torch.linalg.vector_norm(torch.stack([to_device(norm, norms[0].device) for norm in norms]))
    return total


def _on(device: torch.device, scalar: Tensor | None) -> Tensor | None:
    return None if scalar is None else to_device(scalar, device)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _refuse_foreign_state(optimizer: str, state: Mapping[str, Any], leading: str) -> None:
    """Raise if the state of a parameter is that of another rule.

    Args:
        optimizer: its name, for the message.
        state: of one parameter; empty if it was never stepped.
        leading: a key that the state of every stepped parameter has.

    Raises:
        ValueError: the state has other keys, but not ``leading``.

    >>> _refuse_foreign_state("FusedSGD", {"momentum_buffer": 0}, "momentum_buffer")
    """
    foreign = state.keys() - _SHARED_STATE
    if foreign and leading not in state:
        raise ValueError(
            f"The state of a parameter has {', '.join(sorted(foreign))}: {optimizer} expected {leading}; load a "
            "checkpoint of the same rule, or start without one."
        )


def _with_names(error: RuntimeError, groups: Sequence[Mapping[str, Any]], places: Sequence[int]) -> RuntimeError:
    """Return the error of a kernel with the names of parameters, if the groups have them.

    Args:
        error: its message gives tensors by their index in the lists of one call.
        groups: of the optimizer.
        places: the index of each parameter of the call among all of the optimizer.

    >>> _with_names(RuntimeError("grad 0 is not strided."), [{"params": [1, 2], "param_names": ["a", "b"]}], [1])
    RuntimeError('grad of b is not strided.')
    """
    names: list[str | None] = []
    for group in groups:
        names += group.get("param_names") or [None] * len(group["params"])

    def named(found: re.Match[str]) -> str:
        place = int(found[2])
        name = names[places[place]] if place < len(places) else None
        return found[0] if name is None else f"{found[1]} of {name}"

    return RuntimeError(re.sub(r"\b(param|grad|state|copy|step) (\d+)\b", named, str(error)))
