"""The state of loss scalers as apex writes it: ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}, …}``.

Entries are loaded by the number in their key. What a level does to the state of models is in `saved_masters`.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from amplab.amp.backward.loss_scaler import LossScaler

__all__ = ["load_scalers", "save_scalers"]


def save_scalers(scalers: Sequence[LossScaler], destination: Any = None) -> Any:
    """Return one entry for each scaler, in ``destination`` where one is given."""
    saved = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(scalers):
        saved[f"loss_scaler{index}"] = scaler.state_dict()
    return saved


def load_scalers(scalers: Sequence[LossScaler], saved: Mapping[str, Any]) -> None:
    """Load what `save_scalers` wrote; entries without a scaler are named in a printed line.

    Raises:
        TypeError: ``saved`` is no mapping.
        RuntimeError: keys that are none of ours; the others are loaded first.
        ValueError: an entry that is not apex's.
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
        how = "at least" if scaler.dynamic else "static at"
        _say(f"Warning: {key} was saved at {entry['loss_scale']}; it is {how} {scaler.scale} here and stays so")


def _say(line: str) -> None:
    print(line)  # noqa: T201  apex prints these whatever the verbosity
