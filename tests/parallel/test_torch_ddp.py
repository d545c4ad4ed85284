"""Both APIs of amp under torch's DistributedDataParallel, against gradients that are averaged by hand, bitwise.

By hand: each rank has the bare model, and after its backward ``gradient / 2`` is summed over the two ranks.
"""

import contextlib
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amplab
from amplab import amp

LEVELS = ("O0", "O1", "O2", "O3")
STEPS = 6
OVERFLOW_AT = 3  # on rank 1 alone


class Net(nn.Module):
    """Layers, and arguments of forward of both kinds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, inputs, *, times=1.0):
        return self.layers(inputs) * times


class Decorated(Net):
    """A decorated forward gets ``self`` and its arguments of both kinds from the wrapper."""

    @amplab.autocast("cpu", dtype=torch.float16)
    def forward(self, inputs, *, times=1.0):
        return super().forward(inputs, times=times)


class Within(Net):
    def forward(self, inputs, *, times=1.0):
        with amplab.autocast("cpu", dtype=torch.float16):
            return super().forward(inputs, times=times)


def batches(rank, micro):
    """The inputs of each step, and the factor of its loss."""
    drawn = torch.Generator().manual_seed(10 + rank)
    for step in range(STEPS):
        factor = float("inf") if rank == 1 and step == OVERFLOW_AT else 1.0
        yield [torch.randn(4, 8, generator=drawn) for _ in range(micro)], factor


def averaged_by_hand(params):
    for param in params:
        dist.all_reduce(param.grad.div_(2))


def without_sync(net, last):
    return contextlib.nullcontext() if last or not isinstance(net, DistributedDataParallel) else net.no_sync()


def through_apex(rank, level, wrapped, micro=1, delay=True, combine=False):
    """Weights after some steps, and what happened at each."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = amp.Session()
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 1024.0, "combine_grad": combine}
    session.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    net = DistributedDataParallel(model) if wrapped else model
    happened = []
    for inputs, factor in batches(rank, micro):
        optimizer.zero_grad()
        for index, one in enumerate(inputs):
            last = index == micro - 1
            with without_sync(net, last), session.casting():
                loss = net(one, times=0.5).float().square().mean() * factor
                with session.scale_loss(loss / micro, optimizer, delay_unscale=delay and not last) as scaled:
                    scaled.backward()
                    if last and not wrapped:
                        averaged_by_hand(model.parameters())
        optimizer.step()
        happened.append((session.loss_scale(), session.last_step(optimizer).stepped))
    return [param.detach().clone() for param in session.master_params(optimizer)], happened


def through_torch(rank, kind, wrapped, micro=1, *, in_blocks=False):
    """The same with autocast and GradScaler; ``in_blocks``: each backward in a block of `GradScaler.scale_loss`."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amplab.GradScaler("cpu", init_scale=1024.0)
    net = DistributedDataParallel(model) if wrapped else model
    around = amplab.autocast("cpu", dtype=torch.float16, enabled=kind is Net)
    happened = []
    for inputs, factor in batches(rank, micro):
        optimizer.zero_grad()
        for index, one in enumerate(inputs):
            last = index == micro - 1
            with without_sync(net, last):
                with around:
                    output = net(one, times=0.5)
                loss = output.float().square().mean() * factor / micro
                with contextlib.ExitStack() as block:
                    scaled = (
                        block.enter_context(scaler.scale_loss(loss, optimizer)) if in_blocks else scaler.scale(loss)
                    )
                    scaled.backward()
        if not wrapped:
            averaged_by_hand(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        happened.append((scaler.get_scale(), scaler.last_step.stepped))
    assert output.dtype is torch.float16
    return [param.detach().clone() for param in model.parameters()], happened


def on_joined_batches(level):
    """One process on the batches of both ranks."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = amp.Session()
    scale = {"loss_scale": "dynamic", "dynamic_init_scale": 1024.0}
    session.initialize(model, optimizer, opt_level=level, verbosity=0, **scale)
    happened = []
    for ((first,), _), ((second,), factor) in zip(batches(0, 1), batches(1, 1), strict=True):
        optimizer.zero_grad()
        with session.casting():
            loss = model(torch.cat([first, second]), times=0.5).float().square().mean() * factor
            with session.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        happened.append((session.loss_scale(), session.last_step(optimizer).stepped))
    return [param.detach().clone() for param in session.master_params(optimizer)], happened


def wrapped_before_initialize():
    """What initialize says of a wrapper, and of a model that contains one."""
    told = []
    for model in (DistributedDataParallel(Net()), nn.Sequential(DistributedDataParallel(Net()))):
        try:
            amp.Session().initialize(model, verbosity=0)
        except RuntimeError as error:
            told.append(str(error))
    return told


def every_run(rank):
    """What each call of the two functions returns: one start of the ranks for all."""
    runs = {}
    for level in LEVELS:
        for micro in (1, 2):
            runs[level, micro] = [through_apex(rank, level, wrapped, micro) for wrapped in (True, False)]
        runs[level, "not delayed"] = through_apex(rank, level, True, 2, delay=False)
        runs[level, "combined"] = through_apex(rank, level, True, 2, combine=True)
    for kind in (Net, Decorated, Within):
        for micro in (1, 2):
            runs[kind.__name__, micro] = [through_torch(rank, kind, wrapped, micro) for wrapped in (True, False)]
    runs["refused"] = wrapped_before_initialize()
    runs["in blocks"] = through_torch(rank, Net, True, 2, in_blocks=True)
    return runs


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(every_run)


