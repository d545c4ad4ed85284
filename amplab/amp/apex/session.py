"""Session: mixed precision with apex's levels for one experiment. Nothing in it is global.

    with session.casting():
        loss = criterion(model(x), y)
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()

The levels are in `opt_levels`, the block of `scale_loss` in `loss_scaling`, the hooks on models and optimizers in
`hooks`. The module functions of `amplab.amp` are in `functions`: they use one session for the program.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.apex.banner import banner, is_first_rank
from amplab.amp.apex.cast_lines import VerboseEngine
from amplab.amp.apex.hooks import Hooks
from amplab.amp.apex.initialize_arguments import (
    Permissions,
    checked_cast_model_outputs,
    checked_combined,
    checked_combined_ddp,
    checked_models,
    checked_optimizers,
    checked_verbosity,
    refuse_half,
    refuse_older_than_shards,
    refuse_scripted,
    refuse_sharded,
    settings_in_common,
    warn_of_unused,
)
from amplab.amp.apex.level_policy import checked_policies, engine_policy, with_registered
from amplab.amp.apex.loss_scaling import (
    LossScaler,
    LossScaling,
    OnCollapse,
    Subscriber,
    checked_loss,
    checked_on_collapse,
    explaining_backward,
    load_scalers,
    save_scalers,
    scale_rule,
)
from amplab.amp.apex.opt_levels import OptProperties, opt_level_named
from amplab.amp.apex.optimizer_names import refuse_taken_names
from amplab.amp.apex.registered_functions import (
    ALLOW_BANNED,
    RegisteredFunctions,
    Registration,
    replace_attributes,
    warn_of_idle,
)
from amplab.amp.arguments import as_list, checked_flag, checked_num_losses
from amplab.amp.backward.clipping import clip_by_norm_, clip_shards_by_norm_
from amplab.amp.backward.optimizer_params import master_params
from amplab.amp.backward.records import MemoryUse, ScaledLoss, ScaleRecord, StepOutcome
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.kernels.builder import checked_mode
from amplab.parallel.combined_ddp import CombinedDDP
from amplab.policies import CastingEngine, CastPolicy, PrecisionPolicy, recomputing_by_rules
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.casting.thread_scopes import THREAD
from amplab.policies.signals import DeferredSignals
from amplab.scalers import CombinedUnscaler, Unscaler

__all__ = ["Session"]


class _Settings(NamedTuple):
    """The settings of a session, as before `initialize`: by default those after `reset`.

    Attributes:
        is_installed: whether the engine casts in this thread outside of blocks.
        is_used: whether there are models or optimizers that the session has initialized.
    """

    properties: OptProperties | None = None
    scaling: LossScaling | None = None
    verbosity: int = 1
    adopts_optimizers: bool = False
    registrations: tuple[Registration, ...] = ()
    engine: CastingEngine | None = None
    is_installed: bool = False
    is_used: bool = False


class Session:
    """Mixed precision for the models and optimizers of one experiment.

    Two sessions share nothing. A session may be used from any thread, but from one thread at a time.

    Args:
        registered: the functions that the user has registered; None for an empty list.
        permissions: what `initialize` does not refuse; None for the default.

    Attributes:
        verbosity: the argument of the last `initialize`.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> session = Session()
    >>> model, optimizer = session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> model.weight.dtype, next(session.master_params(optimizer)).dtype
    (torch.float16, torch.float32)
    """

    def __init__(self, registered: RegisteredFunctions | None = None, permissions: Permissions | None = None) -> None:
        self.registered = RegisteredFunctions() if registered is None else registered
        self.permissions = Permissions() if permissions is None else permissions
        self._adopts_optimizers = False
        self.verbosity = 1
        self._hooks = Hooks()
        self._engine: CastingEngine | None = None
        self._subscribers: list[Subscriber] = []
        self._properties: OptProperties | None = None
        self._scaling: LossScaling | None = None
        self._registrations: tuple[Registration, ...] = ()
        self._holder = object()  # of replaced attributes

    # -- settings in force ---------------------------------------------------------------------------

    @property
    def properties(self) -> OptProperties:
        """The properties in force; everything is off before `initialize`."""
        return self._properties or OptProperties()

    @property
    def initialized(self) -> bool:
        """Whether `initialize` has been called since the last `reset`, also with ``enabled=False``."""
        return self._properties is not None

    @property
    def opt_level(self) -> str | None:
        """The name of the level, "O0" to "O3"; None before `initialize` and with ``enabled=False``."""
        return self.properties.opt_level

    @property
    def scalers(self) -> tuple[LossScaler, ...]:
        """The loss scaler of each ``loss_id``; empty before `initialize` and with ``enabled=False``."""
        return () if self._scaling is None else self._scaling.scalers

    @property
    def engine(self) -> CastingEngine | None:
        """The engine that casts, or that computes products of halves on the CPU; None if the level needs none."""
        return self._engine

    def _require_initialized(self, name: str, *, opening: str = "`") -> None:
        if self._properties is None:  # apex opens its quotation of scale_loss with another sign
            raise RuntimeError(
                f"Invoked {opening}{name}`, but internal Amp state has not been initialized.  model, optimizer = "
                f"amp.initialize(model, optimizer, opt_level=...) must be called before `{name}`."
            )

    # -- before and after training -----------------------------------------------------------------

    def initialize(
        self,
        models: Any,
        optimizers: Any = None,
        enabled: bool = True,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | bool | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
        *,
        dynamic_init_scale: float = 2.0**16,
        scale_growth_factor: float = 2.0,
        scale_backoff_factor: float = 0.5,
        scale_window: int = 2000,
        on_collapse: OnCollapse = "raise",
        allow_banned: bool = False,
        user_cast_preferred: bool | None = None,  # noqa: ARG002  always the case here
        combine_grad: bool | None = None,
        combine_ddp: bool | None = None,
        ddp_replica_count: int = 4,
        check_combined_tensors: bool | None = None,
        policy: PrecisionPolicy | None = None,
    ) -> Any:
        """Prepare models and optimizers for an optimization level. The same objects are changed and returned.

        May be called again: models and optimizers that this session has initialized before are released first; their
        weights and optimizer state are kept.

        If it raises, also by the handler of a signal, what it was given is as before the call or as after `reset`, and
        everything else is as before. Where that releases the last model and optimizer, everything is as after `reset`.

        Args:
            models: a module or a list of modules, float32, on any device.
            optimizers: an optimizer, a list of them, or None.
            enabled: False returns everything as it is, and `scale_loss` yields the loss itself.
            opt_level: "O0", "O1", "O2" or "O3"; the properties that follow override those of the level.
            cast_model_type: dtype of the model's weights and inputs; False for no cast.
            patch_torch_functions: cast the arguments of torch functions (O1 only).
            keep_batchnorm_fp32: leave BatchNorm float32 when the model is cast.
            master_weights: step float32 masters of half parameters.
            loss_scale: "dynamic" or a number > 0.
            cast_model_outputs: dtype of the models' outputs; None for float32 if the model is cast.
            num_losses: number of loss scalers, one for each ``loss_id``.
            verbosity: 0 prints nothing; 1 the properties and each skipped step; 2 each cast of O1 as well.
            min_loss_scale: floor of a dynamic scale; None or 0 for float32's smallest normal number.
            max_loss_scale: ceiling of a dynamic scale; None for none.
            dynamic_init_scale: start of a dynamic scale.
            scale_growth_factor: multiplies the scale after ``scale_window`` backwards without overflow.
            scale_backoff_factor: multiplies the scale after an overflow.
            scale_window: see ``scale_growth_factor``.
            on_collapse: "raise" `LossScaleCollapse` or "warn" when further backoff cannot help.
            allow_banned: at O1 run ``F.binary_cross_entropy`` on half in float32 instead of refusing it.
            user_cast_preferred: accepted; registered functions always take precedence over the lists.
            combine_grad: keep the gradients of each optimizer in flat buffers, with bitwise the same results.
            check_combined_tensors: print a line whenever gradients had left those buffers, except after zero_grad.
            combine_ddp: average gradients over all ranks, in those buffers and during the backward, in place of
                DistributedDataParallel. Parameters and buffers become those of rank 0. The level, the rule of the loss
                scale and the optimizers' classes and settings must be equal on all ranks. They are compared here;
                later only parameters and loss scales are. A scheduler, and the optimizers' `load_state_dict`, must do
                the same on every rank.
            ddp_replica_count: the number of buckets to cut each buffer into; see `bucket_ends`.
            policy: the lists and the compute dtype of O1; None for those of apex in float16. Its op_rules and
                module_rules apply at every level, and what they compute keeps the dtype of the rule (see
                `PrecisionPolicy`). Weights of modules with a rule stay float32 at O0 and O1, and have the rule's dtype
                at O2 and O3, with masters if the level has masters.

        Returns:
            ``models``, or ``(models, optimizers)`` if optimizers were given.

        Warns:
            UserWarning: a registered float or promote function at O2 or O3, where it has no effect; in the first
                forward, a module rule without effect, because the weights of its module are read without calling it.

        Raises:
            RuntimeError: an override that is not allowed at this level; a model that is already half, wrapped, or
                compiled by TorchScript; at O2 and O3 one that is sharded; an optimizer made before ``fully_shard``;
                ``combine_ddp`` without a process group or ``combine_grad``, with a sharded model, or with models or
                settings that differ between ranks.
            TypeError: models or optimizers of another type.
            ValueError: a number out of its range; another value of ``AMPLAB_KERNELS`` than the builder knows;
                a module rule that names no module or contradicts another;
                ``combine_ddp`` without an optimizer.

        Sync: none.
        """
        arrived = models if optimizers is None else (models, optimizers)
        allow_banned = checked_flag("allow_banned", allow_banned)
        if not checked_flag("enabled", enabled):
            with DeferredSignals():  # an interrupt leaves nothing on
                self._hooks.release_connected(as_list(models), as_list(optimizers))
                self._change_settings(OptProperties(), None, verbosity=verbosity)
            return arrived
        if not torch.backends.cudnn.enabled:
            raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True")
        checked_mode()
        level = opt_level_named(opt_level)
        refuse = functools.partial(self.permissions.warn_or_err, quiet=verbosity == 0)
        properties = level.properties.with_overrides(
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
            refuse=refuse,
        )
        rule = scale_rule(
            properties.loss_scale,
            init_scale=dynamic_init_scale,
            growth_factor=scale_growth_factor,
            backoff_factor=scale_backoff_factor,
            growth_interval=scale_window,
            floor=min_loss_scale,
            ceiling=max_loss_scale,
        )
        combine, check = checked_combined(combine_grad, check_combined_tensors)
        buckets = checked_combined_ddp(
            combine_ddp, ddp_replica_count, combine_grad=combine, optimizers=optimizers, refuse=refuse
        )
        checked_on_collapse(on_collapse), checked_verbosity(verbosity), checked_cast_model_outputs(cast_model_outputs)
        chosen_models, chosen_optimizers = checked_models(models), checked_optimizers(optimizers)
        for model in chosen_models:
            refuse_scripted(model, properties.cast_model_type)
            refuse_sharded(model, level.name, properties.cast_model_type, combine_ddp=buckets is not None)
        refuse_older_than_shards(chosen_models, chosen_optimizers)
        policies = checked_policies(policy, chosen_models, properties.cast_model_type)
        scalers = [LossScaler.under(rule) for _ in range(checked_num_losses(num_losses))]
        before = self._settings()
        try:
            self._hooks.release_connected(chosen_models, chosen_optimizers)
            for model in () if self.permissions.allow_incoming_model_not_fp32 else chosen_models:
                refuse_half(model, refuse)
            for optimizer in chosen_optimizers:
                refuse_taken_names(optimizer)
            warn_of_unused(
                None if loss_scale is None else properties.loss_scale,
                dynamic_init_scale=dynamic_init_scale,
                scale_growth_factor=scale_growth_factor,
                scale_backoff_factor=scale_backoff_factor,
                scale_window=scale_window,
            )
            ddp = None
            if buckets is not None:
                common = settings_in_common(properties, rule, num_losses, chosen_optimizers, policy, on_collapse)
                ddp = CombinedDDP(chosen_models, replica_count=buckets, settings=common)
            if verbosity > 0 and is_first_rank():
                print(banner(level, properties))  # noqa: T201  as apex does
            scaling = LossScaling(
                self._hooks,
                scalers,
                self._subscribers,
                on_collapse=on_collapse,
                master_weights=bool(properties.master_weights),
            )
            if properties.cast_model_type in LOW_PRECISION_DTYPES:
                warn_of_idle(self.registered.all(), level.name)
            registered = (*((ALLOW_BANNED,) if allow_banned else ()), *self.registered.all())
            self._change_settings(properties, scaling, *registered, verbosity=verbosity, policy=policy)
            self._hooks.hook(
                chosen_models,
                chosen_optimizers,
                properties,
                [with_registered(each, registered) for each in policies],
                cast_model_outputs=cast_model_outputs,
                engine=self._engine,
                announce=verbosity > 0,
                unscaler=_unscaler_maker(combine=combine or ddp is not None, check=check),
                ddp=ddp,
            )
            return arrived
        except BaseException:
            self._take_back(before, chosen_models, chosen_optimizers)
            raise

    def start_casting(self, loss_scale: float | str = "dynamic", *, verbose: bool = False) -> None:
        """Choose O1 without models: ops are cast in `casting` and after `install`, and `scale_loss` has one scaler.

        `scale_loss` prepares the optimizers that it gets.

        Args:
            loss_scale: "dynamic" or a number > 0.
            verbose: print each cast.

        Raises:
            ValueError: a ``loss_scale`` out of its range.

        Reference: ``apex.amp.init``.
        """
        properties = opt_level_named("O1").properties.with_overrides(loss_scale=loss_scale)
        scaling = self._own_scaling(properties.loss_scale, 1)
        self._change_settings(properties, scaling, *self.registered.all(), verbosity=2 if verbose else 1)
        self._adopts_optimizers = True

    def adopt(self, optimizer: Any, *, announce: bool = True) -> None:
        """Prepare an optimizer that `initialize` has not seen, for `scale_loss` after `start_casting`.

        Nothing happens to one that is prepared already.

        Args:
            optimizer: without masters; its parameters are stepped as they are.
            announce: print a line for each skipped step.

        Raises:
            TypeError: not an optimizer.
            RuntimeError: one that has apex's private names already.
        """
        for each in checked_optimizers(optimizer):
            if not self._hooks.knows(each):
                refuse_taken_names(each)
                self._hooks.hook(
                    [], [each], self.properties, [], cast_model_outputs=None, engine=self._engine, announce=announce
                )

    def scale_loss_of(
        self, optimizer: Any, num_losses: int
    ) -> Callable[[Tensor, int], contextlib.AbstractContextManager[Tensor]]:
        """Prepare an optimizer, as `adopt` does, and give it dynamic loss scalers of its own.

        Returns:
            `scale_loss` with these scalers, a function of a loss and the number of its scaler.
        """
        self.adopt(optimizer, announce=False)
        scaling = self._own_scaling("dynamic", checked_num_losses(num_losses))
        return lambda loss, loss_id: self._scaled(scaling, checked_loss(loss), optimizer, loss_id)

    def _own_scaling(self, loss_scale: float | str, num_losses: int) -> LossScaling:
        scalers = [LossScaler(loss_scale) for _ in range(num_losses)]
        return LossScaling(self._hooks, scalers, self._subscribers, on_collapse="raise", master_weights=False)

    def _change_settings(
        self,
        properties: OptProperties,
        scaling: LossScaling | None,
        *registrations: Registration,
        verbosity: int = 1,
        policy: PrecisionPolicy | None = None,
    ) -> None:
        self._properties, self._scaling, self.verbosity = properties, scaling, verbosity
        self._adopts_optimizers = False
        self._registrations = registrations if self.properties.patch_torch_functions else ()
        replace_attributes(self._holder, self._registrations)
        policy = engine_policy(self.properties, policy, self._registrations)
        kind = VerboseEngine if verbosity == 2 else CastingEngine
        if self._engine is not None and (self._engine.policy != policy or type(self._engine) is not kind):
            self._engine.uninstall()
            self._engine = None
        if self._engine is None and policy is not None:
            self._engine = kind(policy)

    def _settings(self) -> _Settings:
        engine = self._engine
        return _Settings(
            self._properties,
            self._scaling,
            self.verbosity,
            self._adopts_optimizers,
            self._registrations,
            engine,
            is_installed=engine is not None and engine.installed,
            is_used=not self._hooks.is_empty,
        )

    def _take_back(self, before: _Settings, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        """Release what a call that fails was given, and restore the settings, unless nothing is left to have them."""
        with DeferredSignals():
            self._hooks.release_connected(models, optimizers)
            if before.is_used and self._hooks.is_empty:
                before = _Settings()
            replace_attributes(self._holder, before.registrations)
            if self._engine is not None and not (self._engine is before.engine and before.is_installed):
                self._engine.uninstall()
            if before.engine is not None and before.is_installed:
                before.engine.install()
            self._scaling, self.verbosity, self._engine = before.scaling, before.verbosity, before.engine
            self._adopts_optimizers, self._registrations = before.adopts_optimizers, before.registrations
            self._properties = before.properties

    def register_function(self, cast: CastPolicy, module: Any, name: str) -> None:
        """Register ``module.name`` for a cast at O1, as `register_half_function` documents.

        After an `initialize` at O1 it has no effect until the next one, and warns. At O2 and O3 a float or promote
        function has no effect, and warns.
        """
        registration = self.registered.add(cast, module, name)
        late = self.properties.patch_torch_functions and not any(map(registration.same_as, self._registrations))
        if late:
            warnings.warn(
                f"{name} is registered after amp.initialize, so it is not cast yet: call amp.initialize again with the "
                "same models and optimizers, which is safe, or register it before.",
                stacklevel=3,
            )
        if self.opt_level is not None and self.properties.cast_model_type in LOW_PRECISION_DTYPES:
            warn_of_idle([registration], self.opt_level)

    def reset(self) -> None:
        """Undo `initialize`: remove hooks, make half models float32, return the models' parameters to the optimizers.

        Values come from the masters if there are any. Optimizer state is kept, in float32. An engine that `install`
        has installed in another thread stays there. Registered functions are cleared, and replaced attributes of the
        user's modules are restored. Permissions are withdrawn. Afterwards `initialize` works at any level.
        Copies of the models do not change: at O1 they go on casting, at O2 and O3 their weights stay half.

        Signal handlers run after it. A call that fails is finished by the next one, which also undoes an interrupted
        `initialize`.
        """
        with DeferredSignals():
            THREAD.own.drop_ended()
            self._hooks.release_all()
            self._change_settings(OptProperties(), None)
            self.registered.forget()
            self.permissions.forget()
            self._properties = None  # last: a session that fails before is reset again

    # -- in every step -----------------------------------------------------------------------------

    def casting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ops of the calling thread are cast as the level says.

        At O2 and O3 it computes products of halves on the CPU with float32 accumulation; models do the same in their
        forward. It does nothing if the level casts nothing.
        """
        return contextlib.nullcontext() if self._engine is None else self._engine.active()

    def install(self) -> None:
        """Keep the casts of O1 on in the calling thread until `reset` or another level. Other levels: nothing."""
        if self._engine is not None and self.properties.patch_torch_functions:
            self._engine.install()

    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Any,
        loss_id: int = 0,
        model: Any = None,  # noqa: ARG002  unused in apex, too
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Yield ``loss.float() * loss_scale`` for the backward in the block; unscale the gradients afterwards.

        If a gradient is inf or NaN, a dynamic scale backs off and the next step of ``optimizers`` is skipped. If the
        block raises, gradients are restored.

        Args:
            loss: any shape.
            optimizers: the optimizer, or a list of all optimizers, whose parameters this backward reaches.
            loss_id: number of the loss scaler, < ``num_losses``.
            model: not used, as in apex.
            delay_unscale: keep gradients scaled; a later backward before the step unscales them all. Under ``no_sync``
                of DistributedDataParallel it is True.
            delay_overflow_check: let the next backward of this ``loss_id`` check gradients and move the scale.

        Raises:
            RuntimeError: before `initialize`, or for an optimizer that was not part of it; a backward from a loss
                that requires no gradient or has several elements.
            IndexError: no such ``loss_id``.
            TypeError: the loss is not a floating-point tensor.

        Sync: one with a dynamic scale or a subscriber, else none.
        """
        self._require_initialized("with amp.scale_loss", opening="'")
        checked_loss(loss)
        if self._scaling is None:
            return contextlib.nullcontext(loss)
        if self._adopts_optimizers:
            for optimizer in as_list(optimizers):
                self.adopt(optimizer)
        delays = {"delay_unscale": delay_unscale, "delay_overflow_check": delay_overflow_check}
        return self._scaled(self._scaling, loss, optimizers, loss_id, **delays)

    @contextlib.contextmanager
    def _scaled(
        self,
        scaling: LossScaling,
        loss: Tensor,
        optimizers: Any,
        loss_id: int,
        *,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> Iterator[Tensor]:
        delays = {"delay_unscale": delay_unscale, "delay_overflow_check": delay_overflow_check}
        with (
            explaining_backward(loss),
            scaling.scaled(loss, optimizers, loss_id, **delays) as scaled_loss,
            self.casting(),  # a checkpoint recomputes in the backward with the casts of the forward
            recomputing_by_rules(),  # also inside a module with a rule
        ):
            try:
                yield scaled_loss
            finally:
                if self._engine is not None:
                    self._engine.clear_cache()  # of half weights, whose backward is over

    def loss_scale(self, loss_id: int = 0) -> float:
        """Return the factor of the next loss; 1.0 with ``enabled=False``. Sync: none."""
        self._require_initialized("amp.loss_scale")
        return 1.0 if self._scaling is None else self._scaling.scaler(loss_id).scale

    # -- gradients outside scale_loss ------------------------------------------------------------------

    def scaled_grad(
        self, outputs: Tensor, inputs: Tensor | Sequence[Tensor], *, loss_id: int = 0, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """Differentiate through half layers without underflow of small gradients, for gradient penalties.

            grads = autograd.grad(outputs * loss_scale, inputs) / loss_scale

        No ``.grad`` is written and no scale moves. A gradient that overflows is inf and makes the penalty inf, so that
        the `scale_loss` around the penalty's own backward skips the step.

        Args:
            outputs: the tensor to differentiate; one element, or any shape with ``grad_outputs``.
            inputs: a tensor or a sequence of tensors, with respect to which to differentiate.
            loss_id: number of the loss scaler.
            options: those of `torch.autograd.grad`: ``grad_outputs``, ``create_graph=True`` for a penalty, ….

        Returns:
            The gradients in float32, one for each input; None for an unused input with ``allow_unused``.

        Raises:
            RuntimeError: before `initialize`.
            IndexError: no such ``loss_id``.
            TypeError: ``outputs`` is not a tensor.

        Sync: none.
        """
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"scaled_grad got outputs of type {type(outputs).__name__}: expected a tensor; sum several of them."
            )
        scale = self.loss_scale(loss_id)
        grads = torch.autograd.grad(outputs.float() * scale, inputs, **options)
        return tuple(None if grad is None else grad.float() / scale for grad in grads)

    def master_params(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield the parameters that ``optimizer`` steps, float32 masters included. Clip these. Sync: none.

        Raises:
            TypeError: ``optimizer`` has no ``param_groups``.
        """
        return master_params(optimizer)

    def model_params(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the model's parameters in the order of `master_params`: where those differ, they are masters.

        Raises:
            RuntimeError: an optimizer that was not part of `initialize`.

        Sync: none.
        """
        return self._hooks.hooked(optimizer).model_params

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients that ``optimizer`` will step with to a norm of at most ``max_norm``.

        ::

            norm <- (sum |g|^p)^(1/p);   g <- g * min(1, max_norm / (norm + 1e-6))

        Call it between `scale_loss` and ``step``. With ``combine_grad=True`` it makes a few calls on flat buffers. The
        norm is then summed in another order than over separate tensors, so its last bits may differ.

        Args:
            optimizer: one that was passed to `initialize`.
            max_norm: > 0.
            norm_type: ``p`` > 0; inf for the largest magnitude.

        Returns:
            ``()``, the norm before.

        Raises:
            RuntimeError: an optimizer that was not part of `initialize`; gradients that are still scaled, after
                ``delay_unscale``.
            ValueError: a ``max_norm`` or a ``norm_type`` that is not > 0.

        Sync: none; one for sparse gradients that are not coalesced, of which the norm is that of the sums.

        Reference: ``torch.nn.utils.clip_grad_norm_``, ``clip_optimizer_grad_norm_fused`` of Ascend's apex.
        """
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not value > 0:
                raise ValueError(f"{name}={value}: expected a number > 0, such as 1.0 for max_norm, 2.0 for norm_type.")
        hooked = self._hooks.hooked(optimizer)
        with without_function_modes():
            if hooked.rank_groups:
                return clip_shards_by_norm_(hooked.model_params, max_norm, norm_type)
            grads = hooked.flat_grads()
            return clip_by_norm_(grads.tensors, max_norm, norm_type, parts=grads.parts, summed=grads.summed)

    def combined_grads(self, optimizer: Optimizer) -> tuple[Tensor, ...]:
        """Return the flat buffers that hold the gradients of ``optimizer``, one for each device and dtype.

        Buffers of parameters that it shares with the model come first, then those of float32 masters. Padding and the
        places of gradients that are None are zero. The gradients are views of the buffers.

        Returns:
            Tensors ``(elements,)``; none before the first `scale_loss`, and without ``combine_grad=True``.

        Raises:
            RuntimeError: as `clip_grad_norm_`.

        Sync: none.

        Reference: ``optimizer.get_optimizer_combined_grads()`` of Ascend's apex.
        """
        hooked = self._hooks.hooked(optimizer)
        with without_function_modes():
            hooked.flat_grads()
        return hooked.buffers

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self, destination: Any = None) -> Any:
        """Return ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, …}``; empty with ``enabled=False``.

        Raises:
            RuntimeError: before `initialize`.
        """
        self._require_initialized("amp.state_dict")
        return save_scalers(self.scalers, destination)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, here or in apex; entries go by the number in their key.

        Raises:
            RuntimeError: before `initialize`; or keys that do not belong to a loss scaler.
            ValueError: an entry without a positive ``loss_scale``.
        """
        self._require_initialized("amp.load_state_dict")
        load_scalers(self.scalers, state_dict)

    # -- what has happened -------------------------------------------------------------------------

    def last_step(self, optimizer: Optimizer) -> StepOutcome:
        """Return whether the last ``optimizer.step()`` changed the parameters, and if not, why.

        Raises:
            RuntimeError: an optimizer that was not part of `initialize`.
        """
        return self._hooks.hooked(optimizer).outcome

    def subscribe(
        self,
        callback: Callable[[ScaleRecord], object],
        optimizer: Optimizer | None = None,
        *,
        at_loss: Callable[[ScaledLoss], object] | None = None,
    ) -> Callable[[], None]:
        """Call ``callback`` with a `ScaleRecord` whenever `scale_loss` has unscaled and checked gradients.

        With a subscriber gradients are checked at static scales, too. It is called last, after the scale has moved; an
        exception in it propagates from `scale_loss`.

        Args:
            callback: a function of one record.
            optimizer: call it only for the backwards that were given this optimizer; None for all.
            at_loss: a function that is called with the `ScaledLoss` of each of these backwards, before it begins; also
                with ``delay_unscale`` and ``delay_overflow_check``, for which no record follows.

        Returns:
            A function that ends the subscription.

        Raises:
            TypeError: ``callback`` or ``at_loss`` is not callable.
            RuntimeError: an optimizer that was not part of `initialize`.
        """
        if not callable(callback):
            raise TypeError(f"subscribe got {callback!r}: expected a function of one ScaleRecord, such as print.")
        if at_loss is not None and not callable(at_loss):
            raise TypeError(f"subscribe got at_loss={at_loss!r}: expected a function of one ScaledLoss, such as print.")
        if optimizer is not None:
            self._hooks.hooked(optimizer)
        subscriber = Subscriber(callback, at_loss, optimizer)
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def memory(self) -> MemoryUse:
        """Count the bytes of what this session has initialized. Sync: none."""
        return self._hooks.memory()


def _unscaler_maker(*, combine: bool, check: bool) -> Callable[[], Unscaler]:
    """Return the factory of the unscalers of a session, with or without flat buffers."""
    if not combine:
        return Unscaler
    return lambda: CombinedUnscaler(_say if check else None)


def _say(sentence: str) -> None:
    if is_first_rank():
        print(sentence)  # noqa: T201  as Ascend's apex does
