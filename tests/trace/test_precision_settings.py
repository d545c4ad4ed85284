"""In which precision an X-ray is taken is said in words, and what is none is refused with a sentence."""

import warnings

import pytest
import torch
from torch import nn

import amplab
from amplab.trace import xray


@pytest.mark.parametrize(
    ("region", "said"),
    [
        (
            lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            "as it is under torch.autocast in force, bfloat16 on cpu",
        ),
        (lambda: amplab.autocast("cpu", dtype=torch.float16), "as it is under casts in force, torch_cuda/float16"),
    ],
)
def test_a_region_around_the_call_is_named(region, said):
    with region():
        found = xray(nn.Linear(8, 4), torch.ones(2, 8))
    assert found.precision == said
    assert any(cast.op == "linear" for cast in found.casts)


@pytest.mark.parametrize(
    ("autocast", "error", "words"),
    [
        (
            {"dtyp": torch.bfloat16},
            TypeError,
            r"^autocast=dict\(dtyp=\.\.\.\):",
        ),
        ({"dtype": "float16"}, TypeError, r"^autocast=dict\(dtype='float16'\):"),
        ({"device_type": "tpu"}, ValueError, r"^autocast=dict\(device_type='tpu'\):"),
        ("cpu", TypeError, "^autocast='cpu':"),
        (True, TypeError, "^autocast=True:"),
    ],
)
def test_autocast_that_is_none(autocast, error, words):
    with pytest.raises(error, match=words):
        xray(nn.Linear(8, 4), torch.ones(2, 8), autocast=autocast)


def test_autocast_that_torch_turns_off_is_said_to_be_off():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = xray(nn.Linear(8, 4), torch.ones(2, 8), autocast={"dtype": torch.float64})
    assert (found.precision, found.casts) == ("torch.autocast, disabled", ())


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"opt_level": "O4"}, (RuntimeError, ValueError), "O4"),
        ({"opt_level": "o1"}, (RuntimeError, ValueError), "o1"),
        ({"opt_level": 1}, (RuntimeError, ValueError), "1"),
        ({"opt_level": "01"}, (RuntimeError, ValueError), "letter O, not the number zero"),
        ({"policy": 3}, TypeError, "policy=3:"),
        ({"policy": ""}, ValueError, "expected 'table/dtype'"),
    ],
)
def test_levels_and_policies_that_are_none(settings, error, words):
    with pytest.raises(error, match=words) as raised:
        xray(nn.Linear(8, 4), torch.ones(2, 8), **settings)
    assert not isinstance(raised.value, AttributeError | KeyError)
    assert len(str(raised.value)) > 40
