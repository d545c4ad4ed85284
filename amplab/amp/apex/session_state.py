"""What a session is set to: the properties in force, its loss scalers and casts, and their saved form.

`Session` adds what changes it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from amplab.amp.apex.hooks import Hooks
from amplab.amp.apex.loss_scaling import LossScaling
from amplab.amp.apex.opt_levels import OptProperties
from amplab.amp.apex.registered_functions import RegisteredFunctions, Registration
from amplab.amp.apex.saved_scalers import load_scalers, save_scalers
from amplab.amp.apex.session_casts import SessionCasts
from amplab.amp.backward.loss_scaler import LossScaler
from amplab.amp.backward.records import ScaleRecord
from amplab.policies import CastingEngine, PrecisionPolicy

__all__ = ["SessionState"]


class SessionState:
    """The state of one session; before `initialize` everything is off.

    Args:
        registered: the functions that the user has registered; None for a list of its own.

    Attributes:
        verbosity: as last passed to `initialize`.
    """

    def __init__(self, registered: RegisteredFunctions | None = None) -> None:
        self.registered = RegisteredFunctions() if registered is None else registered
        self.verbosity = 1
        self._hooks, self._casts = Hooks(), SessionCasts()
        self._subscribers: list[Callable[[ScaleRecord], object]] = []
        self._properties: OptProperties | None = None
        self._scaling: LossScaling | None = None

    def _take_up(
        self,
        properties: OptProperties | None,
        scaling: LossScaling | None,
        *registered: Registration,
        verbosity: int = 1,
        policy: PrecisionPolicy | None = None,
    ) -> None:
        self._properties, self._scaling, self.verbosity = properties, scaling, verbosity
        self._casts.take_up(self.properties, registered, talkative=verbosity == 2, policy=policy)

    @property
    def properties(self) -> OptProperties:
        """The properties in force; everything off before `initialize`."""
        return self._properties or OptProperties()

    @property
    def initialized(self) -> bool:
        """Whether `initialize` has been called since the last `reset`, be it with ``enabled=False``."""
        return self._properties is not None

    @property
    def opt_level(self) -> str | None:
        """The level's name, "O0" to "O3"; None before `initialize` and with ``enabled=False``."""
        return self.properties.opt_level

    @property
    def scalers(self) -> tuple[LossScaler, ...]:
        """One for each ``loss_id``; none before `initialize` and with ``enabled=False``."""
        return () if self._scaling is None else self._scaling.scalers

    @property
    def engine(self) -> CastingEngine | None:
        """What casts, or computes products of halves; None where the level needs none."""
        return self._casts.engine

    def take_unchecked(self, loss_id: int) -> Tensor | None:
        """Hand over the verdict that ``delay_overflow_check`` has left waiting, for those who move the scale."""
        return None if self._scaling is None else self._scaling.take_unchecked(loss_id)

    def loss_scale(self, loss_id: int = 0) -> float:
        """Return the scale that the next loss is multiplied by; 1.0 with ``enabled=False``. Sync: none."""
        self._require_initialized("amp.loss_scale")
        return 1.0 if self._scaling is None else self._scaling.scaler(loss_id).scale

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
            RuntimeError: before `initialize`; or keys that are no loss scaler's.
            ValueError: an entry without a positive ``loss_scale``.
        """
        self._require_initialized("amp.load_state_dict")
        load_scalers(self.scalers, state_dict)

    def _require_initialized(self, name: str, *, opening: str = "`") -> None:
        if not self.initialized:  # apex opens its quotation of scale_loss with another sign
            raise RuntimeError(
                f"Invoked {opening}{name}`, but internal Amp state has not been initialized.  model, optimizer = "
                f"amp.initialize(model, optimizer, opt_level=...) must be called before `{name}`."
            )
