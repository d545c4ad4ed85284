"""Two processes that train under apex's names get the gradients that one process computes for both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from amplab.parallel import DistributedDataParallel, SyncBatchNorm, convert_syncbn_model
from amplab.parallel.LARC import LARC

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from amplab import amp
from amplab.parallel import DistributedDataParallel, Reducer
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)

def gradient(**settings):
    torch.manual_seed(rank)  # made equal by the wrapper
    model = nn.Linear(3, 2)
    parallel = DistributedDataParallel(model, **settings)
    parallel(torch.full((1, 3), 1.0 + 2 * rank)).sum().backward()  # own gradients: 1 and 3
    return model.weight.grad[0, 0].item()

print([gradient(), gradient(message_size=1, delay_allreduce=True), gradient(gradient_average=False),
       gradient(gradient_predivide_factor=2.0), gradient(allreduce_always_fp32=True)])
module = nn.Linear(1, 1)
reducer = Reducer(module)
module.weight.grad = torch.tensor([[1.0 + rank]])
reducer.reduce()
alone = torch.tensor([float(rank)])
Reducer([alone]).reduce()
weights = [torch.zeros(1, 1) for _ in range(2)]
dist.all_gather(weights, module.weight.data)
print(module.weight.grad.item(), alone.item(), torch.equal(*weights))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
model = DistributedDataParallel(model, allreduce_always_fp32=True)
for step in range(3):
    loss = model(torch.randn(4, 4) + rank).square().mean() * (float("inf") if rank == 1 and step == 1 else 1)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(amp.loss_scale(), amp.last_step(optimizer).stepped)
print([round(param.double().sum().item(), 6) for param in model.parameters()])
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process that ends by itself while a DDP still holds the group
"""


UNEQUAL_SEEDS = """
import copy, os, sys, torch, torch.distributed as dist
from torch import nn
from amplab import amp
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)

def parallel(seed, saved=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return nn.parallel.DistributedDataParallel(model), optimizer

def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(2 * step + rank)
        with amp.scale_loss(model(torch.randn(4, 4)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert amp.last_step(optimizer).stepped

def bits(model, optimizer):  # every digit
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [tensor.tolist() for tensor in [*amp.master_params(optimizer), *model.parameters(), *momenta]]

model, optimizer = parallel(seed=rank)
start = bits(model, optimizer)
train(model, optimizer, range(3))
saved = copy.deepcopy({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})
train(model, optimizer, range(3, 5))
resumed = parallel(10 + rank, saved)
train(*resumed, range(3, 5))
print(start[0] == bits(model, optimizer)[0], bits(*resumed) == bits(model, optimizer))
print(bits(model, optimizer))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process that ends by itself while a DDP still holds the group
"""

COMBINED = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from amplab import GradScaler, amp
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)

