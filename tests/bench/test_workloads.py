"""What is timed with: models that learn, and ResNet50's shapes."""

import pytest
import torch

from amplab.bench.workloads import (
    mlp_512,
    random_tensors,
    resnet50_shapes,
    small_cnn,
    small_transformer,
    tiny_mlp,
)


@pytest.mark.parametrize("make", [mlp_512, tiny_mlp, small_cnn, lambda: small_transformer(width=16, layers=1, batch=2)])
def test_steps_learn_the_batch_and_leave_no_gradients(make):
    workload = make()
    twin = make()
    assert torch.equal(workload.loss(), twin.loss())
    before = workload.loss().item()
    for _ in range(5):
        workload.step()
    assert workload.loss().item() < before
    assert all(param.grad is None for param in workload.model.parameters())


def test_casting_covers_the_forward():
    workload, seen = tiny_mlp(), []
    workload.model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    workload.step(lambda: torch.autocast("cpu", torch.bfloat16))
    assert seen == [torch.bfloat16]


def test_resnet50_has_the_published_size():
    shapes = list(resnet50_shapes())
    assert len(shapes) == 161
    assert sum(torch.Size(shape).numel() for shape in shapes) == 25_557_032


def test_random_tensors_are_the_same_each_time():
    first, second = (random_tensors([(3, 4), (5,)], torch.float16) for _ in range(2))
    assert [each.shape for each in first] == [(3, 4), (5,)]
    assert all(map(torch.equal, first, second))
    assert first[0].dtype == torch.float16
