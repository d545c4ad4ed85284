"""The messages that the page may send, and their fields: what each field holds before anything acts on it.

A page of another version, or one that was altered, can send any JSON. A message that is not in the tables here is
refused as a whole, in words. What a person has typed passes as it is if it is a number, an empty field or a text: its
receiver says what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from amplab.lab import FIELDS
from amplab.lab.config_field import echo
from amplab.lab.levels import LEVELS
from amplab.lab.run_log.json_lines import is_count, is_number
from amplab.lab.scenarios import SCENARIOS
from amplab.views.take_away import FILES

__all__ = ["MESSAGES", "TAB_MESSAGES", "refusal"]


@dataclass(frozen=True)
class _Kind:
    words: str
    fits: Callable[[Any], bool]


def _one_of(names: Mapping[str, object] | tuple[str, ...]) -> _Kind:
    return _Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_SWITCH = _Kind("true or false", lambda value: isinstance(value, bool))
_COUNT = _Kind("a whole number >= 0", is_count)
_STEP = _Kind("the number of a step", is_count)
_TYPED_NUMBER = _or_null(_Kind("a number", is_number))
_TYPED_STEPS = _or_null(_Kind("a number or a text", lambda value: is_number(value) or isinstance(value, str)))
_SETTING = _or_null(
    _Kind("a number, a text, true or false", lambda value: is_number(value) or isinstance(value, str | bool))
)
_PLACE = _Kind("a rule or the number of an element", lambda value: isinstance(value, str) or is_count(value))
_DIGITS = re.compile("[0-9]{1,15}")  # of a count as text; int() refuses some thousand digits
_ROW = _Kind(
    "the number of a row", lambda value: is_count(value) or (isinstance(value, str) and bool(_DIGITS.fullmatch(value)))
)

_Fields = Mapping[str, _Kind]

MESSAGES: Mapping[str, Mapping[str, _Fields]] = {
    "controls": {
        **{name: {} for name in ("start", "pause", "step", "reset", "undo", "defaults")},
        "run": {"steps": _TYPED_STEPS},
        "speed": {"value": _TYPED_NUMBER},
        "change": {"field": _one_of(FIELDS), "value": _SETTING},
        "default": {"field": _one_of(FIELDS)},
        "inject": {"kind": _TEXT},
    },
    "notices": {name: {"id": _COUNT} for name in ("new", "reset", "continue", "dismiss")},
    "gallery": {"choose": {"name": _one_of(SCENARIOS)}, "again": {}, "fix": {}, "close": {}},
    "status": {"apply": {}},
    "live": {"select": {"step": _or_null(_STEP)}},
    "take_away": {"file": {"kind": _one_of(FILES)}, "setting": {"text": _TEXT}},
    "panels": {"select": {"step": _or_null(_STEP)}},
}
"""Part of the dashboard -> type of a message -> its fields."""

TAB_MESSAGES: Mapping[str, Mapping[str, _Fields]] = {
    "dtypes": {
        "measure": {"index": _ROW},
        "compare": {"level": _or_null(_one_of(LEVELS))},
        "override": {"kind": _one_of(("op", "module")), "name": _TEXT, "on": _SWITCH},
    },
    "findings": {"apply": {"key": _TEXT}},
    "runs": {
        **{name: {"number": _COUNT} for name in ("remove", "continue", "restore")},
        "compare": {"steps": _TYPED_STEPS},
        "stop": {},
        "twin": {},
        "show": {"number": _COUNT, "shown": _SWITCH},
        "rename": {"number": _COUNT, "name": _TEXT},
    },
    "scale": {
        "view": {"view": _one_of(("now", "whatif"))},
        "rule": dict.fromkeys(("init", "window", "backoff"), _TYPED_NUMBER),
    },
    "skipped": {"explain": {"step": _STEP}},
    "step_through": {
        "step": {},
        "again": {"step": _STEP},
        "parameter": {"name": _TEXT},
        "element": {"value": _PLACE},
    },
}
"""Tab below the charts -> type of a message that names it as "tab" -> its fields."""


def refusal(part: str, message: Mapping[str, Any]) -> str | None:
    """Return why a message of the page to a part of the dashboard is not carried out; None for a sound one.

    >>> refusal("panels", {"tab": "skipped", "type": "explain", "step": 12})
    >>> refusal("panels", {"tab": "skipped", "type": "explain", "step": []})
    'skipped, explain: step is []; expected the number of a step.'
    >>> refusal("controls", {"type": "default"})[:42]
    'controls, default: field is missing; expec'
    """
    where, known = part, MESSAGES[part]
    if part == "panels" and "tab" in message:
        where = message["tab"] if isinstance(message["tab"], str) else ""
        known = TAB_MESSAGES.get(where, {})
    fields = known.get(message["type"])
    if fields is None:
        return f"{echo(where) or 'no part'} has no message {echo(message['type'])}."
    for name, kind in fields.items():
        if name not in message or not kind.fits(message[name]):
            said = echo(repr(message[name])) if name in message else "missing"
            return f"{where}, {message['type']}: {name} is {said}; expected {kind.words}."
    return None
