"""Private attributes of apex on optimizers, which training scripts read. They exist from initialize to release.

    optimizer._amp_stash                            parameters by dtype, and two flags
    optimizer._lazy_init_maybe_master_weights()     does nothing: masters exist since initialize
    optimizer._master_params_to_model_params()      writes the masters back to the model

amplab sets attributes on foreign objects only here: scripts call ``hasattr(optimizer, "_amp_stash")`` to see whether
amp is on. The attributes are not pickled with the optimizer.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.scalers import MasterWeights

__all__ = ["LENT_NAMES", "AmpStash", "give_hooks", "lend_names", "refuse_taken_names", "take_names_back"]

LENT_NAMES = (
    "_amp_stash",
    "_amp_lazy_init",
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
)
"""The attributes that an optimizer has while it belongs to a session."""


class AmpStash:
    """The contents of ``optimizer._amp_stash`` in apex, computed from the state of amplab.

    Args:
        masters: of this optimizer.
        groups: returns the model's parameters group by group, never masters.
        flags: returns whether the next step is skipped, and whether gradients are still scaled.

    Attributes:
        lazy_init_called: True; scripts set it after loading a checkpoint.
    """

    def __init__(
        self,
        masters: MasterWeights,
        groups: Callable[[], Sequence[Sequence[Tensor]]],
        flags: Callable[[], tuple[bool, bool]],
    ) -> None:
        self._masters, self._groups, self._flags = masters, groups, flags
        self.lazy_init_called = True

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped."""
        return self._flags()[0]

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients are still scaled, until a backward without ``delay_unscale``."""
        return self._flags()[1]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's half parameters, group by group."""
        return [[param for param in group if param.dtype is torch.float16] for group in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their float32 masters."""
        return [[self._masters.of(param) for param in group] for group in self.fp16_groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters that are float32 in the model too."""
        return [[param for param in group if param.dtype is torch.float32] for group in self._groups()]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The model's half parameters."""
        return list(itertools.chain.from_iterable(self.fp16_groups))

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of the half parameters; empty without masters."""
        return [pair.master for pair in self._masters.pairs]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters that are float32 in the model too."""
        return list(itertools.chain.from_iterable(self.fp32_from_fp32_groups))

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """As `all_fp32_from_fp32_params`; apex uses this name when there are no masters."""
        return self.all_fp32_from_fp32_params

    def __getattr__(self, name: str) -> NoReturn:
        known = sorted(key for key in vars(AmpStash) if not key.startswith("_"))
        raise AttributeError(
            f"optimizer._amp_stash.{name} does not exist in amplab: expected lazy_init_called, "
            f"{', '.join(known)}. Use amp.master_params(optimizer) for parameters and masters."
        )


def refuse_taken_names(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has one of the names already.

    Raises:
        RuntimeError: the message has the name.
    """
    if isinstance(vars(optimizer).get("_amp_stash"), AmpStash):
        return
    for name in LENT_NAMES:
        if hasattr(optimizer, name):
            raise RuntimeError(
                f"Incoming optimizer already has {name} defined. amp.initialize needs this name: pass an "
                "optimizer that another amp has not initialized, such as a new one with the same parameters."
            )


def give_hooks(optimizer: Optimizer) -> None:
    """Prepare for hooks an optimizer whose class never called ``Optimizer.__init__`` (wrappers such as Lookahead).

    torch's handling of an unpickled optimizer adds the missing attributes and keeps the others.
    """
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        Optimizer.__setstate__(optimizer, {} if hasattr(optimizer, "defaults") else {"defaults": {}})


def lend_names(optimizer: Optimizer, stash: AmpStash, copy_to_model: Callable[[], None]) -> None:
    """Set the attributes on ``optimizer``."""
    values: dict[str, Any] = {
        "_amp_stash": stash,
        "_amp_lazy_init": _nothing_is_lazy,
        "_lazy_init_maybe_master_weights": _nothing_is_lazy,
        "_master_params_to_model_params": copy_to_model,
        "_prepare_amp_backward": _refused("_prepare_amp_backward"),
        "_post_amp_backward": _refused("_post_amp_backward"),
    }
    vars(optimizer).update(values)


def take_names_back(optimizer: Optimizer) -> None:
    """Delete the attributes."""
    for name in LENT_NAMES:
        vars(optimizer).pop(name, None)


def _nothing_is_lazy() -> None:
    """Do nothing: masters and their state exist since `initialize`."""


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"optimizer.{name}() is a part of apex's scale_loss that cannot be called alone here: run the backward in "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`."
        )

    return refuse
