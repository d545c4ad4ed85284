"""CastingState: what cast when it was taken casts again, and nothing else does."""

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from amplab.kernels.builder.recipe import obstacle
from amplab.policies import (
    CastingEngine,
    CompiledEngine,
    PrecisionPolicy,
    casting_state,
    casts_enabled,
    cpu_half,
    cpu_half_mode,
    disable_casts,
    thread_engines,
)

X = torch.ones(2, 2)
BFLOAT16 = PrecisionPolicy(compute_dtype=torch.bfloat16)


@pytest.fixture
def engine():
    engine = CastingEngine()
    yield engine
    engine.uninstall()
    assert _get_current_function_mode_stack() == []
    assert thread_engines() == ()
    assert dtype() is torch.float32


def dtype():
    return (X @ X).dtype


def test_it_casts_again_after_the_block(engine):
    with engine.active():
        state = casting_state()
    for _ in range(2):
        with state.active():
            assert dtype() is torch.float16
            assert thread_engines() == (engine,)


@pytest.mark.parametrize("installed", [False, True])
def test_it_casts_alone(engine, installed):
    nothing = casting_state()
    if installed:
        engine.install()
    with CastingEngine(BFLOAT16).active():
        here = casting_state()
        with nothing.active():
            assert dtype() is torch.float32
            with here.active():
                assert dtype() is torch.bfloat16
            assert thread_engines() == ()
        assert dtype() is torch.bfloat16
    assert dtype() is (torch.float16 if installed else torch.float32)


def test_switches_are_part_of_it(engine):
    with engine.active(), disable_casts(), cpu_half("native"):
        state = casting_state()
    with cpu_half("fp32_accumulate"):
        with state.active():
            assert not casts_enabled()
            assert cpu_half_mode() == "native"
            assert dtype() is torch.float32
        assert casts_enabled()
        assert cpu_half_mode() == "fp32_accumulate"
    enabled = casting_state()
    with engine.active(), disable_casts():
        with enabled.active(), engine.active():
            assert dtype() is torch.float16
        assert dtype() is torch.float32


def test_it_ends_with_an_exception_and_clears_its_casts(engine):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with engine.active():
        state = casting_state()

    @state.active()
    def fail():
        _ = X @ weight
        assert engine.cache_size == 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert engine.cache_size == 0


def test_casts_that_a_block_around_keeps_are_kept(engine):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with engine.active():
        _ = X @ weight
        with casting_state().active():
            _ = X @ weight
        assert engine.cache_size == 1
    engine.install()
    _ = X @ weight
    with casting_state().active():
        _ = X @ weight
    assert engine.cache_size == 1


@pytest.mark.skipif(obstacle() is not None, reason="nothing can be built here")
def test_the_compiled_engine_casts_again_and_rests(engine):
    compiled, nothing = CompiledEngine(BFLOAT16), casting_state()
    with compiled.active():
        state = casting_state()
        assert state.engines == (compiled,)
        with nothing.active():
            assert dtype() is torch.float32
        assert dtype() is torch.bfloat16
    with engine.active():
        with state.active():
            assert dtype() is torch.bfloat16
        assert dtype() is torch.float16
    with state.active():
        assert dtype() is torch.bfloat16
    assert dtype() is torch.float32


class Counting(TorchFunctionMode):
    """Another mode, which counts."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_other_modes_stay(engine):
    with engine.active():
        state = casting_state()
    with torch.device("meta"), Counting() as counting, CastingEngine(BFLOAT16).active():
        before = _get_current_function_mode_stack()
        with state.active():
            assert torch.ones(2).device.type == "meta"
            assert dtype() is torch.float16
        assert _get_current_function_mode_stack() == before
        assert counting.calls


def test_another_thread_may_take_it_up(engine):
    with engine.active():
        state = casting_state()
    seen = []

    def work():
        with state.active():
            seen.append(dtype())
        seen.append(dtype())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [torch.float16, torch.float32]


def test_a_stack_handed_over_without_the_threads_notes_is_read(engine):
    # The autograd engine's threads get the stack of the thread that calls backward, and not what amplab notes of it.
    seen = []
    with engine.active():
        (mode,) = _get_current_function_mode_stack()

        def work():
            nothing = casting_state()
            torch.overrides._push_mode(mode)
            try:
                seen.append(casting_state().engines)
                with nothing.active():
                    seen.append(dtype())
                seen.append(dtype())
            finally:
                torch.overrides._pop_mode()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [(engine,), torch.float32, torch.float16]
