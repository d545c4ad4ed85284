"""What the fused optimizers say of a state that they cannot take up, and of a tensor that the kernels refuse."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["refuse_foreign_state", "with_names"]

_OF_EVERY_RULE = {"step", "master"}


def refuse_foreign_state(optimizer: str, state: Mapping[str, Any], leading: str) -> None:
    """Raise where the state of a parameter is that of another rule.

    Args:
        optimizer: its name, for the words.
        state: of one parameter; empty where it was never stepped.
        leading: what the state of every parameter that was stepped has.

    Raises:
        ValueError: it has others, and not that.

    >>> refuse_foreign_state("FusedSGD", {"momentum_buffer": 0}, "momentum_buffer")
    """
    foreign = state.keys() - _OF_EVERY_RULE
    if foreign and leading not in state:
        raise ValueError(
            f"The state of a parameter has {', '.join(sorted(foreign))}: {optimizer} expected {leading} in it; load "
            "what an optimizer of the same rule has saved, or begin anew."
        )


def with_names(error: RuntimeError, groups: Sequence[Mapping[str, Any]], places: Sequence[int]) -> RuntimeError:
    """Say what a kernel refused in the names of parameters, where torch was given them.

    Args:
        error: names tensors by their index in the lists of one call.
        groups: of the optimizer.
        places: where each parameter of the call stands among all of the optimizer.

    >>> with_names(RuntimeError("grad 0 is not strided."), [{"params": [1, 2], "param_names": ["a", "b"]}], [1])
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
