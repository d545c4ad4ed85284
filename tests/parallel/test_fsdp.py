"""FSDP2 under amplab: every rank takes the same decision, and the weights are those of one process.

One process computes the gradients of both half batches and averages them, which is what two ranks do: bitwise the same.
"""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import amplab
from amplab import GradScaler, amp, autocast, optimizers
from amplab.policies import PrecisionPolicy, apply_policy

STEPS = 4
OVERFLOW_AT = 1
ELEMENTWISE = ("FusedSGD", "FusedAdam", "FusedAdamW", "FusedAdagrad", "FusedAdadelta", "FusedRMSprop")
WHOLE_TENSORS = ("FusedLAMB", "FusedNovoGrad", "FusedAdamP")
NO_POWERS = (0.0, -1.0, -float("inf"))


def new_model():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))
    return nn.Sequential(nn.Linear(8, 16), block, nn.Linear(16, 3))  # 3 rows: ranks hold shards of unequal sizes


def sharded(model=None, **settings):
    model = new_model() if model is None else model
    for part in model:
        fully_shard(part, **settings)
    return fully_shard(model, **settings)


def batch(step, rank, world_size=2):
    torch.manual_seed(100 + step)
    return torch.randn(8, 8).chunk(world_size)[rank]


def loss_of(model, inputs, region=True):
    with autocast("cpu", dtype=torch.float16) if region else contextlib.nullcontext():
        return model(inputs).float().square().mean()


def put_inf(model, rank, step):
    """Make one element of one shard inf, on rank 1 alone."""
    if rank == 1 and step == OVERFLOW_AT:
        next(model.parameters()).grad.to_local().view(-1)[0] = float("inf")


def weights(model):
    return [
        (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for param in model.parameters()
    ]


def new_scaler(kind=GradScaler, **settings):
    return kind("cpu", init_scale=1024.0, growth_interval=3, **settings)


def trained(rank, optimizer_class, *, scaler=None, clip=None, overflow=False, region=True, options=(), **settings):
    """Train a sharded model; return the full weights, and the scale and the outcome of each step."""
    model = sharded(**settings)
    optimizer = optimizer_class(model.parameters(), lr=0.01, **dict(options))
    scaler = new_scaler() if scaler is None else scaler
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(step, rank), region)).backward()
        if overflow:
            put_inf(model, rank, step)
        norm = 0.0 if clip is None else scaler.unscale_and_clip_(optimizer, *clip).item()
        scaler.step(optimizer)
        last = scaler.last_step if isinstance(scaler, GradScaler) else None
        scaler.update()
        steps.append((scaler.get_scale(), last, norm))
    return weights(model), steps


def in_one_process(optimizer_class, *, clip=None, options=(), world_size=2):
    """Train on the same batches: the gradient is the mean of those of the parts."""
    model = new_model()
    optimizer = optimizer_class(model.parameters(), lr=0.01, **dict(options))
    scaler, norms = new_scaler(), []
    for step in range(STEPS):
        parts = []
        for rank in range(world_size):
            loss = loss_of(model, batch(step, rank, world_size))
            parts.append(torch.autograd.grad(scaler.scale(loss), list(model.parameters())))
        for param, *grads in zip(model.parameters(), *parts, strict=True):
            param.grad = sum(grads) / world_size
        norms.append(0.0 if clip is None else scaler.unscale_and_clip_(optimizer, *clip).item())
        scaler.step(optimizer)
        scaler.update()
    return weights(model), norms


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def refusal(call):
    try:
        call()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""


