"""One model under a session: everything that `initialize` has hung on it, and the way back.

Casting its weights happens before, in `model_weights`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from amplab.amp.apex.forward_hooks import ForwardHooks
from amplab.amp.apex.model_weights import cast_model, set_values
from amplab.amp.apex.saved_masters import SavedMasters
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies import PrecisionPolicy, accept_half_input, register_module_rules
from amplab.scalers import MasterWeights

__all__ = ["HookedModel"]


class HookedModel:
    """What a session keeps about one model; it does not keep the model alive.

    Args:
        model: its weights cast already.
        forward: the casts of its inputs and outputs.
        policy: whose module rules it runs by.
        weights_dtype: what its weights were cast to; None if they were not.
        masters: the masters of every optimizer of the same call.
        casts_around_functions: engines cast inside its forward (O1), so half may arrive at float32 weights.
        prefix: what its parameters' names are told apart by, among several models.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: ForwardHooks,
        policy: PrecisionPolicy,
        *,
        weights_dtype: torch.dtype | None,
        masters: Sequence[MasterWeights],
        casts_around_functions: bool,
        prefix: str,
    ) -> None:
        self._half = weights_dtype in LOW_PRECISION_DTYPES
        self._masters = tuple(masters)
        self._prefix = prefix
        self._forward = forward
        self._handles = forward.register(model)
        self._handles += register_module_rules(model, policy, weights_dtype=weights_dtype if self._half else None)
        if self._half:
            self._handles += SavedMasters(masters).register(model)
        if casts_around_functions:
            self._handles += accept_half_input(model)

    def name_of(self, model: nn.Module, param: Tensor) -> str | None:
        """Return the name of ``param`` in ``model``, None where it is not one of its parameters."""
        names = (name for name, own in model.named_parameters() if own is param)
        name = next(names, None)
        return None if name is None else self._prefix + name

    def release(self, model: nn.Module) -> set[Tensor]:
        """Take everything off ``model``; its half weights become float32, from their masters where they have any.

        Returns:
            The parameters that were cast back.
        """
        self._forward.leave()
        for handle in self._handles:
            handle.remove()
        if not self._half:
            return set()
        restored = {pair.model: pair.master for masters in self._masters for pair in masters.pairs}
        for param in model.parameters():
            if param.dtype in LOW_PRECISION_DTYPES and param in restored:  # its optimizer is gone, its masters are not
                set_values(param, restored[param].data)
        return set(cast_model(model, torch.float32))