def train(level, combine, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = amp.Session()
    options = {"verbosity": 0, "loss_scale": "dynamic", "dynamic_init_scale": 1024.0, "combine_grad": combine}
    session.initialize(model, optimizer, opt_level=level, **options)
    parallel = nn.parallel.DistributedDataParallel(model, **settings)
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        torch.manual_seed(2 * step + rank)
        with session.casting():
            loss = parallel(torch.randn(4, 8)).float().square().mean() * (float("inf") if step == 4 else 1.0)
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    return [param.detach().clone() for param in session.master_params(optimizer)]

for level in ("O1", "O2"):
    plain = train(level, False)
    for settings in ({}, {"gradient_as_bucket_view": True}):
        print(level, all(map(torch.equal, plain, train(level, True, **settings))), plain[0].isfinite().all().item())
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process that ends by itself while a DDP still holds the group
"""


SYNCED = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from amplab.parallel import convert_syncbn_model
from amplab.scripts.cuda_on_cpu import cuda_on_cpu
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)

def differs(make, dtype, momentum, weights_dtype):
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
    pairs += [(share, param.grad) for share, param in zip(shares, alone.parameters())]
    pairs += list(zip(synced.buffers(), alone.buffers()))
    return max((one.double() - other).abs().max().item() / other.double().abs().max().item() for one, other in pairs)

for make in (convert_syncbn_model, nn.SyncBatchNorm.convert_sync_batchnorm):
    for dtype, weights, bound in ((torch.float64, torch.float64, 1e-12), (torch.float32, torch.float32, 1e-4),
                                  (torch.float16, torch.float32, 2e-3), (torch.float16, torch.float16, 5e-3)):
        for momentum in (0.1, None):
            difference = differs(make, dtype, momentum, weights)
            assert difference < bound, (make, dtype, weights, momentum, difference)
    cuda_on_cpu(print)  # torch's own, from here on
alone = convert_syncbn_model(nn.BatchNorm1d(3), dist.new_group([rank], use_local_synchronization=True))
inputs = torch.randn(5, 3)
assert torch.equal(alone(inputs), nn.BatchNorm1d(3)(inputs))
assert not torch.equal(alone.eval()(inputs), nn.BatchNorm1d(3).eval()(inputs))  # running statistics have moved
from amplab.parallel import DistributedDataParallel
for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
    wrapped = wrap(convert_syncbn_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))))
    wrapped(torch.randn(5, 3) + rank).square().sum().backward()
print("agreed")
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process that ends by itself while a DDP still holds the group
"""


def two_ranks(script, tmp_path):
    """Run ``script`` as rank 0 and as rank 1; what both of them print."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank), "STORE": str(tmp_path / "store")},
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], printed
    first, second = (out for out, _ in printed)
    assert first == second
    return first


def test_masters_of_ranks_that_were_seeded_differently_are_the_same_bits(tmp_path):
    """The wrapper gives every rank the half weights of rank 0; a run that all ranks resume keeps its bits."""
    moved_and_resumed, bits = two_ranks(UNEQUAL_SEEDS, tmp_path).splitlines()
    assert moved_and_resumed == "False True"
    assert "nan" not in bits


def test_two_processes(tmp_path):
    first = two_ranks(WORKER, tmp_path)
    gradients, reduced, *steps = first.splitlines()
    assert gradients == "[2.0, 2.0, 4.0, 2.0, 2.0]"
    assert reduced == "1.5 0.5 True"
    assert steps[:3] == ["65536.0 True", "32768.0 False", "32768.0 True"]


def test_combined_gradients_are_those_of_the_buckets(tmp_path):
    """Gradients leave the wrapper's buckets for the flat buffers, be they views of the buckets or not."""
    assert two_ranks(COMBINED, tmp_path).splitlines() == ["O1 True True"] * 2 + ["O2 True True"] * 2


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ({"shared_param": True}, "delay_allreduce"),
        ({"allreduce_trigger_params": []}, "message_size"),
        ({"retain_allreduce_buffers": True}, ".grad"),
        ({"allreduce_communicators": []}, "default group"),
        ({"gradient_average_split_factor": 2.0}, "gradient_predivide_factor"),
    ],
)
def test_what_has_no_counterpart_is_refused(setting, instead):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.*{instead}"):
        DistributedDataParallel(nn.Linear(1, 1), **setting)


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


def test_larc_is_where_apex_has_it():
    from amplab import optimizers, parallel

    assert LARC is parallel.LARC is optimizers.LARC


def test_sync_batchnorm_on_the_cpu_is_batchnorm_over_both_batches(tmp_path):
    """Against float64 BatchNorm on the whole batch: values, gradients and running statistics."""
    assert two_ranks(SYNCED, tmp_path).splitlines()[-1] == "agreed"


def test_reduce_op_is_where_apex_has_it():
    from amplab import parallel

    assert parallel.ReduceOp is torch.distributed.ReduceOp


IN_BUCKETS = """
import os, sys, torch, torch.distributed as dist
from amplab import amp
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)

def trained(**settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=128.0)
    parallel = torch.nn.parallel.DistributedDataParallel(model, **settings)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        with amp.scale_loss(parallel(torch.randn(16, 8)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    amp.reset()
    return [weight.detach().clone() for weight in model.parameters()]

print(all(map(torch.equal, trained(), trained(gradient_as_bucket_view=True))))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # as above
"""


def test_gradients_in_the_buckets_of_ddp_are_counted_once(tmp_path):
    """With zeros left in place the gradient set aside is the bucket that the next backward writes."""
    assert two_ranks(IN_BUCKETS, tmp_path).splitlines()[-1] == "True"
