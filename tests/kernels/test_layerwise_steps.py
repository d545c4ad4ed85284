"""LAMB and NovoGrad: the kernels against the references, over dtypes, layouts, sizes and threads.

Both sum norms in float64, in another order: a sum may differ in its last bit, and so a result in its own last bit.
What the rules are is held against float64 in tests/optimizers.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from amplab.kernels.layerwise_steps import multi_tensor_lamb__reference, multi_tensor_novograd__reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((1,), (0,), (75,), (3, 5, 7), (2, 8, 3, 3), ())
REFERENCES = {"lamb_": multi_tensor_lamb__reference, "novograd_": multi_tensor_novograd__reference}

# lr, beta1, beta2, beta3, eps, weight_decay, and then what each rule adds.
MOMENTS = (0.01, 0.9, 0.99, 0.1, 1e-6, 0.1)
CASES = {
    "lamb": ("lamb_", (*MOMENTS, math.inf, True, True, True)),  # max_weight_norm, decoupled, bias_correction, adapt
    "lamb, L2": ("lamb_", (*MOMENTS, math.inf, False, True, True)),
    "lamb, limited": ("lamb_", (*MOMENTS[:3], 1.0, *MOMENTS[4:], 2.0, True, False, True)),
    "lamb, not adapted": ("lamb_", (*MOMENTS[:5], 0.0, math.inf, True, True, False)),
    "novograd": ("novograd_", (*MOMENTS, False, False, True)),  # decay_in_moment, maximum_norm, bias_correction
    "novograd, inside": ("novograd_", (*MOMENTS, True, False, True)),
    "novograd, maximum": ("novograd_", (*MOMENTS[:3], 1.0, *MOMENTS[4:], False, True, False)),
}


def operator(name):
    return getattr(torch.ops.amplab, f"multi_tensor_{name}").default


def lists(name, shapes, *, param=torch.float32, grad=torch.float32, state=torch.float32, copy=None, seed=0):
    """The lists by the names of the operator."""
    generator = torch.Generator().manual_seed(seed)

    def tensors(dtype):
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]

    drawn = {"params": tensors(param), "grads": tensors(grad), "exp_avgs": tensors(state)}
    if name == "lamb_":
        drawn["exp_avg_sqs"] = [each.abs() for each in tensors(state)]
    drawn["steps"] = [torch.tensor(float(3 * index)) for index in range(len(shapes))]
    drawn["copies"] = [] if copy is None else tensors(copy)
    if name == "novograd_":
        drawn["norms"] = [torch.tensor(index - 1.0) for index in range(len(shapes))]
    return drawn


def copied(drawn):
    def like(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    return {name: [like(each) for each in tensors] for name, tensors in drawn.items()}


def arguments(drawn, numbers, factor=None, found_inf=None, maximize=False):
    leading = [tensors for name, tensors in drawn.items() if name != "norms"]
    return [*leading, factor, found_inf, maximize, *numbers, *([drawn["norms"]] if "norms" in drawn else [])]


def flat(drawn):
    return [each for tensors in drawn.values() for each in tensors]


def is_close(a, b):
    """Within a unit in the last place, or what is lost where a step nearly cancels a weight."""
    unit = torch.finfo(a.dtype).eps
    return torch.allclose(a.double(), b.double(), rtol=2 * unit, atol=2 * unit, equal_nan=True)


def both(case, drawn, **options):
    name, numbers = CASES[case]
    left = copied(drawn), copied(drawn)
    for function, mine in zip((REFERENCES[name], operator(name)), left, strict=True):
        function(*arguments(mine, numbers, **options))
    return left


def agree(left, share=0.999):
    """All are close, and nearly all equal."""
    pairs = list(zip(flat(left[0]), flat(left[1]), strict=True))
    same = sum((a == b).sum().item() + (a.isnan() & b.isnan()).sum().item() for a, b in pairs)
    return all(is_close(a, b) for a, b in pairs) and same >= share * sum(a.numel() for a, _ in pairs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("param", DTYPES)
def test_every_dtype(built, case, param, grad):
    state = torch.float64 if param == torch.float64 else torch.float32
    drawn = lists(CASES[case][0], SHAPES, param=param, grad=grad, state=state)
    share = 0.5 if param == torch.float64 else 0.999  # torch's own root of a double is no better
    assert agree(both(case, drawn, factor=torch.tensor([1 / 3])), share)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("state", DTYPES)
def test_states_of_every_dtype_and_copies(built, case, state):
    drawn = lists(CASES[case][0], SHAPES, grad=torch.float16, state=state, copy=torch.bfloat16)
    left = both(case, drawn, maximize=True)
    assert agree(left)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(left[1]["params"], left[1]["copies"], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_many_chunks_of_one_tensor_on_several_threads_are_one_sum(built, case):
    drawn = lists(CASES[case][0], [(100_003,), (7,), (16_384,), (16_385,)], grad=torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            results.append(both(case, drawn))
    finally:
        torch.set_num_threads(before)
    assert agree(results[0])
    assert all(torch.equal(a, b) for a, b in zip(flat(results[0][1]), flat(results[1][1]), strict=True))


@settings(max_examples=60)
@given(
    case=st.sampled_from(list(CASES)),
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6),
    dtypes=st.tuples(*[st.sampled_from(DTYPES[:3])] * 3),
    maximize=st.booleans(),
    bad=st.sampled_from([None, math.inf, -math.inf, math.nan]),
    seed=st.integers(0, 99),
)
def test_any_lists(built, case, shapes, dtypes, maximize, bad, seed):
    param, grad, state = dtypes
    drawn = lists(CASES[case][0], shapes, param=param, grad=grad, state=state, seed=seed)
    for each in drawn["grads"]:
        if bad is not None and each.numel():
            each.view(-1)[seed % each.numel()] = bad
    assert agree(both(case, drawn, factor=torch.tensor(0.7), maximize=maximize), 0.9)


def test_a_transposed_list_of_every_kind(built):
    for case, (name, _) in CASES.items():
        drawn = lists(name, [(20, 30)])
        for key in ("params", "grads", "exp_avgs"):
            mine = {**drawn, key: [drawn[key][0].t().contiguous().t()]}
            assert agree(both(case, mine)), (case, key)


@pytest.mark.parametrize("case", ["lamb", "lamb, limited"])
def test_weights_or_updates_of_zero_step_by_the_rate_alone(built, case):
    for zero in ("params", "grads"):
        drawn = lists("lamb_", [(5,)])
        drawn[zero][0].zero_()
        if zero == "grads":
            drawn["exp_avgs"][0].zero_()
            drawn["params"][0].zero_()
        left = both(case, drawn)
        assert agree(left)
        assert bool(left[1]["params"][0].isfinite().all())


# -- found_inf, refusals, opcheck ------------------------------------------------------------------------------------


@pytest.fixture(params=["reference", "kernel"])
def implementation(request):
    if request.param == "reference":
        return REFERENCES.__getitem__
    request.getfixturevalue("built")
    return operator


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("found", [1.0, 0.5, math.nan])
def test_an_overflow_leaves_every_bit(implementation, case, found):
    name, numbers = CASES[case]
    drawn = lists(name, SHAPES, grad=torch.float16, copy=torch.float16)
    drawn["grads"][2][3] = math.inf
    mine = copied(drawn)
    implementation(name)(*arguments(mine, numbers, found_inf=torch.tensor([found])))
    assert all(torch.equal(a, b) for a, b in zip(flat(mine), flat(drawn), strict=True))
    implementation(name)(*arguments(mine, numbers, found_inf=torch.tensor([0.0])))
    assert not torch.equal(mine["params"][3], drawn["params"][3])
    assert [step.item() for step in mine["steps"]] == [1.0, 4.0, 7.0, 10.0, 13.0, 16.0]


@pytest.mark.parametrize("case", CASES)
def test_no_tensors_at_all(implementation, case):
    name, numbers = CASES[case]
    implementation(name)(*arguments(lists(name, []), numbers, torch.ones(1), torch.zeros(1)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda drawn: drawn["norms"].pop(), "2 params, 1 norms:"),
        (lambda drawn: drawn["norms"].__setitem__(1, torch.ones(2)), "norm 1:"),
        (lambda drawn: drawn["norms"].__setitem__(0, torch.ones(()).double()), "norm 0:"),
        (lambda drawn: drawn["exp_avgs"].pop(), "2 params, 1 states:"),
    ],
)
def test_bad_lists_are_refused(implementation, change, words):
    drawn = lists("novograd_", [(4, 5), (3,)])
    change(drawn)
    with pytest.raises(RuntimeError, match=words):
        implementation("novograd_")(*arguments(drawn, CASES["novograd"][1]))


@pytest.mark.parametrize("case", CASES)
def test_the_schema_says_what_happens(case):
    name, numbers = CASES[case]
    drawn = lists(name, [(3,), (2, 2)], grad=torch.float16, copy=torch.float16)
    opcheck(operator(name), tuple(arguments(drawn, numbers, torch.ones(1), torch.zeros(1))))
