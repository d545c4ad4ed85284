"""Two processes that train under apex's names get the gradients that one process computes for both."""

import contextlib
import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from amplab import amp
from amplab.parallel import DistributedDataParallel, Reducer
from amplab.parallel.LARC import LARC


def gradient(rank, **settings):
    torch.manual_seed(rank)  # made equal by the wrapper
    model = nn.Linear(3, 2)
    parallel = DistributedDataParallel(model, **settings)
    parallel(torch.full((1, 3), 1.0 + 2 * rank)).sum().backward()  # own gradients: 1 and 3
    return model.weight.grad[0, 0].item()


def gradients_by_setting(rank):
    settings = [
        {},
        {"message_size": 1, "delay_allreduce": True},
        {"gradient_average": False},
        {"gradient_predivide_factor": 2.0},
        {"allreduce_always_fp32": True},
    ]
    return [gradient(rank, **chosen) for chosen in settings]


def reduced(rank):
    module = nn.Linear(1, 1)
    reducer = Reducer(module)
    module.weight.grad = torch.tensor([[1.0 + rank]])
    reducer.reduce()
    alone = torch.tensor([float(rank)])
    Reducer([alone]).reduce()
    return module.weight.grad.item(), alone.item(), module.weight.item(), module.bias.grad


def reduced_with_other_gradients(rank):
    """Rank 0 has a gradient of the weight only, rank 1 of the bias; nobody of extra."""
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(torch.zeros(3))
    param = (module.weight, module.bias)[rank]
    param.grad = torch.full_like(param, 2.0 + rank)
    Reducer(module).reduce()
    return module.weight.grad, module.bias.grad, module.extra.grad


