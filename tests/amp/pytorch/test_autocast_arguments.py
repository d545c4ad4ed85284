"""What autocast refuses and what it turns off, beside what torch.autocast does with the same arguments."""

import contextlib
import warnings

import pytest
import torch

import amplab
from amplab.policies import PrecisionPolicy, apply_policy

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")


def outcome(autocast, *args, **kwargs):
    """The exception's type, or the warnings' types and whether the region is enabled."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            region = autocast(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever it is, it is compared
            return type(error)
    enabled = region.enabled if isinstance(region, amplab.autocast) else region._enabled
    return [warning.category for warning in caught], enabled, region.fast_dtype


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("cpu",), {}),
        (("cpu", torch.float16), {}),
        (("cpu", torch.bfloat16, False), {}),
        (("cpu", torch.bfloat16, True, False), {}),
        (("cpu",), {"enabled": False, "dtype": torch.float16, "cache_enabled": True}),
        (("cpu:0",), {}),
        ((), {}),
        ((), {"dtype": torch.float16}),
        ((torch.device("cpu"),), {}),
        ((None,), {}),
        (("bogus",), {}),
        (("bogus", torch.float16), {}),
        (("meta",), {}),
        (("meta", torch.float16), {}),
        (("meta", torch.float16, False), {}),
        (("cpu", torch.float32), {}),
        (("cpu", torch.float64), {}),
        (("cpu", torch.float8_e4m3fn), {}),
        (("cpu", torch.float32, False), {}),
        (("cpu",), {"weights": None}),
        pytest.param(("cuda",), {}, marks=NO_CUDA),
        pytest.param(("cuda", torch.bfloat16), {}, marks=NO_CUDA),
        pytest.param(("cuda", torch.float16, False), {}, marks=NO_CUDA),
    ],
    ids=str,
)
def test_exceptions_warnings_and_defaults_are_torchs(args, kwargs):
    assert outcome(amplab.autocast, *args, **kwargs) == outcome(torch.autocast, *args, **kwargs)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((torch.device("cpu"),), ValueError, ["torch.device", "`str`", "tensor.device.type"]),
        (("bogus",), RuntimeError, ["'bogus'", "'cuda', 'cpu'", "tensor.device.type"]),
        (("cpu", torch.int32), ValueError, ["torch.int32", "expected a floating", "pass torch.bfloat16"]),
        (("cpu", torch.complex64), ValueError, ["torch.complex64", "expected a floating"]),
        (("cpu", "float16"), TypeError, ["'float16'", "expected a torch.dtype", "torch.float16"]),
    ],
    ids=["device", "unknown device", "integers", "complex", "string"],
)
def test_errors_say_what_was_given_what_is_allowed_and_what_to_do(args, error, words):
    with pytest.raises(error) as raised:
        amplab.autocast(*args)
    assert all(word in str(raised.value) for word in words)


def test_warnings_name_the_callers_line_and_what_to_pass():
    with pytest.warns(UserWarning, match=r"float32. Disabling autocast.\n.*pass one of these") as caught:
        amplab.autocast("cpu", torch.float32)
    assert caught[0].filename == __file__
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            return
        caught = stack.enter_context(pytest.warns(UserWarning, match=r"CUDA is not available.*device_type='cpu'"))
        amplab.autocast("cuda")
    assert caught[0].filename == __file__


def test_a_region_turned_off_casts_nothing():
    x = torch.ones(2, 2)
    with pytest.warns(UserWarning, match="Disabling"):
        region = amplab.autocast("cpu", torch.float64)
    with amplab.autocast("cpu"), region:
        assert (x @ x).dtype is torch.float32
        assert amplab.get_autocast_dtype("cpu") is torch.float64


def test_policies_that_are_none_or_contradict_the_dtype_are_refused():
    with pytest.raises(TypeError, match=r"policy='apex/float16': expected a PrecisionPolicy.*parse"):
        amplab.autocast("cpu", policy="apex/float16")
    with pytest.raises(ValueError, match=r"dtype=torch.bfloat16 contradicts.*omit dtype"):
        amplab.autocast("cpu", torch.bfloat16, policy=PrecisionPolicy())
    assert amplab.autocast("cpu", torch.float16, policy=PrecisionPolicy()).fast_dtype is torch.float16
    with pytest.raises(TypeError):
        amplab.autocast("cpu", torch.float16, True, None, PrecisionPolicy())


def test_a_simulated_format_is_a_policy_of_float32_tensors():
    x = torch.full((2, 2), 1.0625)  # 1.0 in three bits of mantissa
    with amplab.autocast("cpu", policy=PrecisionPolicy(compute_dtype="float8_e4m3")), amplab.autocast("cpu"):
        product = x @ x
        assert amplab.get_autocast_dtype("cpu") is torch.float32
    assert product.dtype is torch.float32
    assert product.tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("given", [torch.ones(2), torch.nn.Parameter(torch.ones(1)), 3])
def test_only_callables_are_decorated(given):
    with pytest.raises(TypeError, match=r"requires a callable, but got") as ours:
        amplab.autocast("cpu")(given)
    with pytest.raises(TypeError) as theirs:
        torch.autocast("cpu")(given)
    assert str(ours.value) == str(theirs.value).replace("torch.autocast", "amplab.autocast")


def test_module_rules_are_refused_by_name_and_the_message_says_what_works():
    policy = PrecisionPolicy(module_rules={"nosuch": "float32"})
    with pytest.raises(ValueError, match=r"module rule nosuch=float32, .*apply_policy\(policy, model\)"):
        amplab.autocast("cpu", policy=policy)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    applied = apply_policy(PrecisionPolicy("torch_cuda", module_rules={"1": "float32"}), model)
    with applied, amplab.autocast("cpu", dtype=torch.float16):
        assert model(torch.ones(1, 2)).dtype is torch.float32
        assert model[0](torch.ones(1, 2)).dtype is torch.float16
