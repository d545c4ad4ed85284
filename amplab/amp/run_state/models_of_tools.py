"""The models that tools run now, in any thread. What they hold is undone at the end, so it is not the run's state."""

from collections.abc import Iterable

from torch.nn import Module

__all__ = ["MODELS_OF_TOOLS", "refuse_models_of_tools"]

MODELS_OF_TOOLS: dict[object, Module] = {}
"""The model of each block of `amplab.trace.untouched.untouched` that has begun and not ended."""


def refuse_models_of_tools(models: Iterable[Module]) -> None:
    """Raise if a tool runs one of ``models``, or a part of one.

    Raises:
        RuntimeError: it does.
    """
    run = {part for model in list(MODELS_OF_TOOLS.values()) for part in model.modules()}
    if run and any(part in run for model in models for part in model.modules()):
        raise RuntimeError(
            "model: got a model that a tool of amplab, such as xray or a watch's explanation of a skipped step, runs "
            "now. Its values are not those of the run until the tool ends. In a signal's handler or another thread, "
            "set a flag, and save where the loop reads it, between two steps."
        )
