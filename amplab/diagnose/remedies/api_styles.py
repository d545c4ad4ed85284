"""The APIs that a training loop may use for mixed precision, and text that differs between them.

`ApiStyle` answers two questions about a loop, which are independent of each other: who multiplies the loss by a scale,
and who chooses the dtype of each op.

    style         scales the loss                    chooses dtypes
    APEX          amp.initialize, amp.scale_loss     amp at each op (O0 and O1): float32 weights
    APEX_HALF     (is APEX)                          amp.initialize at O2 and O3: half weights
    AMPLAB        amplab.GradScaler                  amplab.autocast
    TORCH         torch.amp.GradScaler               torch.autocast
    HALF          (is PLAIN)                         model.half(), without amp
    PLAIN         nothing                            nothing
    UNKNOWN       unknown                            unknown
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import torch

from amplab.amp import GradScaler, Session

__all__ = ["Api", "ApiStyle", "PerApi", "api_style_of", "by_casting", "by_scaling"]


class ApiStyle(StrEnum):
    """One API for mixed precision; see the table at the top of this file."""

    APEX = "apex"
    APEX_HALF = "apex-half"
    AMPLAB = "amplab"
    TORCH = "torch"
    HALF = "half"
    PLAIN = "none"
    UNKNOWN = ""


def api_style_of(amp: Session | torch.amp.GradScaler | None) -> ApiStyle:
    """Return the API that scales the loss; ``PLAIN`` if `amp` is None or a disabled scaler.

    >>> str(api_style_of(GradScaler("cpu"))), str(api_style_of(torch.amp.GradScaler("cpu"))), str(api_style_of(None))
    ('amplab', 'torch', 'none')
    """
    if isinstance(amp, Session):
        return ApiStyle.APEX
    if amp is None or not amp.is_enabled():
        return ApiStyle.PLAIN
    return ApiStyle.AMPLAB if isinstance(amp, GradScaler) else ApiStyle.TORCH


@dataclass(frozen=True)
class Api:
    """How one training loop uses mixed precision.

    Args:
        scaling: who scales the loss: APEX, AMPLAB, TORCH, PLAIN or UNKNOWN.
        casting: who chooses dtypes: APEX, APEX_HALF, AMPLAB, TORCH or HALF.
        opt_level: of amp.initialize; empty where it is not used or not known.
    """

    scaling: ApiStyle = ApiStyle.UNKNOWN
    casting: ApiStyle = ApiStyle.APEX
    opt_level: str = ""

    @classmethod
    def of_opt_level(cls, opt_level: str, scaling: ApiStyle = ApiStyle.APEX) -> Api:
        """Return the API of a loop that uses amp.initialize.

        >>> Api.of_opt_level("O2").casting.name
        'APEX_HALF'
        """
        casting = ApiStyle.APEX_HALF if opt_level in ("O2", "O3") else ApiStyle.APEX
        return cls(scaling, casting, opt_level)

    @property
    def level(self) -> str:
        """The opt_level for a remedy to pass to amp.initialize: O0 and an unknown one become O1."""
        return self.opt_level if self.opt_level[:1] == "O" and self.opt_level != "O0" else "O1"


@dataclass(frozen=True)
class PerApi:
    """One text for each API style, with fields in braces as `str.format` takes them.

    Args:
        by: which of the two styles of an `Api` selects the text.
        texts: style -> text.
        otherwise: the text for every other style.
    """

    by: Literal["scaling", "casting"]
    texts: Mapping[ApiStyle, str]
    otherwise: str

    def text(self, api: Api, fields: Mapping[str, Any]) -> str:
        """Return the text for `api` with its fields filled in.

        `level` and `level_argument` need not be given: they are the opt_level, and `opt_level="O1", ` or empty.
        """
        known = api.opt_level if api.opt_level[:1] == "O" else ""
        level = {"level": api.level, "level_argument": f'opt_level="{known}", ' if known else ""}
        return self.texts.get(getattr(api, self.by), self.otherwise).format_map(level | dict(fields))


def by_scaling(otherwise: str, **texts: str) -> PerApi:
    """Return texts selected by who scales the loss; the keywords are the names of styles in lower case.

    `scaler` stands for AMPLAB and TORCH.

    >>> by_scaling("optimizer.step()", scaler="scaler.step(optimizer)").text(Api(ApiStyle.TORCH), {})
    'scaler.step(optimizer)'
    """
    return PerApi("scaling", _by_style(texts), otherwise)


def by_casting(otherwise: str, **texts: str) -> PerApi:
    """Return texts selected by who chooses dtypes; the keywords are the names of styles in lower case."""
    return PerApi("casting", _by_style(texts), otherwise)


def _by_style(texts: Mapping[str, str]) -> dict[ApiStyle, str]:
    """Style -> text; the keyword `scaler` stands for both kinds of GradScaler."""
    both = {"amplab": texts["scaler"], "torch": texts["scaler"]} if "scaler" in texts else {}
    named = both | {name: text for name, text in texts.items() if name != "scaler"}
    return {ApiStyle[name.upper()]: text for name, text in named.items()}
