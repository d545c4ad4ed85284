"""Where an engine casts and where it does not: blocks, installation, other modes, threads, errors, compile."""

import copy
import pickle
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from amplab.policies import (
    CastingEngine,
    PrecisionPolicy,
    casting_engine,
    casts_enabled,
    disable_casts,
    explaining,
    thread_engines,
)

X = torch.ones(2, 2)
BFLOAT16 = PrecisionPolicy(compute_dtype=torch.bfloat16)


class Passing(TorchFunctionMode):
    """Another mode, which does nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def stack_is_left_as_found():
    before = _get_current_function_mode_stack()
    yield
    assert _get_current_function_mode_stack() == before
    assert dtype() is torch.float32
    assert casts_enabled()


@pytest.fixture
def engine():
    engine = CastingEngine()
    yield engine
    engine.uninstall()


def dtype():
    """What a product of float32 matrices comes out as here: float32 where nothing casts."""
    return (X @ X).dtype


def test_active_is_reentrant(engine):
    with engine.active():
        with engine.active():
            assert dtype() is torch.float16
            assert len(_get_current_function_mode_stack()) == 1
        assert dtype() is torch.float16
    assert dtype() is torch.float32


def test_active_ends_with_an_exception(engine):
    with pytest.raises(ZeroDivisionError), engine.active(), engine.active():
        raise ZeroDivisionError
    assert dtype() is torch.float32
    with pytest.raises(RuntimeError), engine.active():
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_active_decorates(engine):
    assert engine.active()(dtype)() is torch.float16


def test_the_inner_engine_casts(engine):
    other = CastingEngine(BFLOAT16)
    with engine.active():
        with other.active():
            assert dtype() is torch.bfloat16
            with engine.active():
                assert dtype() is torch.float16
            assert dtype() is torch.bfloat16
        assert dtype() is torch.float16


def test_thread_engines_end_with_the_one_that_casts(engine):
    other = CastingEngine(BFLOAT16)
    assert thread_engines() == ()
    with other.active():
        engine.install()
        assert thread_engines() == (engine, other)
    assert thread_engines() == (engine,)


def test_install_and_uninstall_are_repeatable(engine):
    for _ in range(2):
        engine.install()
        assert engine.installed
        assert dtype() is torch.float16
    engine.uninstall()
    engine.uninstall()
    assert not engine.installed
    assert dtype() is torch.float32


def test_an_active_block_is_over_an_installed_engine_whenever_that_came(engine):
    other = CastingEngine(BFLOAT16)
    with other.active():
        engine.install()
        assert dtype() is torch.bfloat16
    assert dtype() is torch.float16
    with other.active():
        engine.uninstall()
        assert dtype() is torch.bfloat16
    assert dtype() is torch.float32


def test_the_last_of_two_installed_engines_casts(engine):
    other = CastingEngine(BFLOAT16)
    engine.install()
    other.install()
    assert dtype() is torch.bfloat16
    other.uninstall()
    assert dtype() is torch.float16


@pytest.mark.parametrize("make", [Passing, lambda: torch.device("cpu")], ids=["mode", "device"])
def test_install_inside_another_block(engine, make):
    with make():
        engine.install()
        assert dtype() is torch.float16
    assert dtype() is torch.float16
    with make():
        assert dtype() is torch.float16
        engine.uninstall()
        assert dtype() is torch.float32
    assert _get_current_function_mode_stack() == []


def test_a_device_block_and_an_installed_engine_close_in_any_order(engine):
    with torch.device("meta"):
        engine.install()
        with torch.device("cpu"):
            engine.uninstall()
            engine.install()
        assert torch.ones(2).device.type == "meta"
    assert dtype() is torch.float16


def test_install_stays_above_the_default_device_and_below_the_rest(engine):
    torch.set_default_device("meta")
    try:
        with Passing() as passing:
            engine.install()
            below, ours, above = _get_current_function_mode_stack()
            assert isinstance(below, DeviceContext)
            assert above is passing
        assert torch.ones(2).device.type == "meta"
        assert dtype() is torch.float16
    finally:
        torch.set_default_device(None)
    assert _get_current_function_mode_stack() == [ours]
    assert dtype() is torch.float16
    assert torch.ones(2).device.type == "cpu"


def test_the_default_device_may_change_inside_a_block(engine):
    with engine.active():
        torch.set_default_device("meta")
        try:
            assert torch.ones(2).device.type == "meta"
            assert dtype() is torch.float16
        finally:
            torch.set_default_device(None)
        assert dtype() is torch.float16


def test_a_device_block_around_active(engine):
    with torch.device("cpu"), engine.active(), torch.device("meta"), engine.active():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16


def test_disable_casts_nests_and_ends_with_an_exception(engine):
    with engine.active():
        with disable_casts():
            with disable_casts():
                assert dtype() is torch.float32
            assert not casts_enabled()
            assert dtype() is torch.float32
            with engine.active(), CastingEngine(BFLOAT16).active():
                assert dtype() is torch.float32
        assert casts_enabled()
        assert dtype() is torch.float16
        with pytest.raises(ZeroDivisionError), disable_casts():
            raise ZeroDivisionError
        assert dtype() is torch.float16
        assert disable_casts()(dtype)() is torch.float32


def test_disable_casts_without_an_engine_does_nothing():
    with disable_casts():
        assert dtype() is torch.float32


def test_a_policy_without_table_casts_nothing():
    with CastingEngine(PrecisionPolicy(table=None)).active():
        assert dtype() is torch.float32
        assert F.softmax(X.half(), 0).dtype is torch.float16
        assert F.binary_cross_entropy(X.half(), X.half()).dtype is torch.float16


def test_threads_cast_for_themselves(engine):
    inside, checked = threading.Event(), threading.Event()
    seen = {}

    def cast_here():
        with engine.active():
            seen["there"] = dtype()
            inside.set()
            checked.wait(10)
            with disable_casts():
                seen["disabled there"] = dtype()

    thread = threading.Thread(target=cast_here)
    thread.start()
    assert inside.wait(10)
    assert dtype() is torch.float32
    with CastingEngine(BFLOAT16).active():
        assert dtype() is torch.bfloat16
        checked.set()
        thread.join()
        assert casts_enabled()
        assert dtype() is torch.bfloat16
    assert seen == {"there": torch.float16, "disabled there": torch.float32}
    assert not engine.installed


def test_many_threads_share_one_engine(engine):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(5, 8)
    with engine.active():
        expected = model(x)
    failures = []

    def work():
        try:
            for _ in range(30):
                with engine.active():
                    assert torch.equal(model(x), expected)
        except (AssertionError, RuntimeError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_installed_in_one_thread_is_not_installed_in_another(engine):
    engine.install()
    seen = []
    thread = threading.Thread(target=lambda: (seen.append(engine.installed), engine.uninstall()))
    thread.start()
    thread.join()
    assert seen == [False]
    assert engine.installed


def test_blocks_of_two_engines_end_in_any_order(engine):
    other, weight = CastingEngine(BFLOAT16), torch.nn.Parameter(torch.ones(2, 2))
    scope, inner = engine.active(), other.active()
    scope.__enter__()
    _ = X @ weight
    inner.__enter__()
    scope.leave()
    assert engine.cache_size == 0
    assert dtype() is torch.bfloat16
    _ = X @ weight
    inner.leave()
    assert other.cache_size == 0


def test_an_engine_may_cast_for_one_type_of_device():
    meta = torch.ones(2, 2, device="meta")
    ours, theirs = CastingEngine(device_type="cpu"), CastingEngine(BFLOAT16, device_type="meta")
    with ours.active():
        assert dtype() is torch.float16
        assert (meta @ meta).dtype is torch.float32
        assert casting_engine("meta") is None
        with theirs.active():
            assert dtype() is torch.float16
            assert (meta @ meta).dtype is torch.bfloat16
            assert torch.stack([meta.half(), meta]).dtype is torch.float32
            assert F.linear(input=meta, weight=meta).dtype is torch.bfloat16
            assert (casting_engine("cpu"), casting_engine("meta")) == (ours, theirs)
            with explaining():
                assert dtype() is torch.float16
                assert (meta @ meta).dtype is torch.bfloat16
                assert torch.relu(meta).dtype is torch.float32


def test_one_engine_for_all_devices_and_one_for_its_own(engine):
    meta = torch.ones(2, 2, device="meta")
    with CastingEngine(BFLOAT16, device_type="meta").active():
        assert casting_engine("cpu") is None
        with engine.active():
            assert casting_engine("cpu") is casting_engine("meta") is engine
            assert (meta @ meta).dtype is torch.float16
    with engine.active(), CastingEngine(BFLOAT16, device_type="cpu").active():
        assert dtype() is torch.bfloat16


def test_without_a_cache_every_use_is_a_cast():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    engine = CastingEngine(BFLOAT16, cache_enabled=False)
    with engine.active():
        product = (X @ weight) @ weight
        assert engine.cache_size == 0
    product.sum().backward()
    assert weight.grad.dtype is torch.float32
    again = pickle.loads(pickle.dumps(CastingEngine(BFLOAT16, device_type="cpu", cache_enabled=False)))
    assert (again.device_type, again.cache_enabled) == ("cpu", False)


def test_copies_and_pickles(engine):
    assert copy.deepcopy(engine) is engine
    again = pickle.loads(pickle.dumps(CastingEngine(BFLOAT16)))
    assert again.policy == BFLOAT16
    assert repr(again) == "CastingEngine('apex/bfloat16')"


class Small(torch.nn.Module):
    """Linear, norm, attention and loss, in one."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.norm(F.gelu(self.linear(x)) + x)
        x, _ = self.attention(x, x, x)
        return 1 / (x**2).mean().exp()


