"""apex's normalizations against float64 by hand, and the dtype of what they return."""

import pytest
import torch

from amplab import normalization
from amplab.normalization import fused_layer_norm as functions

MODULES = ["FusedLayerNorm", "MixedFusedLayerNorm", "FusedRMSNorm", "MixedFusedRMSNorm"]


def expected(name, inputs, eps=1e-5):
    inputs = inputs.double()
    centred = inputs if "RMS" in name else inputs - inputs.mean((-2, -1), keepdim=True)
    return centred / (centred.square().mean((-2, -1), keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_values_and_dtypes(name, dtype, weight_dtype):
    torch.manual_seed(0)
    inputs = torch.randn(5, 3, 4).to(dtype).requires_grad_()
    module = getattr(normalization, name)((3, 4)).to(weight_dtype)
    result = module(inputs)
    assert result.dtype == (weight_dtype if name.startswith("Mixed") else dtype)
    tolerance = 1e-5 if torch.float16 not in (dtype, weight_dtype) else 2e-3
    torch.testing.assert_close(result.double(), expected(name, inputs), atol=tolerance, rtol=tolerance)
    result.float().square().sum().backward()
    assert inputs.grad.isfinite().all()
    assert module.weight.grad.dtype == weight_dtype


@pytest.mark.parametrize("name", MODULES)
def test_float32_is_torchs_own_op_bitwise(name):
    inputs = torch.randn(5, 4)
    module = getattr(normalization, name)(4, eps=1e-3)
    own = (torch.nn.RMSNorm if "RMS" in name else torch.nn.LayerNorm)(4, eps=1e-3)
    assert torch.equal(module(inputs), own(inputs))
    own.load_state_dict(module.state_dict())


@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm"])
def test_without_weights(name):
    module = getattr(normalization, name)(4, elementwise_affine=False, memory_efficient=True)
    assert list(module.parameters()) == []
    assert module(torch.randn(2, 4).half()).dtype == torch.float16


@pytest.mark.parametrize("name", ["MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_mixed_ones_need_a_weight(name):
    with pytest.raises(RuntimeError, match=f"{name} does not support elementwise_affine=False"):
        getattr(normalization, name)(4, elementwise_affine=False)
    with pytest.raises(TypeError, match="epz"):
        getattr(normalization, name)(4, epz=1)


def test_functions_as_scripts_call_them():
    inputs, weight, bias = torch.randn(2, 4).half(), torch.rand(4), torch.rand(4)
    own = torch.nn.functional.layer_norm(inputs.float(), (4,), weight, bias, 1e-12)
    applied = functions.FusedLayerNormAffineFunction.apply(inputs, weight, bias, (4,), 1e-12)
    assert torch.equal(applied, own.half())
    assert torch.equal(functions.mixed_dtype_fused_layer_norm_affine(inputs, weight, bias, 4, 1e-12), own)
    assert functions.FusedLayerNormFunction.apply(inputs, (4,)).dtype == torch.float16
    rms = torch.nn.functional.rms_norm(inputs.float(), (4,), weight, 1e-6)
    assert torch.equal(functions.FusedRMSNormAffineFunction.apply(inputs, weight, (4,)), rms.half())
    assert torch.equal(functions.mixed_dtype_fused_rms_norm_affine(inputs, weight, 4), rms)
    assert functions.FusedRMSNormFunction.apply(inputs, (4,)).dtype == torch.float16
