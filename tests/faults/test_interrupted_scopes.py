"""An interrupt at any point of a block that casts: the next op is not cast, before any call of amplab and after one."""

import asyncio
import contextlib
from contextlib import contextmanager

import pytest
import torch
from interrupts import PACKAGE, interrupted, interrupted_everywhere
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import amplab
from amplab import amp
from amplab.policies import (
    CastingEngine,
    CompiledEngine,
    PrecisionPolicy,
    apply_policy,
    casting_state,
    casts_enabled,
    cpu_half,
    cpu_half_mode,
    disable_casts,
    explaining,
    thread_engines,
)
from amplab.policies.casting.function_modes import CastingMode
from amplab.policies.casting.plan import torch_nesting
from amplab.policies.casting.thread_scopes import AUTOCAST_FLAG

# Python swallows what a finalizer raises.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

X = torch.ones(2, 2)
ENGINE = CastingEngine()
BFLOAT16 = CastingEngine(PrecisionPolicy(compute_dtype=torch.bfloat16))
REGION = amplab.autocast("cpu", torch.float16)


def product():
    return (X @ X).dtype


def engine():
    with ENGINE.active():
        X @ X


def region():
    with amplab.autocast("cpu", torch.float16):
        X @ X


def region_that_is_entered_twice():
    with REGION, REGION:
        X @ X


def disabled_region():
    with amplab.autocast("cpu", torch.float16), amplab.autocast("cpu", enabled=False):
        X @ X


def disabled_casts():
    with ENGINE.active(), disable_casts():
        X @ X


def switches():
    with cpu_half("native"), explaining(), ENGINE.active():
        X @ X


def another_state():
    with ENGINE.active():
        state = casting_state()
    with BFLOAT16.active(), state.active():
        X @ X


@amplab.autocast("cpu", torch.float16)
def decorated():
    X @ X


@amplab.autocast("cpu", torch.float16)
def decorated_generator():
    yield X @ X
    yield X @ X


def generator():
    for _ in decorated_generator():
        X @ X


@contextmanager
def casting():
    with ENGINE.active():
        yield


def context_manager():
    with casting():
        X @ X


def returned_from_a_loop():
    for round_ in range(2):
        with ENGINE.active():
            try:
                X @ X
            except ValueError:
                continue
            if round_:
                return


def goes_on():
    """The function with the block goes on after an interrupt in it: its frame does not end."""
    try:
        with amplab.autocast("cpu", torch.float16):
            X @ X
    except KeyboardInterrupt:
        assert product() is torch.float32
    assert product() is torch.float32


def same_block_again():
    for _ in range(2):
        try:
            with amplab.autocast("cpu", torch.float16):
                assert product() is torch.float16
        except KeyboardInterrupt:
            continue
        assert product() is torch.float32


@amplab.autocast("cpu", torch.float16)
def decorated_region():
    with amplab.autocast("cpu", torch.bfloat16):
        yield X @ X
        yield X @ X


def generator_with_a_region():
    for _ in decorated_region():
        X @ X


BLOCKS = (
    engine,
    region,
    region_that_is_entered_twice,
    disabled_region,
    disabled_casts,
    switches,
    another_state,
    decorated,
    generator,
    generator_with_a_region,
    context_manager,
    returned_from_a_loop,
    goes_on,
    same_block_again,
)


def assert_nothing_is_on(interrupt, half_mode):
    assert product() is torch.float32, interrupt
    assert thread_engines() == (), interrupt
    assert casts_enabled(), interrupt
    assert cpu_half_mode() == half_mode, interrupt
    assert not amplab.is_autocast_enabled("cpu"), interrupt
    assert amplab.get_autocast_dtype("cpu") is torch.bfloat16, interrupt
    assert _get_current_function_mode_stack() == [], interrupt
    assert not torch.is_autocast_enabled(AUTOCAST_FLAG), interrupt
    assert torch_nesting() == "0", interrupt


@pytest.mark.parametrize("block", BLOCKS)
def test_the_next_op_after_an_interrupt_at_any_point_is_not_cast(block):
    half_mode = cpu_half_mode()
    block()
    for interrupt in interrupted_everywhere(block):
        assert_nothing_is_on(interrupt, half_mode)


def test_a_region_around_an_interrupted_one_casts_on():
    with amplab.autocast("cpu", torch.bfloat16):
        for interrupt in interrupted_everywhere(region):
            assert product() is torch.bfloat16, interrupt
            assert amplab.get_autocast_dtype("cpu") is torch.bfloat16, interrupt
    assert product() is torch.float32