def same(one, other):
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("way", [*LEVELS, "Net", "Decorated", "Within"])
def test_training_is_that_of_gradients_averaged_by_hand(ranks, way, micro):
    """Also with accumulation under no_sync: weights, scales and skips, on both ranks."""
    (weights, happened), by_hand = ranks[0][way, micro]
    assert all(weight.isfinite().all() for weight in weights)
    assert [stepped for _, stepped in happened] == [step != OVERFLOW_AT for step in range(STEPS)]
    assert happened[-1][0] == 512.0
    for other, told in (by_hand, *ranks[1][way, micro]):
        assert same(weights, other)
        assert happened == told


def test_a_wrapper_is_refused_before_initialize(ranks):
    wrapper, within = ranks[0]["refused"]
    assert "is an instance of <class 'torch.nn.parallel.distributed.DistributedDataParallel'>" in wrapper
    assert "submodule '0'" in within
    assert "then wrap it" in within


@pytest.mark.parametrize("way", ["not delayed", "combined"])
@pytest.mark.parametrize("level", LEVELS)
def test_scale_loss_under_no_sync_waits_for_the_average(ranks, level, way):
    """Unscaled at once, the gradients of the first half would never be averaged, and the ranks would differ."""
    (weights, happened), _ = ranks[0][level, 2]
    for rank in ranks:
        assert same(weights, rank[level, way][0])
        assert happened == rank[level, way][1]


def test_scale_loss_of_grad_scaler_under_no_sync(ranks):
    (weights, happened), _ = ranks[0]["Net", 2]
    for rank in ranks:
        assert same(weights, rank["in blocks"][0])
        assert happened == rank["in blocks"][1]


@pytest.mark.parametrize("level", LEVELS)
def test_training_is_that_of_one_process_on_the_joined_batch(ranks, level):
    """Up to the rounding of sums in another order."""
    (weights, happened), _ = ranks[0][level, 1]
    joined, happened_to_joined = on_joined_batches(level)
    assert happened == happened_to_joined
    for weight, other in zip(weights, joined, strict=True):
        tolerance = 1e-6 if level == "O0" else 1e-3
        torch.testing.assert_close(weight, other, rtol=10 * tolerance, atol=tolerance)


def beside_a_tool(rank):
    """Train while another thread of rank 0 looks at another model; return the weights after 60 steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ended, looks = threading.Event(), [0]

    def look():
        other = nn.Linear(8, 2)
        while not ended.is_set():
            amplab.xray(other, torch.ones(2, 8))
            looks[0] += 1

    thread = threading.Thread(target=look)
    if rank == 0:
        thread.start()
    try:
        drawn = torch.Generator().manual_seed(rank)
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=drawn)).square().mean().backward()
            optimizer.step()
    finally:
        ended.set()
        if rank == 0:
            thread.join()
            assert looks[0] > 3
    return [each.detach().clone() for each in model.parameters()]


def test_a_tool_in_another_thread_does_not_stop_the_exchange_of_gradients():
    first, second = run_ranks(beside_a_tool)
    assert all(map(torch.equal, first, second))


WRAPPERS = {
    "torch's": DistributedDataParallel,
    "a static graph": partial(DistributedDataParallel, static_graph=True),
    "apex's": amplab.parallel.DistributedDataParallel,
}
TOOLS = {
    "xray": lambda model, x: amplab.xray(model, x, loss=torch.sum),
    "xray O1": lambda model, x: amplab.xray(model, x, loss=torch.sum, opt_level="O1"),
    "first_nonfinite": lambda model, x: amplab.first_nonfinite(model, x, loss=torch.sum),
    "gradient_range": lambda model, x: amplab.gradient_range(model, x, loss=torch.sum),
    "": lambda model, x: None,
}


def weights_after(rank, wrapper, tool, between):
    """Train three times, with a tool on rank 0 alone in the first, second and third iteration; return the weights."""
    return [weights_with(rank, wrapper, tool, iterations, between) for iterations in (0, 1, 2)]


def weights_with(rank, wrapper, tool, iterations, between):
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, _) in enumerate(batches(rank, 1)):
        is_here = step == iterations and rank == 0
        if is_here and not between:
            TOOLS[tool](model, inputs[0])
        optimizer.zero_grad()
        loss = model(inputs[0]).square().mean()
        if is_here and between:
            TOOLS[tool](model, inputs[0])
        loss.backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("between", [False, True], ids=["before the forward", "before the backward"])
@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_tool_on_one_rank_changes_no_gradient_and_waits_for_no_other_rank(wrapper, tool, between):
    """Torch's prepares its backward in the forward, and its second forward exchanges the order of its buckets."""
    first, second = run_ranks(weights_after, wrapper, tool, between)
    expected, _ = run_ranks(weights_after, wrapper, "", between)
    for weights in zip(first, second, expected, strict=True):
        assert all(
            torch.equal(one, other) and torch.equal(one, right) for one, other, right in zip(*weights, strict=True)
        )


class Interrupted(Net):
    raises = False

    def forward(self, inputs, *, times=1.0):
        if self.raises:
            raise KeyboardInterrupt
        return super().forward(inputs, times=times)


def gradients_after_an_interrupt(rank):
    """Torch calls no hook after a forward that Ctrl-C ends."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Interrupted())
    inputs = torch.full((2, 8), float(rank + 1))
    model.module.raises = True
    with contextlib.suppress(KeyboardInterrupt):
        amplab.xray(model, inputs, loss=torch.sum)
    model.module.raises = False
    model(inputs).square().sum().backward()
    return [each.grad for each in model.parameters()], model.require_backward_grad_sync, type(model.reducer).__name__


def test_ctrl_c_in_a_forward_of_a_tool_leaves_the_exchange_of_gradients_on():
    (first, *of_first), (second, *of_second) = run_ranks(gradients_after_an_interrupt)
    assert of_first == of_second == [True, "Reducer"]
    assert all(map(torch.equal, first, second))
    assert any(each.any() for each in first)
