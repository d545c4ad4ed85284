"""Half inputs for recurrent modules with float32 weights.

nn.RNN, nn.LSTM and nn.GRU compare the dtype of their input with that of their weights before any op
runs, and refuse a half input to float32 weights. Under an engine the two meet in torch.lstm, where
both are cast to the compute dtype; these hooks let them get there. Half to float32 is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from amplab.policies.nested_tensors import cast_tree

__all__ = ["accept_half_input", "match_rnn_input"]


def match_rnn_input(
    module: torch.nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: input, packed sequence and hidden state of `module` in its weights' dtype."""
    dtype = next(module.parameters()).dtype
    return cast_tree(args, dtype), cast_tree(kwargs, dtype)


def accept_half_input(model: torch.nn.Module) -> list[RemovableHandle]:
    """Register `match_rnn_input` on every RNN, LSTM and GRU in `model`; the handles take it off again."""
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    return [module.register_forward_pre_hook(match_rnn_input, with_kwargs=True) for module in recurrent]
