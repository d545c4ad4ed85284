"""The update of the loss scale: reference and kernel against torch's operator, apex's kernel and amplab's rules."""

import math
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from amplab import kernels
from amplab.kernels.update_scale import update_scale__reference
from amplab.scalers import PUBLISHED_RULES, HysteresisState, RecurrentRule, ScaleState

RECURRENT = {name: rule for name, rule in PUBLISHED_RULES.items() if isinstance(rule, RecurrentRule)}


@pytest.fixture(params=["reference", "kernel"])
def update_(request):
    """The operator: its reference, or its kernel."""
    if request.param == "reference":
        return update_scale__reference
    request.getfixturevalue("built")
    return torch.ops.amplab.update_scale_.default


def counter(value=0):
    return torch.tensor([value], dtype=torch.int32)


def verdicts(count, seed, share=0.2):
    generator = random.Random(seed)
    return [
        generator.choice([1.0, 1.0, 0.5, math.nan, -1.0]) if generator.random() < share else 0.0 for _ in range(count)
    ]


def apexs_update(scale, growth, hysteresis_left, found_inf, growth_factor, backoff_factor, interval, hysteresis):
    """apex's update_scale_hysteresis kernel, line by line, in numpy's float32."""
    if found_inf > 0:
        hysteresis_left -= 1
        if hysteresis_left > 0:
            return scale, 0, hysteresis_left
    if found_inf:
        scale, growth = np.float32(float(scale) * backoff_factor), 0
    else:
        successful = growth + 1
        if successful == interval:
            with np.errstate(over="ignore"):
                grown = np.float32(float(scale) * growth_factor)
            scale, growth = (grown if np.isfinite(grown) else scale), 0
        else:
            growth = successful
    return scale, growth, hysteresis_left if found_inf > 0 else hysteresis


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.7, 1 / 3), (2**0.05, 0.999)])
@pytest.mark.parametrize("start", [2.0**16, 1e38, 1e-44, 0.1])
def test_without_patience_or_bounds_it_is_torchs_operator(update_, seed, growth, backoff, start):
    mine, theirs = torch.tensor([start]), torch.tensor([start])
    my_count, their_count = counter(), counter()
    interval = 1 + seed
    for verdict in verdicts(300, seed):
        found_inf = torch.tensor([verdict])
        update_(mine, my_count, None, found_inf, growth, backoff, interval, 1, 0.0, math.inf)
        torch._amp_update_scale_(theirs, their_count, found_inf, growth, backoff, interval)
        assert torch.equal(mine, theirs)
        assert torch.equal(my_count, their_count)


@pytest.mark.parametrize("hysteresis", [1, 2, 5])
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.7, 1 / 3)])
@pytest.mark.parametrize("start", [2.0**16, 1e38])
def test_with_patience_it_is_apexs_kernel(update_, hysteresis, growth, backoff, start):
    scale, growth_tracker, patience = torch.tensor([start]), counter(), counter(hysteresis)
    expected = np.float32(start), 0, hysteresis
    for found_inf in (float(each > 0) for each in verdicts(400, hysteresis, share=0.4)):
        update_(
            scale, growth_tracker, patience, torch.tensor([found_inf]), growth, backoff, 3, hysteresis, 0.0, math.inf
        )
        expected = apexs_update(*expected, found_inf, growth, backoff, 3, hysteresis)
        assert (np.float32(scale.item()), growth_tracker.item(), patience.item()) == expected


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("seed", range(4))
def test_it_runs_every_published_rule_that_is_the_recurrence(update_, name, seed):
    rule = RECURRENT[name]
    constants = rule.recurrence
    dtype = torch.float32 if constants.single else torch.float64
    # Close to where the rule grows, so that a few hundred steps see every branch.
    state = rule.start()
    early = {"scale": state.scale, "clean_steps": constants.growth_interval - 2}
    state = HysteresisState(**early, hysteresis=2) if constants.hysteresis else ScaleState(**early)
    scale, growth_tracker = torch.tensor(state.scale, dtype=dtype), counter(state.clean_steps)
    patience = None if constants.hysteresis is None else counter(2)
    for number, verdict in enumerate(verdicts(200, seed, share=0.5 if seed % 2 else 0.01)):
        found_inf = torch.tensor([verdict if number > 5 else 0.0])
        update_(
            scale,
            growth_tracker,
            patience,
            found_inf,
            constants.growth_factor,
            constants.backoff_factor,
            constants.growth_interval,
            constants.hysteresis or 1,
            constants.floor,
            constants.ceiling,
            constants.divides,
            constants.keeps_finite,
            True,
        )
        state = rule.next(state, bool(found_inf))
        assert (scale.item(), growth_tracker.item()) == (state.scale, state.clean_steps)
        assert patience is None or patience.item() == state.hysteresis


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_hold_where_the_scale_moves(update_, dtype):
    scale, clean_steps = torch.tensor(8.0, dtype=dtype), counter()
    constants = (2.0, 0.5, 1, 1, 4.0, 16.0)
    seen = []
    for verdict in (0.0, 0.0, 1.0, 1.0, 1.0):
        update_(scale, clean_steps, None, torch.tensor(verdict), *constants)
        seen.append(scale.item())
    assert seen == [16.0, 16.0, 8.0, 4.0, 4.0]
    scale.fill_(100.0)  # outside, where nothing moves it
    update_(scale, counter(-2), None, torch.tensor(0.0), *constants)
    assert scale.item() == 100.0
    update_(scale, clean_steps, None, torch.tensor(0.0), *constants)
    assert scale.item() == 16.0