def test_an_interrupt_while_a_weight_is_cast_does_not_turn_casts_on_when_its_traceback_is_freed():
    weight, half_mode = torch.nn.Parameter(X.clone()), cpu_half_mode()

    def step():
        with amplab.autocast("cpu", torch.float16):
            X @ weight

    everywhere = [PACKAGE, torch.autograd.grad_mode.__file__]
    for interrupt in interrupted_everywhere(step, folders=everywhere, functions=["_make", "__enter__", "__exit__"]):
        assert_nothing_is_on(interrupt, half_mode)


def test_disabled_casts_of_an_installed_engine_end_with_their_block():
    ENGINE.install()
    try:
        for interrupt in interrupted_everywhere(disabled_casts):
            assert product() is torch.float16, interrupt
    finally:
        ENGINE.uninstall()


@pytest.mark.parametrize("call", [ENGINE.install, ENGINE.uninstall])
def test_an_engine_is_installed_after_an_interrupted_call(call):
    try:
        for at in range(1, 1000):
            ENGINE.uninstall() if call == ENGINE.install else ENGINE.install()
            interrupt = interrupted(call, at)
            ENGINE.install()
            assert product() == torch.float16, interrupt
            ENGINE.uninstall()
            assert product() == torch.float32, interrupt
            if interrupt is None:
                return
        pytest.fail("the call has no end")
    finally:
        ENGINE.uninstall()


TORCH = contextlib.__file__, torch.overrides.__file__
"""The files that handle a function written in Python: they take the modes off the stack and put them back."""


@pytest.mark.parametrize("function", [F.dropout, F.log_softmax])
def test_an_installed_engine_casts_on_after_an_interrupt_while_torch_has_its_mode(function):
    def step():
        function(X, 1)

    ENGINE.install()
    try:
        modes, number = _get_current_function_mode_stack(), 0
        for interrupt in interrupted_everywhere(step, folders=TORCH):
            for _ in range(2):  # the second time after the suspended generators of torch have ended
                assert thread_engines() == (ENGINE,), interrupt
                assert _get_current_function_mode_stack() == modes, interrupt
                assert product() is torch.float16, interrupt
            number += 1
        assert number > 10
    finally:
        ENGINE.uninstall()
    assert _get_current_function_mode_stack() == []


def test_an_interrupt_in_an_op_of_a_composite_stays_a_keyboard_interrupt():
    attention = torch.nn.MultiheadAttention(2, 1)

    def step():
        with ENGINE.active():
            attention(X[None], X[None], X[None])

    step()
    for interrupt in interrupted_everywhere(step, folders=TORCH):
        assert interrupt.escaped, interrupt
        assert_nothing_is_on(interrupt, cpu_half_mode())


def test_a_region_of_torch_that_is_left_reports_to_a_mode_that_is_off_already():
    """In an interrupted step the report to an inner mode may end the scope of an outer one, which comes next."""
    with ENGINE.active(), BFLOAT16.active():
        modes = _get_current_function_mode_stack()
    for mode in modes:
        assert mode.__torch_function__(torch.amp.autocast_mode._exit_autocast, [], ()) is None


def test_the_next_call_after_an_interrupt_of_a_compiled_engine_ends_it():
    """The engine in C++ looks at no Python frame, so it is the next call of amplab that finds what has ended."""
    half_mode, compiled = cpu_half_mode(), CompiledEngine()

    def block():
        with compiled.active(), disable_casts(), ENGINE.active():
            X @ X
        with ENGINE.active(), compiled.active():
            X @ X

    block()
    for interrupt in interrupted_everywhere(block):
        assert thread_engines() == (), interrupt
        assert_nothing_is_on(interrupt, half_mode)


class Passing(TorchFunctionMode):
    """A mode of a user that changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Interrupted(torch.nn.Module):
    """A model whose forward an interrupt ends: torch then runs no hook."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        self.linear(x if isinstance(x, torch.Tensor) else next(x))
        raise KeyboardInterrupt


def at_level(level):
    model = Interrupted()
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)[0]


def under_policy(**rules):
    model = Interrupted()
    apply_policy(PrecisionPolicy(module_rules=rules), model)
    return model


