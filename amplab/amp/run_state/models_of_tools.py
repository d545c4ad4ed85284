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
            "model: xray, or another tool that tries a step and undoes it, is running this model: its values are not "
            "those of your run until the tool returns. In a signal handler or another thread, set a flag, and save "
            "between two steps, where the loop reads the flag."
        )