def overflows_on_rank_1(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model = DistributedDataParallel(model, allreduce_always_fp32=True)
    steps = []
    for step in range(3):
        loss = model(torch.randn(4, 4) + rank).square().mean() * (float("inf") if rank == 1 and step == 1 else 1)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        steps.append((amp.loss_scale(), amp.last_step(optimizer).stepped))
    return steps, [param.detach() for param in model.parameters()]


def prepared(seed, saved=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return nn.parallel.DistributedDataParallel(model), optimizer


def train(rank, model, optimizer, steps):
    for step in steps:
        torch.manual_seed(2 * step + rank)
        with amp.scale_loss(model(torch.randn(4, 4)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert amp.last_step(optimizer).stepped


def bits(model, optimizer):
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    tensors = [*amp.master_params(optimizer), *model.parameters(), *momenta]
    return [tensor.detach().clone() for tensor in tensors]


def resumed_after_unequal_seeds(rank):
    model, optimizer = prepared(seed=rank)
    start = bits(model, optimizer)
    train(rank, model, optimizer, range(3))
    saved = copy.deepcopy({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})
    train(rank, model, optimizer, range(3, 5))
    resumed = prepared(10 + rank, saved)
    train(rank, *resumed, range(3, 5))
    return start, bits(model, optimizer), bits(*resumed)


def trained_with_combined_gradients(rank, level, combine, settings):
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


def combined_and_not(rank):
    return {
        level: [
            trained_with_combined_gradients(rank, level, combine, settings)
            for combine, settings in ((False, {}), (True, {}), (True, {"gradient_as_bucket_view": True}))
        ]
        for level in ("O1", "O2")
    }


def trained_in_buckets(rank, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=128.0)
    parallel = nn.parallel.DistributedDataParallel(model, **settings)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        with amp.scale_loss(parallel(torch.randn(16, 8)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    amp.reset()
    return [weight.detach().clone() for weight in model.parameters()]


def in_buckets_and_not(rank):
    return trained_in_buckets(rank), trained_in_buckets(rank, gradient_as_bucket_view=True)


def averaged_by_apex(rank, **settings):
    """Half gradients after one backward, and their bits if each rank averages by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).half()
    bare = copy.deepcopy(model)
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank)).half()
    for net in (DistributedDataParallel(model, **settings), bare):
        net(inputs).float().square().mean().backward()
    before = settings.get("gradient_predivide_factor", 1.0)
    after = before / 2 if settings.get("gradient_average", True) else 1.0
    for param in bare.parameters():
        sent = param.grad.float() if settings.get("allreduce_always_fp32") else param.grad
        dist.all_reduce(sent.div_(before))
        param.grad.copy_(sent.mul_(after))
    return [[param.grad for param in net.parameters()] for net in (model, bare)]


def half_gradients(rank):
    settings = [
        {},
        {"allreduce_always_fp32": True},
        {"gradient_predivide_factor": 3.0},
        {"allreduce_always_fp32": True, "gradient_average": False, "gradient_predivide_factor": 3.0},
        {"delay_allreduce": True, "message_size": 1, "num_allreduce_streams": 2, "prof": True},
    ]
    return [averaged_by_apex(rank, **chosen) for chosen in settings]


def accumulated(rank):
    """apex's own way to accumulate, and no_sync."""
    gradients = []
    for by_methods in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 2))
        with contextlib.nullcontext() if by_methods else model.no_sync():
            if by_methods:
                model.disable_allreduce()
            model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        model.enable_allreduce()
        model(torch.full((1, 3), 3.0 + rank)).sum().backward()
        gradients.append(model.module.weight.grad)
    return gradients


def same(one, other):
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def all_of_them(rank):
    functions = (gradients_by_setting, reduced, reduced_with_other_gradients, overflows_on_rank_1)
    results = {}
    functions += (resumed_after_unequal_seeds, combined_and_not, in_buckets_and_not, half_gradients, accumulated)
    for function in functions:
        results[function.__name__] = function(rank)
        amp.reset()
    return results


@pytest.fixture(scope="module")
def ranks():
    """What each function above returned on rank 0 and on rank 1: one start for all."""
    return run_ranks(all_of_them)


def test_gradients_are_averaged_as_the_settings_say(ranks):
    for rank in ranks:
        assert rank["gradients_by_setting"] == [2.0, 2.0, 4.0, 2.0, 2.0]


def test_half_gradients_are_averaged_as_apex_does(ranks):
    """Divided before and after the sum, in the dtype of the wire, and rounded to half once."""
    for (found, by_hand), (found_on_second, _) in zip(*(rank["half_gradients"] for rank in ranks), strict=True):
        assert same(found, by_hand)
        assert same(found, found_on_second)


def test_disabled_allreduce_accumulates(ranks):
    for rank in ranks:
        by_methods, by_no_sync = rank["accumulated"]
        assert torch.equal(by_methods, by_no_sync)
        assert by_methods[0, 0] == 5.0  # the mean of 1 + 3 and 2 + 4


def test_reducer_averages_and_broadcasts(ranks):
    (gradient, alone, weight, bias_gradient), second = (rank["reduced"] for rank in ranks)
    assert (gradient, alone, bias_gradient) == (1.5, 0.5, None)
    assert second == (1.5, 0.5, weight, None)


def test_reducer_averages_gradients_that_exist_on_one_rank_only(ranks):
    """Before, the gradients of different parameters were averaged, or a rank was aborted where their sizes differ."""
    for rank in ranks:
        of_weight, of_bias, of_extra = rank["reduced_with_other_gradients"]
        assert of_weight.unique().tolist() == [1.0]
        assert of_bias.unique().tolist() == [1.5]
        assert of_extra is None


def test_an_overflow_on_one_rank_skips_the_step_of_both(ranks):
    (steps, weights), (steps_of_second, weights_of_second) = (rank["overflows_on_rank_1"] for rank in ranks)
    assert steps == steps_of_second == [(65536.0, True), (32768.0, False), (32768.0, True)]
    assert same(weights, weights_of_second)


def test_masters_of_ranks_that_were_seeded_differently_are_the_same_bits(ranks):
    """The wrapper gives every rank the half weights of rank 0; a run that all ranks resume keeps its bits."""
    (start, trained, resumed), second = (rank["resumed_after_unequal_seeds"] for rank in ranks)
    assert not same(start, trained)
    assert same(trained, resumed)
    assert same(trained, second[1])
    assert all(tensor.isfinite().all() for tensor in trained)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_combined_gradients_are_those_of_the_buckets(ranks, level):
    """Gradients leave the wrapper's buckets for the flat buffers, be they views of the buckets or not."""
    plain, combined, in_views = ranks[0]["combined_and_not"][level]
    assert same(plain, combined)
    assert same(plain, in_views)
    assert same(plain, ranks[1]["combined_and_not"][level][0])
    assert plain[0].isfinite().all()


def test_gradients_in_the_buckets_of_ddp_are_counted_once(ranks):
    """With zeros left in place the gradient set aside is the bucket that the next backward writes."""
    assert same(*ranks[0]["in_buckets_and_not"])


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ({"shared_param": True}, "delay_allreduce"),
        ({"allreduce_trigger_params": []}, "message_size"),
        ({"retain_allreduce_buffers": True}, ".grad"),
        ({"allreduce_communicators": []}, "default group"),
        ({"gradient_average_split_factor": 2.0}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": 0.0}, "> 0"),
        ({"gradient_predivide_factor": float("nan")}, "> 0"),
    ],
)
def test_what_has_no_counterpart_is_refused(setting, instead):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.*{instead}"):
        DistributedDataParallel(nn.Linear(1, 1), **setting)


@pytest.mark.parametrize("argument", ["process_group", "device_ids", "find_unused_parameters"])
def test_arguments_of_torch_are_refused_with_the_wrapper_that_takes_them(argument):
    with pytest.raises(TypeError, match=rf"{argument}: .*torch\.nn\.parallel\.DistributedDataParallel"):
        DistributedDataParallel(nn.Linear(1, 1), **{argument: None})


def test_larc_is_where_apex_has_it():
    from amplab import optimizers, parallel

    assert LARC is parallel.LARC is optimizers.LARC


def test_reduce_op_is_where_apex_has_it():
    from amplab import parallel

    assert parallel.ReduceOp is torch.distributed.ReduceOp


GLOBAL_WRAPPER = """
import atexit, sys
from pathlib import Path

@atexit.register
def say():  # after what amplab has registered, and just before Python ends
    names = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
    print(sum("gloo" in name for name in names), flush=True)

import torch
import torch.distributed as dist
from amplab.parallel import DistributedDataParallel

store, rank = sys.argv[1:]
dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 2), gradient_predivide_factor=2.0)
model(torch.ones(3, 4)).sum().backward()
if rank == "0":
    dist.destroy_process_group()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the names of threads in /proc")
def test_a_global_wrapper_leaves_no_threads_when_the_program_ends(tmp_path):
    """They abort a process that ends. Rank 0 destroys its group before the end, and rank 1 does not."""
    words = [sys.executable, "-c", GLOBAL_WRAPPER, str(tmp_path / "store")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*words, str(rank)], **pipes) for rank in range(2)]
    for process in processes:
        printed, said = process.communicate(timeout=200)
        assert (process.returncode, printed) == (0, "0\n"), said