MODELS = {
    "O2": lambda: at_level("O2"),
    "O3": lambda: at_level("O3"),
    "policy": under_policy,
    "rule": lambda: under_policy(linear="float32"),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_mode_of_the_user_ends_with_its_block_after_an_interrupted_forward(make):
    model = make()
    try:
        with Passing() as mode, pytest.raises(KeyboardInterrupt):
            model(X)
        assert mode not in _get_current_function_mode_stack()
        assert product() is torch.float32
        assert thread_engines() == ()
        assert _get_current_function_mode_stack() == []
    finally:
        amp.reset()


def batches():
    with amplab.autocast("cpu", torch.bfloat16):
        while True:
            yield X @ X


@pytest.mark.parametrize("reads", ["model", "caller"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_region_of_a_generator_ends_with_the_forward_that_an_interrupt_ends(make, reads):
    """Nothing keeps the variables of the functions that the interrupt has ended, with the generator among them."""
    model = make()

    def train():
        given = batches()
        model(given if reads == "model" else next(given).float())

    try:
        with pytest.raises(KeyboardInterrupt):
            train()
        assert product() is torch.float32
        assert thread_engines() == ()
        assert _get_current_function_mode_stack() == []
    finally:
        amp.reset()


class InBfloat16(torch.nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x


@pytest.mark.parametrize("op_first", [False, True])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_regions_of_torch_are_exported_after_an_interrupted_forward(make, op_first):
    """torch.autocast reports a region to one function mode alone, which must not be that of the interrupted call."""
    model = make()
    try:
        with pytest.raises(KeyboardInterrupt):
            model(X)
        if op_first:
            X @ X
        exported = torch.export.export(InBfloat16(), (X,), strict=False)
        assert not any(isinstance(mode, CastingMode) for mode in _get_current_function_mode_stack())
    finally:
        amp.reset()
    assert exported.module()(X).dtype is torch.bfloat16


class WithoutGradients(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        with torch.no_grad():
            x = x * 2
        return self.linear(x)


@pytest.mark.parametrize("block", [torch.no_grad, torch.enable_grad, lambda: torch.set_grad_enabled(False)])
@pytest.mark.parametrize("first", [lambda: None, thread_engines, lambda: X + 1])
def test_a_block_after_an_interrupted_forward_does_not_put_its_grad_mode_back(block, first):
    """The first block reads grad mode before amplab can restore it."""
    model = WithoutGradients()
    apply_policy(PrecisionPolicy(), model)
    files, left_off = [torch.autograd.grad_mode.__file__], 0
    for interrupt in interrupted_everywhere(lambda: model(X), folders=files, functions=["__exit__", "__init__"]):
        left_off += not torch.is_grad_enabled()
        first()
        with block():
            pass
        assert torch.is_grad_enabled(), interrupt
        assert thread_engines() == ()
    assert left_off > 2


def without_gradients():
    with torch.no_grad():
        pass


def points_that_leave_gradients_off(folder):
    off = []
    for interrupt in interrupted_everywhere(without_gradients, folders=[folder]):
        off += [] if torch.is_grad_enabled() else [interrupt.where]
        torch.set_grad_enabled(True)
    return off


def test_an_installed_engine_ends_a_block_without_gradients_before_it_raises():
    """CPython can raise where a handler begins, before it can catch anything. Any function mode has this point."""
    begins = CastingMode.__torch_function__.__code__.co_firstlineno
    ENGINE.install()
    try:
        off = points_that_leave_gradients_off(PACKAGE)
    finally:
        ENGINE.uninstall()
    assert off == [f"function_modes.py:{begins}, CastingMode.__torch_function__"]
    with Passing():
        assert len([each for each in points_that_leave_gradients_off(__file__) if "Passing" in each]) > 1


@pytest.mark.parametrize("other", [lambda: torch.device("meta"), Passing])
def test_a_region_and_a_mode_of_another_task_end_in_any_order(other):
    async def in_block(block, begin, end):
        await asyncio.sleep(begin)
        with block:
            await asyncio.sleep(end - begin)

    async def both(first, second):
        await asyncio.gather(in_block(first, 0.0, 0.02), in_block(second, 0.01, 0.03))

    asyncio.run(both(other(), amplab.autocast("cpu", torch.float16)))
    assert _get_current_function_mode_stack() == []
    asyncio.run(both(amplab.autocast("cpu", torch.float16), other()))
    assert _get_current_function_mode_stack() == []
    assert product() is torch.float32


def test_reset_removes_the_mode_of_a_region_that_was_interrupted():
    """Also where `initialize` was never called, as in a loop of GradScaler."""

    region()  # makes the lists
    for interrupt in interrupted_everywhere(region):
        amp.reset()
        assert _get_current_function_mode_stack() == [], interrupt


def test_reset_removes_the_mode_of_a_region_whose_exit_has_not_begun():
    assert interrupted(region, 1, functions=["__exit__"]) is not None
    amp.reset()
    assert _get_current_function_mode_stack() == []


def test_a_block_of_a_device_around_an_interrupted_region_ends():
    """It pops the topmost mode, which must not be that of the region."""

    def on_meta():
        with torch.device("meta"):
            region()

    on_meta()  # makes the lists
    for interrupt in interrupted_everywhere(on_meta):
        assert torch.ones(()).device.type == "cpu", interrupt
        assert product() is torch.float32, interrupt
    amp.reset()
    assert _get_current_function_mode_stack() == []