def two_ranks(rank):
    """All that two ranks are asked, in one start: name -> result."""
    found = {"averages": averages(rank)}
    for name in ("SGD", "Adam"):
        kind = getattr(torch.optim, name)
        found[name] = equal(trained(rank, kind)[0], in_one_process(kind)[0])
    for name in ELEMENTWISE:
        kind = getattr(optimizers, name)
        found[name] = equal(trained(rank, kind)[0], in_one_process(kind)[0])
    found["no powers"] = {norm_type: clipped(rank, norm_type) for norm_type in NO_POWERS}
    found["refused"] = {
        name: refusal(lambda name=name: getattr(optimizers, name)(sharded().parameters(), lr=0.01))
        for name in WHOLE_TENSORS
    }
    found["refused"]["max_grad_norm"] = refusal(
        lambda: optimizers.FusedAdamW(sharded().parameters(), lr=0.01, max_grad_norm=1.0)
    )
    found["overflow"] = {
        name: trained(rank, kind, overflow=True, options=options)
        for name, kind, options in (
            ("SGD", torch.optim.SGD, {"momentum": 0.9}),
            ("Adam, fused", torch.optim.Adam, {"fused": True}),
            ("FusedAdam", optimizers.FusedAdam, {}),
        )
    }
    found["clip"] = [
        (trained(rank, torch.optim.SGD, clip=clip), in_one_process(torch.optim.SGD, clip=clip))
        for clip in ((0.01,), (0.01, float("inf")), (0.01, 1.0))
    ]
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for name, settings in (("half weights", {"region": False}), ("half weights in a region", {})):
        ours, theirs = (
            trained(rank, torch.optim.SGD, scaler=new_scaler(kind), mp_policy=half, **settings)
            for kind in (GradScaler, ShardedGradScaler)
        )
        found[name] = equal(ours[0], theirs[0]), [step[0] for step in ours[1]] == [step[0] for step in theirs[1]]
    found["accumulated"] = accumulated(rank)
    found["another scale"] = another_scale(rank)
    found["two losses"] = two_losses(rank)
    found["apex"] = with_apex(rank)
    found["in one region"] = in_one_region()
    found["late"] = late_shards()
    for half in (False, True):
        found["rules", half] = with_rules(rank, half=half)
    return found


def averages(rank):
    """Gloo's mean of two ranks, by all_reduce and by the reduce_scatter that FSDP2 uses, against float64."""
    right = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        both = torch.randn(2, 64).mul(2.0 ** torch.randint(-8, 8, (2, 64))).to(dtype)
        mean = both.double().mean(0).to(dtype)
        reduced, scattered = both[rank].clone(), torch.empty(32, dtype=dtype)
        dist.all_reduce(reduced, op=dist.ReduceOp.AVG)
        dist.reduce_scatter_tensor(scattered, both[rank].clone(), op=dist.ReduceOp.AVG)
        right[dtype] = torch.equal(reduced, mean), torch.equal(scattered, mean.chunk(2)[rank])
    return right


RULES = PrecisionPolicy(module_rules={"1": "float32"})


def with_rules(rank, *, half):
    """Train with one module in float32 by a rule; with ``half``, FSDP2 gathers the weights of the others in float16."""
    model, alone = new_model(), new_model()
    for index, part in enumerate(model):
        dtype = torch.float32 if index == 1 else torch.float16
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if half else None
        fully_shard(part, **({"mp_policy": policy} if half else {}))
    fully_shard(model)
    optimizer, lone_optimizer = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, alone))
    scaler, lone_scaler, seen = new_scaler(), new_scaler(), []
    with apply_policy(RULES, model), apply_policy(RULES, alone):
        for part in (model[0], model[1][0]):
            part.register_forward_pre_hook(lambda module, _args: seen.append(module.weight.dtype))
            part.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
        for step in range(STEPS):
            for each in (optimizer, lone_optimizer):
                each.zero_grad()
            scaler.scale(loss_of(model, batch(step, rank), region=False)).backward()
            for part in range(2):
                (lone_scaler.scale(loss_of(alone, batch(step, part), region=False)) / 2).backward()
            for each, its in ((scaler, optimizer), (lone_scaler, lone_optimizer)):
                each.step(its)
                each.update()
    return equal(weights(model), weights(alone)), seen[:4]


