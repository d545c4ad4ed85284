"""Clipping by one norm over many tensors, against torch.nn.utils.clip_grad_norm_."""

import pytest
import torch
from torch import nn

from amplab.amp.backward.clipping import clip_by_norm_


def grads_of(kind):
    torch.manual_seed(0)
    if kind == "small":
        return [torch.randn(size) for size in (3, 0, 100, 1)] + [torch.randn(4, 5).t(), torch.randn(())]
    if kind == "large":
        return [torch.randn(300, 300), torch.randn(200, 400)]
    return [torch.randn(8), torch.randn(8).double(), torch.randn(8).bfloat16()]


@pytest.mark.parametrize("kind", ["small", "large", "mixed"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_it_clips_as_torch_does(kind, norm_type, max_norm):
    grads = [grad for grad in grads_of(kind) if grad.numel() or norm_type < float("inf")]  # torch has no max of nothing
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone(memory_format=torch.preserve_format)
    expected = nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    norm = clip_by_norm_(grads, max_norm, norm_type)
    torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-2 if kind == "mixed" else 1e-5, atol=0)
    for grad, param in zip(grads, params, strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-2 if kind == "mixed" else 1e-5, atol=0)


def test_nothing_to_clip():
    assert clip_by_norm_([], 1.0).item() == 0.0
    empty = [torch.zeros(0)]
    assert clip_by_norm_(empty, 1.0).item() == 0.0


def test_a_norm_that_is_not_finite_leaves_nothing_finite_to_step_with():
    grads = [torch.ones(2), torch.tensor([float("nan")])]
    assert clip_by_norm_(grads, 1.0).isnan()
    assert grads[0].isnan().all()
