"""SyncBatchNorm on the CPU against float64 BatchNorm on the batches of all ranks."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from amplab.parallel import DistributedDataParallel, SyncBatchNorm, convert_syncbn_model
from amplab.scripts.cuda_on_cpu import cuda_on_cpu


def differs(rank, make, dtype, momentum, weights_dtype):
    torch.manual_seed(0)
    alone = nn.BatchNorm2d(3, momentum=momentum).to(torch.float64)
    nn.init.normal_(alone.weight), nn.init.normal_(alone.bias)
    synced = make(nn.BatchNorm2d(3, momentum=momentum).to(weights_dtype))
    synced.load_state_dict(alone.state_dict())
    inputs = (torch.randn(6, 3, 4, 4, dtype=torch.float64) * 2 + 100).to(dtype).double().requires_grad_()
    towards = torch.randn(6, 3, 4, 4, dtype=torch.float64).to(dtype).double()
    mine = slice(0, 2) if rank == 0 else slice(2, 6)  # batches of two sizes
    own = inputs.detach()[mine].to(dtype).requires_grad_()
    for _ in range(2):
        expected, found = alone(inputs), synced(own)
    assert found.dtype is dtype
    expected.backward(towards), found.backward(towards[mine].to(dtype))
    shares = [param.grad.double() for param in synced.parameters()]  # each process has its own
    for share in shares:
        dist.all_reduce(share)
    pairs = [(found, expected[mine]), (own.grad, inputs.grad[mine])]
    pairs += [(share, param.grad) for share, param in zip(shares, alone.parameters(), strict=True)]
    pairs += list(zip(synced.buffers(), alone.buffers(), strict=True))
    return max((one.double() - other).abs().max().item() / other.double().abs().max().item() for one, other in pairs)


def agrees(rank):
    for make in (convert_syncbn_model, nn.SyncBatchNorm.convert_sync_batchnorm):
        for dtype, weights, bound in (
            (torch.float64, torch.float64, 1e-12),
            (torch.float32, torch.float32, 1e-4),
            (torch.float16, torch.float32, 2e-3),
            (torch.float16, torch.float16, 5e-3),
        ):
            for momentum in (0.1, None):
                difference = differs(rank, make, dtype, momentum, weights)
                assert difference < bound, (make, dtype, weights, momentum, difference)
        cuda_on_cpu(print)  # torch's own, from here on
    alone = convert_syncbn_model(nn.BatchNorm1d(3), dist.new_group([rank], use_local_synchronization=True))
    inputs = torch.randn(5, 3)
    assert torch.equal(alone(inputs), nn.BatchNorm1d(3)(inputs))
    assert not torch.equal(alone.eval()(inputs), nn.BatchNorm1d(3).eval()(inputs))  # running statistics have moved
    for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        wrapped = wrap(convert_syncbn_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))))
        wrapped(torch.randn(5, 3) + rank).square().sum().backward()


def test_sync_batchnorm_on_the_cpu_is_batchnorm_over_both_batches():
    """Values, gradients and running statistics; alone in its group; and under both wrappers."""
    run_ranks(agrees)


def one_forward_more(rank):
    model = convert_syncbn_model(nn.BatchNorm1d(3))
    model(torch.randn(5, 3))
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            model(torch.randn(5, 3))
        return str(caught.value), type(caught.value.__cause__).__name__
    return None


def test_a_forward_on_one_rank_alone_says_what_it_waited_for():
    (said, cause), _ = run_ranks(one_forward_more)
    assert said.startswith("This rank waited for the others to add up the statistics of SyncBatchNorm")
    assert "model.eval()" in said
    assert cause != "NoneType"


def test_sync_batchnorm_keeps_weights_and_statistics():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    net(torch.randn(2, 3, 2, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    converted = convert_syncbn_model(net, channel_last=True)
    assert type(converted[1]) is SyncBatchNorm
    assert all(torch.equal(before[name], tensor) for name, tensor in converted.state_dict().items())
    alone = SyncBatchNorm(4, channel_last=True)
    inputs = torch.randn(2, 4, 3, 3)
    assert torch.equal(alone(inputs), nn.BatchNorm2d(4)(inputs))  # one process: nothing to agree on
    with pytest.raises(ValueError, match="fuse_relu"):
        SyncBatchNorm(4, fuse_relu=True)


class Shared(nn.Module):
    """A BatchNorm with three names, in two parents."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(3)
        self.inner = nn.Sequential(nn.ReLU(), self.first)
        self.register_module("absent", None)

    def forward(self, inputs):
        return self.inner(self.second(self.first(inputs)))


def calls_a_norm_three_times(rank):
    """Return the outputs on each rank's half, and the statistics, and those of one process on the whole batch."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 3, dtype=torch.float64) * 2 + 1
    alone, synced = Shared().double(), convert_syncbn_model(Shared().double())
    whole, own = alone(inputs), synced(inputs[4 * rank :][:4])
    pairs = [(whole[4 * rank :][:4], own), *zip(alone.buffers(), synced.buffers(), strict=True)]
    return [torch.allclose(*pair) for pair in pairs]


def test_a_norm_with_several_names_is_converted_under_each_and_stays_one():
    model, names = Shared(), list(Shared().state_dict())
    norm, converted = model.first, convert_syncbn_model(model)
    assert type(converted.first) is SyncBatchNorm
    assert converted.first is converted.second is converted.inner[1]
    assert converted.first.weight is norm.weight
    assert list(converted.state_dict()) == names
    norm = nn.BatchNorm1d(3)
    first, _, last = convert_syncbn_model(nn.Sequential(norm, nn.ReLU(), norm))
    assert first is last
    assert run_ranks(calls_a_norm_three_times) == [[True] * 4] * 2
