"""autocast against torch.autocast: regions, nesting, threads, caches, and what torch's own gets wrong."""

import asyncio
import contextlib
import copy
import pickle
import random
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import amplab
from amplab import amp
from amplab.amp.pytorch.autocast import DEFAULT_POLICY
from amplab.policies import PrecisionPolicy, cpu_half, disable_casts
from amplab.policies.casting import region_engines

X = torch.ones(2, 2)
HALF, BFLOAT16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert dtype() is torch.float32
    assert not amplab.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert amplab.get_autocast_dtype("cpu") is BFLOAT16


def dtype():
    """What a product of float32 matrices comes out as here."""
    return (X @ X).dtype


class Casts(TorchDispatchMode):
    """Counts casts to lower precision."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (HALF, BFLOAT16):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_dtypes_are_those_of_a_gpu():
    with amplab.autocast("cpu", HALF):
        hidden = X @ X
        assert hidden.dtype is HALF
        assert torch.softmax(hidden, 0).dtype is torch.float32
        assert F.layer_norm(hidden, (2,)).dtype is torch.float32
        assert hidden.exp().dtype is torch.float32
    with torch.autocast("cpu", HALF):
        assert torch.softmax(X @ X, 0).dtype is HALF  # torch's lists for the CPU


def test_default_dtypes_are_torchs():
    with amplab.autocast("cpu"):
        assert dtype() is BFLOAT16
    torch.set_autocast_dtype("cpu", HALF)
    try:
        with amplab.autocast("cpu"):
            assert dtype() is HALF
    finally:
        torch.set_autocast_dtype("cpu", BFLOAT16)


@pytest.mark.parametrize("low", [HALF, BFLOAT16])
def test_a_step_is_bitwise_torchs_where_the_lists_agree(low):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x, y = torch.randn(5, 8), torch.randn(5, 4)

    def step(region):
        model.zero_grad()
        with region, cpu_half("native"):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        return [loss.detach(), *(param.grad.clone() for param in model.parameters())]

    for ours, theirs in zip(step(amplab.autocast("cpu", low)), step(torch.autocast("cpu", low)), strict=True):
        assert ours.dtype is theirs.dtype is torch.float32
        assert torch.equal(ours, theirs)


def test_regions_nest_and_the_inner_one_decides():
    with amplab.autocast("cpu", HALF):
        with amplab.autocast("cpu", BFLOAT16):
            assert dtype() is BFLOAT16
            with amplab.autocast("cpu", enabled=False):
                assert dtype() is torch.float32
                with amplab.autocast("cpu"):
                    assert dtype() is BFLOAT16  # the dtype of the region around, as in torch
                assert dtype() is torch.float32
        assert dtype() is HALF


def test_a_disabled_region_casts_nothing_back():
    with amplab.autocast("cpu", BFLOAT16):
        hidden = X @ X
        with amplab.autocast("cpu", enabled=False):
            with pytest.raises(RuntimeError, match="dtype"):
                hidden @ X
            assert (hidden.float() @ X).dtype is torch.float32


def test_a_disabled_region_of_its_own_changes_nothing():
    with amplab.autocast("cpu", enabled=False), amplab.autocast("cpu", HALF, enabled=False):
        assert torch.overrides._get_current_function_mode_stack() == []
        assert amplab.get_autocast_dtype("cpu") is HALF
        with amplab.autocast("cpu"):
            assert dtype() is HALF


def test_a_region_ends_with_an_exception():
    with pytest.raises(ZeroDivisionError), amplab.autocast("cpu"), amplab.autocast("cpu", HALF):
        raise ZeroDivisionError


def test_a_region_shows_what_is_in_force():
    with amplab.autocast("cpu", HALF) as region:
        pass
    assert repr(region) == (
        "autocast('cpu', torch.float16, enabled=True, cache_enabled=True, "
        f"policy='{DEFAULT_POLICY.table.name}/float16')"
    )


def test_leaving_what_was_not_entered_is_refused():
    with pytest.raises(RuntimeError, match="not entered"):
        amplab.autocast("cpu").__exit__(None, None, None)


def test_regions_may_end_in_any_order():
    first, second = amplab.autocast("cpu", HALF), amplab.autocast("cpu", BFLOAT16)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dtype() is BFLOAT16
    second.__exit__(None, None, None)


@pytest.mark.parametrize("number", range(20))
def test_whichever_region_ends_the_last_of_those_that_are_open_casts(number):
    draw, regions, now = random.Random(number), [], []
    for _ in range(40):
        if regions and draw.random() < 0.5:
            region, _ = regions.pop(draw.randrange(len(regions)))
            region.__exit__(None, None, None)
        else:
            cast_to = draw.choice((HALF, BFLOAT16, torch.float32))
            regions.append((amplab.autocast("cpu", cast_to, enabled=cast_to is not torch.float32), cast_to))
            regions[-1][0].__enter__()
        now.append((dtype(), regions[-1][1] if regions else torch.float32))
    for region, _ in regions:
        region.__exit__(None, None, None)
    assert all(found is expected for found, expected in now), now


@pytest.mark.parametrize("block", [lambda: torch.device("meta"), BaseTorchFunctionMode])
@pytest.mark.parametrize("by_stack", [True, False])
def test_a_region_that_a_call_enters_casts_on_after_the_block_around_that_call(block, by_stack):
    region, stack = amplab.autocast("cpu", HALF), contextlib.ExitStack()
    with block():
        if by_stack:
            stack.enter_context(region)
        else:
            region.__enter__()
            stack.push(region.__exit__)
    assert dtype() is HALF
    assert torch.ones(()).device.type == "cpu"
    stack.close()
    assert _get_current_function_mode_stack() == []


def test_the_regions_of_two_coroutines_overlap():
    async def cast(seconds):
        with amplab.autocast("cpu", HALF):
            before = dtype()
            await asyncio.sleep(seconds)
            return before, dtype()

    async def both():
        return await asyncio.gather(cast(0.01), cast(0.05))

    assert asyncio.run(both()) == [(HALF, HALF), (HALF, HALF)]


def test_queries_answer_and_torchs_flags_stay():
    with amplab.autocast("cpu", HALF):
        assert amplab.is_autocast_enabled("cpu")
        assert amplab.is_autocast_enabled("cpu:0")
        assert not amplab.is_autocast_enabled()
        assert not amplab.is_autocast_enabled("cuda")
        assert amplab.get_autocast_dtype("cpu") is HALF
        assert amplab.get_autocast_dtype("cuda") is torch.get_autocast_dtype("cuda")
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is BFLOAT16
        with disable_casts():
            assert not amplab.is_autocast_enabled("cpu")
        with amplab.autocast("cpu", BFLOAT16, enabled=False):
            assert not amplab.is_autocast_enabled("cpu")
            assert amplab.get_autocast_dtype("cpu") is BFLOAT16


@pytest.mark.parametrize("ask", [amplab.is_autocast_enabled, amplab.get_autocast_dtype])
def test_queries_refuse_as_torch_does(ask):
    with pytest.raises(ValueError, match="of type `str`"):
        ask(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="bogus"):
        ask("bogus")


def test_initialize_at_o1_is_answered_for_and_disabled():
    model = torch.nn.Linear(2, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert amplab.is_autocast_enabled("cpu")
    assert amplab.get_autocast_dtype("cpu") is HALF
    with amplab.autocast("cpu", enabled=False):
        assert dtype() is torch.float32
        with amplab.autocast("cpu"):
            assert dtype() is HALF
    amp.reset()


def test_only_tensors_on_the_device_are_cast():
    meta = torch.ones(2, 2, device="meta")
    with amplab.autocast("cpu", HALF):
        assert (meta @ meta).dtype is torch.float32
        assert dtype() is HALF
    with torch.autocast("cpu", HALF):
        assert (meta @ meta).dtype is torch.float32


def test_a_policy_is_carried_out_and_handed_to_regions_inside():
    nothing = PrecisionPolicy(None, HALF)
    with amplab.autocast("cpu", policy=nothing) as outer:
        assert outer.policy is nothing
        assert dtype() is torch.float32
        assert not amplab.is_autocast_enabled("cpu")
        with amplab.autocast("cpu", BFLOAT16) as inner:
            assert dtype() is torch.float32
            assert inner.policy == PrecisionPolicy(None, BFLOAT16)
        with amplab.autocast("cpu", policy=PrecisionPolicy(compute_dtype=HALF)):
            assert dtype() is HALF


def test_half_products_follow_cpu_half():
    wide = torch.full((1, 4096), 1.0)
    with amplab.autocast("cpu", HALF), cpu_half("fp32_accumulate"):
        assert (wide @ wide.T).item() == 4096.0


# -- the cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache_enabled", "casts"), [(True, 1), (False, 3), (None, 1)])
def test_a_weight_is_cast_once_where_the_cache_is_on(cache_enabled, casts):
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), X.bfloat16()
    with amplab.autocast("cpu", cache_enabled=cache_enabled), Casts() as ours:
        results = [x @ weight for _ in range(3)]
    with torch.autocast("cpu", cache_enabled=cache_enabled), Casts() as theirs:
        for _ in range(3):
            _ = x @ weight
    assert ours.count == casts
    if cache_enabled is not False:
        assert theirs.count == casts
    sum(results).sum().backward()
    assert weight.grad.dtype is torch.float32


def test_the_cache_flag_is_that_of_the_region_around():
    with amplab.autocast("cpu", cache_enabled=False):
        assert not amplab.autocast("cpu").cache_enabled
        assert amplab.autocast("cpu", cache_enabled=True).cache_enabled
    assert amplab.autocast("cpu").cache_enabled


def test_the_cache_ends_with_the_outermost_region():
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), X.bfloat16()
    with Casts() as casts:
        for _ in range(2):
            with amplab.autocast("cpu"):
                _ = x @ weight
                with amplab.autocast("cpu"):
                    _ = x @ weight
                _ = x @ weight
    assert casts.count == 2


# -- what torch's own gets wrong -------------------------------------------------------------------


def nested_dtypes(autocast):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with autocast("cpu", HALF):
        _ = F.linear(X, weight)
        with autocast("cpu", BFLOAT16):
            return F.linear(X, weight).dtype


def test_the_cache_tells_dtypes_apart():
    with pytest.raises(RuntimeError, match="same dtype"):
        nested_dtypes(torch.autocast)
    assert nested_dtypes(amplab.autocast) is BFLOAT16


def left_after_reentry(region):
    with region, region:
        pass
    return dtype()


def test_one_instance_may_be_entered_twice():
    assert left_after_reentry(torch.autocast("cpu")) is BFLOAT16
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    region = amplab.autocast("cpu")
    assert left_after_reentry(region) is torch.float32

    @region
    def countdown(n):
        return dtype() if n == 0 else countdown(n - 1)

    assert countdown(3) is BFLOAT16
    assert dtype() is torch.float32


def before_and_after_an_edit(autocast):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with autocast("cpu"):
        before = F.linear(X, weight)[0, 0].item()
        with torch.no_grad():
            weight.mul_(2)
        return before, F.linear(X, weight)[0, 0].item()


def test_an_edited_weight_is_cast_again():
    assert before_and_after_an_edit(torch.autocast) == (2.0, 2.0)
    assert before_and_after_an_edit(amplab.autocast) == (2.0, 4.0)


def test_an_average_of_weights_that_is_written_inside_the_region_is_seen():
    model = torch.nn.Linear(2, 2, bias=False)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    with amplab.autocast("cpu"):
        for _ in range(3):
            with torch.no_grad():
                model.weight.add_(1)
            average.update_parameters(model)
            assert torch.equal(average(X), F.linear(X.bfloat16(), average.module.weight.bfloat16()))


# -- threads, copies, compile ----------------------------------------------------------------------


def test_another_thread_is_not_in_the_region():
    seen = []
    with amplab.autocast("cpu"):
        thread = threading.Thread(target=lambda: seen.extend([dtype(), amplab.is_autocast_enabled("cpu")]))
        thread.start()
        thread.join()
    assert seen == [torch.float32, False]


def region_in_block(region):
    with region:
        yield dtype()


def region_in_stack(region):
    with contextlib.ExitStack() as stack:
        stack.enter_context(region)
        yield dtype()


@pytest.mark.parametrize(
    ("suspended", "is_inside"), [(region_in_block, False), (region_in_block, True), (region_in_stack, False)]
)
@pytest.mark.parametrize("end", [lambda it: it.close(), lambda it: next(it, None)], ids=["closed", "resumed"])
def test_a_generator_may_end_in_another_thread(suspended, is_inside, end):
    """Its region ends in its own thread, and not that of the other thread, of the same instance."""
    region, seen = amplab.autocast("cpu", BFLOAT16), []
    generator = suspended(region)
    assert next(generator) is BFLOAT16

    def work():
        with region if is_inside else contextlib.nullcontext():
            end(generator)
            seen.append(dtype())
        seen.append(dtype())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [BFLOAT16 if is_inside else torch.float32, torch.float32]
    assert dtype() is torch.float32  # also without a call of amplab before it


def test_one_instance_in_many_threads():
    region, barrier, failures = amplab.autocast("cpu", HALF), threading.Barrier(4), []

    def work():
        try:
            for _ in range(20):
                barrier.wait(10)
                with region, region:
                    assert dtype() is HALF
                assert dtype() is torch.float32
        except (AssertionError, threading.BrokenBarrierError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_copies_and_pickles():
    region = amplab.autocast("cpu", HALF, cache_enabled=False)
    for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert repr(again) == repr(region)
        with again:
            assert dtype() is HALF


@pytest.mark.parametrize("made", ["inside", "decorated"])
def test_torch_compile_traces_a_region_without_graph_breaks(made, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(region_engines, "_KEPT", region_engines._Kept())  # as in a process that has entered no region
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))

    def inside(x):
        with amplab.autocast("cpu", HALF):
            with amplab.autocast("cpu", enabled=False):
                x = x @ x
            return model(x)

    @amplab.autocast("cpu", HALF)
    def decorated(x):
        with amplab.autocast("cpu", enabled=False):
            x = x @ x
        return model(x)

    function, x = {"inside": inside, "decorated": decorated}[made], torch.randn(4, 4)
    compiled = torch.compile(function, fullgraph=True, backend="eager")(x)
    assert compiled.dtype is HALF
    assert torch.equal(compiled, function(x))
    compiled.float().sum().backward()
    assert model[0].weight.grad.dtype is torch.float32


def test_torch_compile_of_a_model_inside_a_region():
    torch._dynamo.reset()
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)), torch.randn(3, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with amplab.autocast("cpu", HALF):
        assert torch.equal(compiled(x), model(x))
    with amplab.autocast("cpu", BFLOAT16):
        assert torch.equal(compiled(x), model(x))
    assert torch.equal(compiled(x), model(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_regions_of_two_devices_are_independent():
    on_gpu = X.cuda()
    with amplab.autocast("cuda", HALF):
        assert (on_gpu @ on_gpu).dtype is HALF
        assert dtype() is torch.float32
        with amplab.autocast("cpu", BFLOAT16):
            assert (on_gpu @ on_gpu).dtype is HALF
            assert dtype() is BFLOAT16
            with amplab.autocast("cuda", enabled=False):
                assert (on_gpu @ on_gpu).dtype is torch.float32
                assert dtype() is BFLOAT16
