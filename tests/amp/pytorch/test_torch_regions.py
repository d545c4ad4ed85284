"""Disabled regions of torch.autocast, which libraries keep float32 code with, inside amplab's regions and at O1."""

import contextlib
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import amplab
from amplab import amp
from amplab.policies import CastingEngine, PrecisionPolicy, thread_engines
from amplab.policies.casting.function_modes import set_function_modes
from amplab.policies.casting.thread_scopes import THREAD

HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32
X = torch.ones(2, 2)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    amp.reset()
    assert thread_engines() == ()
    assert THREAD.own.torch_regions == []
    assert _get_current_function_mode_stack() == []
    assert dtype() is FLOAT


def dtype() -> torch.dtype:
    return (X @ X).dtype


def off(device_type: str = "cpu") -> torch.autocast:
    return torch.autocast(device_type, enabled=False)


class RotaryEmbedding(nn.Module):
    """As transformers writes it: the angles need float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, dim, 2) / dim)))

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        position_ids = position_ids[:, None, :].float()
        device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
        with torch.autocast(device_type=device_type, enabled=False):  # Force float32
            freqs = (inv_freq.float() @ position_ids.float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


REGIONS = {
    "autocast": lambda: amplab.autocast("cpu", BFLOAT16),
    "engine": CastingEngine(PrecisionPolicy(compute_dtype=BFLOAT16)).active,
}


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_the_angles_of_a_rotary_embedding_are_bitwise_those_in_float32(region):
    rotary, positions = RotaryEmbedding(8), torch.arange(2000, 2016)[None]
    expected = rotary(X, positions)
    with region():
        found = rotary(X, positions)
        assert dtype() is BFLOAT16
    for ours, right in zip(found, expected, strict=True):
        assert torch.equal(ours, right)


def test_a_decorated_function_and_an_exit_stack_and_a_generator_are_disabled_too():
    @torch.autocast("cpu", enabled=False)
    def guarded():
        return dtype()

    @contextlib.contextmanager
    def guard():
        with off():
            yield

    with amplab.autocast("cpu", HALF):
        assert guarded() is FLOAT
        with contextlib.ExitStack() as stack:
            stack.enter_context(off())
            assert dtype() is FLOAT
        assert dtype() is HALF
        with guard():
            assert dtype() is FLOAT
        assert dtype() is HALF


def test_a_region_of_amplab_inside_casts_again_with_the_settings_of_the_one_around():
    with amplab.autocast("cpu", BFLOAT16), off():
        assert not amplab.is_autocast_enabled("cpu")
        with amplab.autocast("cpu"):
            assert dtype() is BFLOAT16
        assert dtype() is FLOAT
        with torch.autocast("cpu", HALF):
            assert dtype() is HALF  # torch's own casts
            assert torch.softmax(X @ X, 0).dtype is HALF  # by torch's list for the CPU: amplab's stay disabled
        assert dtype() is FLOAT


def test_a_region_inside_one_of_torch_casts():
    with off(), amplab.autocast("cpu", HALF):
        assert dtype() is HALF


def test_a_disabled_region_of_another_device_type_changes_nothing():
    with amplab.autocast("cpu", HALF), off("cuda"):
        assert dtype() is HALF
        with off("cpu"), off("cuda"):
            assert dtype() is FLOAT
        assert dtype() is HALF


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_ends_with_an_error(error):
    with amplab.autocast("cpu", HALF):
        with contextlib.suppress(error), off():
            raise error
        assert dtype() is HALF


def test_an_exit_that_does_not_run_is_made_up_for():
    def interrupted():
        off().__enter__()  # no exit: as an interrupt before the first line of __exit__ leaves it

    with amplab.autocast("cpu", HALF):
        interrupted()
        torch.autocast_decrement_nesting()
        with off():
            assert dtype() is FLOAT
        assert dtype() is HALF


def test_the_whole_of_o1_is_disabled():
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert dtype() is HALF
    with off():
        assert dtype() is FLOAT
    assert dtype() is HALF


# -- what torch enters to restore a state is no wish to compute in float32 ------------------------------


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with off():
            inside = self.second(hidden.float())
        self.dtypes += [hidden.dtype, inside.dtype]
        return inside * hidden


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("call", [checkpoint, amplab.checkpoint])
def test_a_recomputation_has_the_dtypes_of_the_forward(call, reentrant):
    torch.manual_seed(0)
    model = Guarded()
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.ones(3, 4, requires_grad=True)
    call(model, x, use_reentrant=reentrant).float().sum().backward()
    assert model.dtypes == [HALF, FLOAT] * 2
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    model(x).float().sum().backward()
    assert all(torch.equal(ours, param.grad) for ours, param in zip(found, model.parameters(), strict=True))


def test_the_backward_of_torchs_decorator_casts_as_before():
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            seen.append(dtype())
            return grad * 2

    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    Square.apply(X.clone().requires_grad_()).sum().backward()
    assert seen == [HALF]


def test_a_thread_with_the_modes_of_another_is_disabled_alone():
    """As autograd's threads for devices: they get the caller's function modes."""
    found = []

    def backward(modes):
        set_function_modes(modes)
        with off():
            found.append(dtype())
        found.append(dtype())
        set_function_modes([])

    with amplab.autocast("cpu", HALF):
        thread = threading.Thread(target=backward, args=(_get_current_function_mode_stack(),))
        thread.start()
        thread.join()
        assert dtype() is HALF
    assert found == [FLOAT, HALF]


# -- compiled ---------------------------------------------------------------------------------------


def around(x: Tensor) -> Tensor:
    return x @ x


def inside(x: Tensor) -> tuple[Tensor, ...]:
    first = x @ x
    with off():
        second = x @ x
        with amplab.autocast("cpu", HALF):
            third = x @ x
    return first, second, third, x @ x


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


def test_a_function_compiled_in_the_region_computes_in_float32_where_it_is_disabled_later(compiled):
    function = compiled(around)
    with amplab.autocast("cpu", HALF):
        for _ in range(2):
            assert function(X).dtype is HALF
            with off():
                assert function(X).dtype is FLOAT
    assert function(X).dtype is FLOAT


def test_a_disabled_region_in_a_compiled_function_is_disabled(compiled):
    function = compiled(inside)
    with amplab.autocast("cpu", HALF):
        assert [result.dtype for result in function(X)] == [HALF, FLOAT, HALF, HALF]
        with off("cuda"):
            assert [result.dtype for result in function(X)] == [HALF, FLOAT, HALF, HALF]
        with off():
            assert [result.dtype for result in function(X)] == [FLOAT, FLOAT, HALF, FLOAT]
