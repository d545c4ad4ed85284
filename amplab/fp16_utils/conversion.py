"""Cast models to float16 and keep BatchNorm in float32.

BatchNorm's weights and running statistics are never rounded. (apex casts the whole network to float16 first.)
"""

from typing import Any

import torch
from torch import Tensor, nn

from amplab.amp.apex.model_weights import cast_model

__all__ = ["BN_convert_float", "FP16Model", "convert_module", "convert_network", "network_to_half", "tofp16"]


class tofp16(nn.Module):
    """A layer that casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input`` as float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast the affine BatchNorm layers of ``module`` to float32 in place; return it."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine:
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Cast ``network`` to float16 in place, except BatchNorm; return it after a layer that casts its input.

    >>> half = network_to_half(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    >>> [param.dtype for param in half.parameters()]
    [torch.float16, torch.float16, torch.float32, torch.float32]
    """
    return nn.Sequential(tofp16(), convert_network(network, torch.float16))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters, gradients and buffers of ``module``, not of its children, in place."""
    children = dict(module._modules)
    module._modules.clear()
    try:
        cast_model(module, dtype)
    finally:
        module._modules.update(children)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``network`` to ``dtype`` in place, except affine BatchNorm; return it."""
    cast_model(network, dtype, keep_batchnorm_fp32=True)
    return network


class FP16Model(nn.Module):
    """A network cast to float16, which casts its positional inputs as well; outputs are not cast.

    Args:
        network: cast in place, except BatchNorm.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """Run the network on ``inputs`` as float16."""
        return self.network(*(each.half() for each in inputs))