def test_growth_beyond_the_dtype_is_dropped_by_default(update_):
    for dtype, largest in ((torch.float32, 2.0**127), (torch.float64, 2.0**1023)):
        kept, gone = torch.tensor(largest, dtype=dtype), torch.tensor(largest, dtype=dtype)
        constants = (torch.tensor(0.0), 2.0, 0.5, 1, 1, 0.0, math.inf, False)
        update_(kept, counter(), None, *constants, True)
        update_(gone, counter(), None, *constants, False)
        assert (kept.item(), gone.item()) == (largest, math.inf)


def test_a_count_beyond_the_interval_grows_at_once(update_):
    scale, clean_steps = torch.tensor(8.0), counter(50)
    update_(scale, clean_steps, None, torch.tensor(0.0), 2.0, 0.5, 10, 1, 0.0, math.inf)
    assert (scale.item(), clean_steps.item()) == (16.0, 0)


@settings(max_examples=200)
@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.0, 1e-45, 1.0, 0.1, 65536.0, 3e38, math.inf, math.nan]),
    st.integers(0, 4),
    st.one_of(st.none(), st.integers(-2, 4)),
    st.lists(st.sampled_from([0.0, 1.0, math.nan, math.inf]), max_size=12),
    st.tuples(
        st.sampled_from([1.0001, 1.7, 2.0]),
        st.sampled_from([0.1, 0.5, 2.0, 3.0]),
        st.integers(1, 4),
        st.integers(1, 3),
        st.sampled_from([0.0, 0.3, 4.0]),
        st.sampled_from([16.1, 2.0**24, math.inf]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
)
def test_the_kernel_has_the_references_bits(built, dtype, start, count, patience, found, constants):
    states = []
    for function in (torch.ops.amplab.update_scale_.default, update_scale__reference):
        scale, growth = torch.tensor(start, dtype=dtype), counter(count)
        left = None if patience is None else counter(patience)
        for verdict in found:
            function(scale, growth, left, torch.tensor([verdict]), *constants)
        states.append((scale, growth, left))
    (scale, growth, left), (other_scale, other_growth, other_left) = states
    assert torch.equal(scale.nan_to_num(-1.0), other_scale.nan_to_num(-1.0))
    assert torch.equal(growth, other_growth)
    assert patience is None or torch.equal(left, other_left)


@pytest.mark.parametrize("place", range(4))
def test_a_state_without_memory_is_refused(update_, place):
    state = [torch.ones(1), counter(), counter(2), torch.zeros(1)]
    state[place].untyped_storage().resize_(0)
    name = ("scale", "growth_tracker", "hysteresis_tracker", "found_inf")[place]
    with pytest.raises(RuntimeError, match=f"^{name} has no memory"):
        update_(*state, *CONSTANTS)


CONSTANTS = (2.0, 0.5, 2000, 1, 0.0, math.inf)
REFUSALS = [
    ((torch.ones(2), counter(), None, torch.zeros(1), *CONSTANTS), "scale:"),
    ((torch.ones(1).half(), counter(), None, torch.zeros(1), *CONSTANTS), "scale:"),
    ((torch.ones(1), torch.zeros(1), None, torch.zeros(1), *CONSTANTS), "growth_tracker:"),
    ((torch.ones(1), counter(), torch.zeros(1), torch.zeros(1), *CONSTANTS), "hysteresis_tracker:"),
    ((torch.ones(1), counter(), None, torch.zeros(2), *CONSTANTS), "found_inf:"),
    (
        (torch.ones(1), counter(), None, torch.zeros(1), 2.0, 0.5, 0, 1, 0.0, 1.0),
        "growth_interval=0:",
    ),
    (
        (torch.ones(1), counter(), None, torch.zeros(1), 2.0, 0.5, 1, 0, 0.0, 1.0),
        "hysteresis=0:",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_what_is_no_state_is_refused(update_, arguments, message):
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        update_(*arguments)


@pytest.mark.parametrize("patience", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype, patience):
    left = None if patience is None else counter(patience)
    arguments = (torch.tensor([8.0], dtype=dtype), counter(), left, torch.ones(1), *CONSTANTS)
    opcheck(torch.ops.amplab.update_scale_.default, arguments)


def test_the_public_function_calls_the_operator():
    scale, clean_steps = torch.tensor(8.0), counter()
    kernels.update_scale_(scale, clean_steps, None, torch.ones(1))
    assert scale.item() == 4.0
    kernels.update_scale_(scale, clean_steps, None, torch.zeros(1), growth_interval=1, ceiling=6.0)
    assert scale.item() == 6.0


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"growth_factor": math.nan}, "growth_factor=nan:"),
        ({"backoff_factor": 0.0}, r"backoff_factor=0\.0:"),
        ({"backoff_factor": -1.0}, r"backoff_factor=-1\.0:"),
        ({"floor": math.nan}, "floor=nan, ceiling=inf:"),
        ({"floor": 8.0, "ceiling": 1.0}, r"floor=8\.0, ceiling=1\.0:"),
    ],
)
def test_numbers_that_make_no_scale_are_refused(numbers, words):
    scale, tracker = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
    with pytest.raises(ValueError, match=words):
        kernels.update_scale_(scale, tracker, None, torch.ones(()), **numbers)
    assert scale.item() == 4.0