def accumulated(rank):
    """Two backwards, the first without communication, give the gradient of both batches: the largest differences."""
    alone = new_model()
    for step in range(2):
        for part in range(2):
            (loss_of(alone, batch(step, part)) / 2).backward()
    model = sharded()
    scaler, optimizer = new_scaler(), torch.optim.SGD(model.parameters(), lr=0.01)
    for step, communicates in ((0, False), (1, True)):
        model.set_requires_gradient_sync(communicates)
        scaler.scale(loss_of(model, batch(step, rank))).backward()
    scaler.unscale_(optimizer)
    differences = [farthest(model, alone)]
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, dynamic_init_scale=1024.0, scale_window=1)
    for delays in (True, False):
        for to_none in (True, False):
            optimizer.zero_grad(set_to_none=to_none)
            for step, communicates in ((0, False), (1, True)):  # the scale grows after every backward that is unscaled
                backward_of(model, optimizer, batch(step, rank), communicates, delays=delays and not communicates)
            differences.append(farthest(model, alone))
    amp.reset()
    return differences


def backward_of(model, optimizer, inputs, communicates, *, delays=False):
    model.set_requires_gradient_sync(communicates)
    with amp.scale_loss(model(inputs).float().square().mean(), optimizer, delay_unscale=delays) as scaled:
        scaled.backward()