def test_torch_compile_traces_without_graph_breaks(engine):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 3, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with engine.active():
        eager, traced = model(x), compiled(x)
        assert torch.equal(eager, traced)
        traced.backward()
    assert not torch.equal(compiled(x), traced)


@pytest.mark.parametrize("table", ["torch_cuda", "torch_cpu"])
def test_torch_compile_traces_torchs_own_lists(table):
    torch._dynamo.reset()
    lists = CastingEngine(PrecisionPolicy(table, torch.bfloat16))

    def inside(x):
        with lists.active():
            y = x @ x
            return y, torch.softmax(input=y, dim=0), y.sum(0), F.normalize(y), torch.addcmul(y, x, x), 1 / y

    for eager, traced in zip(inside(X), torch.compile(inside, fullgraph=True, backend="eager")(X), strict=True):
        assert eager.dtype is traced.dtype
        assert torch.equal(eager, traced)


def test_torch_compile_traces_a_block_inside(engine):
    torch._dynamo.reset()

    def inside(x):
        with engine.active():
            return x @ x

    assert torch.compile(inside, fullgraph=True, backend="eager")(X).dtype is torch.float16


@pytest.mark.parametrize(
    ("policy", "remedy"), [("apex", "PrecisionPolicy('apex')"), (PrecisionPolicy, "PrecisionPolicy()")]
)
def test_what_is_no_policy_is_refused(policy, remedy):
    with pytest.raises(TypeError) as refusal:
        CastingEngine(policy)
    assert str(refusal.value) == f"policy={policy!r}: expected a PrecisionPolicy, or None for apex's; pass {remedy}."
