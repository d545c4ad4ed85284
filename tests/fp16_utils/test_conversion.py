"""Models cast by hand: which layers, and that BatchNorm is never rounded."""

import torch
from torch import nn

from amplab.fp16_utils import BN_convert_float, FP16Model, convert_module, convert_network, network_to_half


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.LayerNorm(2))
    net(torch.randn(8, 3, 4, 4))
    return net


def dtypes(module):
    return {name: tensor.dtype for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


def test_network_to_half_keeps_batchnorm_bitwise():
    net = network()
    before = net[1].running_mean.clone()
    half = network_to_half(net)
    assert half[1] is net
    assert torch.equal(net[1].running_mean, before)
    assert net[0].weight.dtype == net[3].weight.dtype == net[2].running_mean.dtype == torch.float16
    assert half(torch.randn(2, 3, 4, 4)).dtype == torch.float16


def test_batchnorm_back_to_float():
    net = BN_convert_float(network().half())
    wanted = {name: torch.float32 if name.startswith("1.") else torch.float16 for name in dtypes(net)}
    assert dtypes(net) == wanted == dtypes(convert_network(network(), torch.float16))


def test_convert_module_leaves_children():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.inner = nn.Linear(2, 2)

    outer = Outer()
    convert_module(outer, torch.float16)
    assert dtypes(outer) == {"weight": torch.float16, "inner.weight": torch.float32, "inner.bias": torch.float32}


def test_fp16_model_halves_its_inputs():
    model = FP16Model(nn.Bilinear(2, 3, 4))
    assert model(torch.ones(5, 2), torch.ones(5, 3)).dtype == torch.float16