def another_scale(rank):
    """A step, and a scale that is moved, while fully_shard keeps gradients; both after a step that went well."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, dynamic_init_scale=1024.0)
    backward_of(model, optimizer, batch(0, rank), True)
    said = [refusal(optimizer.step)]
    optimizer.zero_grad()
    backward_of(model, optimizer, batch(0, rank), False)
    said.append(refusal(optimizer.step))
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 0}})
    said.append(refusal(lambda: backward_of(model, optimizer, batch(1, rank), True)))
    amp.reset()
    return said


def farthest(model, alone):
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((ours.grad.full_tensor() - theirs.grad).abs().max().item() for ours, theirs in pairs)


def two_losses(rank):
    """`scale_loss` of two losses; the second one overflows on rank 1 alone."""
    model = sharded()
    scaler, optimizer = new_scaler(num_losses=2), torch.optim.SGD(model.parameters(), lr=0.01)
    for loss_id in range(2):
        with scaler.scale_loss(loss_of(model, batch(loss_id, rank)), optimizer, loss_id) as scaled:
            scaled.backward()
            put_inf(model, rank, loss_id)
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step.stepped, scaler.get_scale(0), scaler.get_scale(1)


def with_apex(rank):
    """O1 on a sharded model: the same weights as one process, and one skipped step."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, dynamic_init_scale=1024.0)
    outcomes = []
    for step in range(STEPS):
        with amp.scale_loss(model(batch(step, rank)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
            put_inf(model, rank, step)
        norm = amp.clip_grad_norm_(optimizer, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        outcomes.append((amp.loss_scale(), amp.last_step(optimizer), norm))
    amp.reset()
    return weights(model), outcomes


def clipped(rank, norm_type):
    """Clip by a norm that a sum of powers over ranks is not; return what is raised, and whether gradients changed."""
    model = sharded()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), new_scaler()
    scaler.scale(loss_of(model, batch(0, rank))).backward()
    before = [param.grad.to_local() / 1024.0 for param in model.parameters()]
    with pytest.raises(ValueError, match="norm_type") as info:
        scaler.unscale_and_clip_(optimizer, 1e-3, norm_type)
    return str(info.value), equal([param.grad.to_local() for param in model.parameters()], before)


def in_one_region():
    """A region around several steps: the weights that are gathered again, at the same address, are cast again."""
    torch.manual_seed(0)
    model = nn.Sequential(fully_shard(nn.Linear(512, 512, bias=False)))
    fully_shard(model)
    means = []
    with autocast("cpu", dtype=torch.float16):
        for _ in range(6):
            output = model(torch.eye(512)).float().mean()
            output.backward()
            means.append(output.item())
            for param in model.parameters():
                param.grad = None
                with torch.no_grad():
                    param.to_local().add_(1.0)
    return [round(after - before, 1) for before, after in itertools.pairwise(means)]


def late_shards():
    """What is refused: shards made after `initialize`, weights cast by a level, an optimizer older than the shards."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    sharded(model)
    after = refusal(lambda: amp.scale_loss(loss_of(model, batch(0, 0)), optimizer).__enter__())
    amp.reset()
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    level = refusal(lambda: amp.initialize(model, optimizer, opt_level="O2", verbosity=0))
    combined = refusal(
        lambda: amp.initialize(model, optimizer, opt_level="O1", verbosity=0, combine_grad=True, combine_ddp=True)
    )
    amp.reset()
    model = new_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), new_scaler()
    sharded(model)
    scaler.scale(loss_of(model, batch(0, 0))).backward()
    older = refusal(lambda: amp.initialize(model, optimizer, opt_level="O1", verbosity=0))
    step = refusal(lambda: scaler.step(optimizer))
    return {"after": after, "level": level, "combined": combined, "optimizer": step, "older": older}


@pytest.fixture(scope="module")
def found():
    return run_ranks(two_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gloo_averages_right(found, dtype):
    assert [each["averages"][dtype] for each in found] == [(True, True)] * 2


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", *ELEMENTWISE])
def test_weights_are_bitwise_those_of_one_process(found, optimizer):
    assert [each[optimizer] for each in found] == [True, True]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam, fused", "FusedAdam"])
def test_every_rank_skips_when_one_overflows(found, optimizer):
    (weights_0, steps_0), (weights_1, steps_1) = (each["overflow"][optimizer] for each in found)
    assert equal(weights_0, weights_1)
    for steps in (steps_0, steps_1):
        assert [step.stepped for _, step, _ in steps] == [True, False, True, True]
        assert [scale for scale, _, _ in steps] == [1024.0, 512.0, 512.0, 512.0]
    assert steps_1[OVERFLOW_AT][1].first_nonfinite == "param_groups[0]['params'][0]"
    assert steps_0[OVERFLOW_AT][1].first_nonfinite is None
    assert "another rank" in steps_0[OVERFLOW_AT][1].reason


@pytest.mark.parametrize("place", range(3))
def test_clips_by_the_norm_of_all_shards(found, place):
    for each in found:
        (ours, steps), (theirs, norms) = each["clip"][place]
        assert [norm for _, _, norm in steps] == pytest.approx(norms, rel=1e-5)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
    assert found[0]["clip"][place][0][1] == found[1]["clip"][place][0][1]


@pytest.mark.parametrize("name", ["half weights", "half weights in a region"])
def test_same_bits_as_torchs_sharded_scaler(found, name):
    assert [each[name] for each in found] == [(True, True)] * 2


@pytest.mark.parametrize("half", [False, True])
def test_module_rules_are_bitwise_those_of_one_process(found, half):
    gathered = torch.float16 if half else torch.float32
    expected = True, [gathered, torch.float16, torch.float32, torch.float32]
    assert [each["rules", half] for each in found] == [expected] * 2


def test_accumulates_without_communication(found):
    assert max(max(each["accumulated"]) for each in found) < 1e-4


def test_another_scale_before_the_average_is_refused(found):
    for each in found:
        stepped, early, moved = each["another scale"]
        assert stepped == ""
        assert "set_requires_gradient_sync(False)" in early
        assert "loss scale 512.0 after one with 1024.0" in moved


def test_scale_loss_moves_the_scale_of_the_loss_that_overflowed(found):
    assert [each["two losses"] for each in found] == [(False, 1024.0, 512.0)] * 2


def test_O1_skips_on_every_rank(found):
    (weights_0, steps_0), (weights_1, steps_1) = (each["apex"] for each in found)
    assert equal(weights_0, weights_1)
    assert [step.stepped for _, step, _ in steps_0] == [True, False, True, True]
    assert [step.stepped for _, step, _ in steps_1] == [True, False, True, True]
    assert [(scale, norm) for scale, _, norm in steps_0[2:]] == [(scale, norm) for scale, _, norm in steps_1[2:]]
    assert steps_1[OVERFLOW_AT][1].first_nonfinite == "0.weight"


def test_gathered_weights_are_cast_again(found):
    assert [each["in one region"] for each in found] == [[1.0] * 5] * 2


@pytest.mark.parametrize("norm_type", NO_POWERS)
def test_a_norm_that_shards_cannot_have_is_refused(found, norm_type):
    for each in found:
        said, unchanged = each["no powers"][norm_type]
        assert said.startswith(f"norm_type={norm_type}: expected a number > 0")
        assert unchanged


@pytest.mark.parametrize("name", [*WHOLE_TENSORS, "max_grad_norm"])
def test_rules_that_need_whole_tensors_refuse_shards(found, name):
    reason = name if name == "max_grad_norm" else f"{name} (uses the norm of each tensor)"
    assert all(reason in each["refused"][name] and "DTensor" in each["refused"][name] for each in found)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("after", "fully_shard first"),
        ("level", "param_dtype=torch.float16"),
        ("combined", "omit combine_ddp"),
        ("optimizer", "make it after fully_shard"),
        ("older", "Call fully_shard first, then make the optimizer"),
    ],
)
def test_a_wrong_order_is_refused(found, case, says):
    assert all(says in each["late"][case] for each in found)


def four_ranks(rank):
    """Shards of unequal sizes, of which some are empty; then two replicas of two shards each."""
    found = {}
    for name, mesh in (
        ("sharded", None),
        ("replicated", init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))),
    ):
        settings = {} if mesh is None else {"mesh": mesh}
        model = sharded(**settings)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), new_scaler()
        outcomes = []
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(step, rank, 4))).backward()
            if mesh is None:
                put_inf(model, rank, step)
            norm = scaler.unscale_and_clip_(optimizer, 0.01).item()
            scaler.step(optimizer)
            outcomes.append((scaler.last_step.stepped, norm))
            scaler.update()
        empty = sum(param.to_local().numel() == 0 for param in model.parameters())
        found[name] = weights(model), outcomes, empty
    if rank == 0:
        found["alone"] = in_one_process(torch.optim.SGD, clip=(0.01,), world_size=4)
    return found


def test_empty_shards_and_replicas():
    ranks = run_ranks(four_ranks, world_size=4)
    assert max(each["sharded"][2] for each in ranks) > 0
    for each in ranks:
        for name, stepped in (("sharded", [True, False, True, True]), ("replicated", [True] * 4)):
            ours, outcomes, _ = each[name]
            assert equal(ours, ranks[0][name][0])
            assert [step for step, _ in outcomes] == stepped
        theirs, norms = ranks[0]["alone"]
        assert [norm for _, norm in each["replicated"][1]] == pytest.approx(norms, rel=1e-3)
        for one, other in zip(each["replicated"][0], theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def with_a_tool(rank):
    """`xray` where FSDP2 has gathered the parameters of the outermost module: after an evaluation, within a step."""
    results = []
    for place in ("", "after an evaluation", "within a step"):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            inputs = batch(step, rank)
            if step == 1:
                model.eval()
                with torch.no_grad():
                    model(inputs)
                model.train()
            if step == 1 and place == "after an evaluation":
                amplab.xray(model, inputs)
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            if step == 1 and place == "within a step":
                amplab.xray(model, inputs)
            loss.backward()
            optimizer.step()
        results.append(weights(model))
    return results


def test_xray_leaves_what_fsdp2_has_gathered():
    for alone, *others in run_ranks(with_a_tool):
        assert all(equal(alone, other) for other in others)
