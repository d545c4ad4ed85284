"""The multi-tensor steps: the reference against float64, the kernels against the reference to the bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from amplab.kernels.steps import adam_, multi_tensor_adam__reference, multi_tensor_sgd__reference, sgd_

LOW = (torch.float16, torch.bfloat16)
DTYPES = (*LOW, torch.float32, torch.float64)
SHAPES = ((1,), (0,), (75,), (3, 5, 7), (513,), (2, 8, 3, 3), ())
OPERATORS = {"sgd": torch.ops.amplab.multi_tensor_sgd_.default, "adam": torch.ops.amplab.multi_tensor_adam_.default}
REFERENCES = {"sgd": multi_tensor_sgd__reference, "adam": multi_tensor_adam__reference}

# lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, first
SGDS = {
    "plain": (0.1, 0.0, 0.0, 0.0, False, False, False),
    "decay": (0.1, 0.0, 0.0, 0.3, False, False, False),
    "momentum": (0.1, 0.9, 0.25, 0.0, False, False, False),
    "nesterov": (0.1, 0.9, 0.0, 0.3, True, False, False),
    "after": (0.1, 0.9, 0.0, 0.3, False, True, False),
    "first": (0.1, 0.9, 0.5, 0.3, False, False, True),
}
# lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, eps_inside_sqrt
ADAMS = {
    "adamw": (1e-2, 0.9, 0.999, 1e-8, 0.1, True, True, False),
    "adam": (1e-2, 0.9, 0.999, 1e-8, 0.1, False, True, False),
    "uncorrected": (1e-2, 0.8, 0.99, 1e-3, 0.0, True, False, False),
    "inside": (1e-2, 0.9, 0.999, 1e-3, 0.1, False, True, True),
}
CASES = [("sgd", name) for name in SGDS] + [("adam", name) for name in ADAMS]


def numbers(name, settings):
    return (SGDS if name == "sgd" else ADAMS)[settings]


def same_bits(a, b):
    """Equal to the bit, NaNs apart; float64 but nearly, since torch's own root of a double is no better."""
    if a.dtype == torch.float64:
        return torch.allclose(a, b, rtol=1e-15, atol=1e-15, equal_nan=True)
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    kept = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a[kept].contiguous().view(integer), b[kept].contiguous().view(integer)
    )


def lists(
    name, shapes, *, param=torch.float32, grad=torch.float32, state=torch.float32, copy=None, plain=False, seed=0
):
    """The lists of an operator, in its order: params, grads, states…, steps (Adam), copies."""
    generator = torch.Generator().manual_seed(seed)

    def tensors(dtype, positive=False):
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [(each.abs() if positive else each).to(dtype) for each in drawn]

    params, grads = tensors(param), tensors(grad)
    copies = [] if copy is None else tensors(copy)
    if name == "sgd":
        return [params, grads, [] if plain else tensors(state), copies]
    steps = [torch.tensor(float(3 * index)) for index in range(len(shapes))]
    return [params, grads, tensors(state), tensors(state, positive=True), steps, copies]


def copied(all_lists):
    """Clones that keep the layout."""
    return [[_like(each) for each in tensors] for tensors in all_lists]


def _like(tensor):
    spread = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return spread.copy_(tensor)


def both(name, settings, given_lists, *, factor=None, found_inf=None, maximize=False):
    """What reference and kernel leave of the same lists."""
    left = []
    for function in (REFERENCES[name], OPERATORS[name]):
        mine = copied(given_lists)
        function(*mine, factor, found_inf, maximize, *numbers(name, settings))
        left.append([each for tensors in mine for each in tensors])
    return left


def alike(reference, kernel):
    return all(same_bits(a, b) for a, b in zip(reference, kernel, strict=True))


# -- the kernels have the reference's bits ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("param", DTYPES)
def test_every_dtype(built, name, settings, param, grad):
    state = torch.float64 if param == torch.float64 else torch.float32
    drawn = lists(name, SHAPES, param=param, grad=grad, state=state, plain=settings in ("plain", "decay"))
    assert alike(*both(name, settings, drawn, factor=torch.tensor([1 / 3])))


@pytest.mark.parametrize(("name", "settings"), [("sgd", "nesterov"), ("adam", "adamw")])
@pytest.mark.parametrize("copy", DTYPES)
@pytest.mark.parametrize("state", DTYPES)
def test_states_and_copies_of_every_dtype(built, name, settings, state, copy):
    drawn = lists(name, SHAPES, grad=torch.float16, state=state, copy=copy)
    reference, kernel = both(name, settings, drawn, maximize=True)
    assert alike(reference, kernel)
    params, copies = kernel[: len(SHAPES)], kernel[-len(SHAPES) :]
    assert all(torch.equal(a.to(copy), b) for a, b in zip(params, copies, strict=True))


LAYOUTS = {
    "transposed": lambda x: x.T,
    "channels_last": lambda x: x.reshape(4, 5, 6, 5).to(memory_format=torch.channels_last),
    "every second": lambda x: x[:, ::2],
    "misaligned": lambda x: x.flatten()[1:],
    "permuted": lambda x: x.reshape(4, 5, 30).permute(2, 0, 1),
}


@pytest.mark.parametrize("where", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_every_list(built, layout, where):
    """One list in another layout than the rest, and then all of them in it."""
    make = LAYOUTS[layout]
    shape = make(torch.empty(20, 30)).shape
    base = lists("adam", [(20, 30)], copy=torch.bfloat16)
    others = lists("adam", [shape], copy=torch.bfloat16)
    one = [make(base[i][0]) if i == where else others[i][0] for i in range(6)]
    everywhere = [base[i][0] if i == 4 else make(base[i][0]) for i in range(6)]  # the step has no layout
    for each in (one, everywhere):
        assert alike(*both("adam", "adamw", [[tensor] for tensor in each]))


@settings(max_examples=60)
@given(
    case=st.sampled_from(CASES),
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    maximize=st.booleans(),
    bad=st.sampled_from([None, math.inf, -math.inf, math.nan, 6e4]),
    seed=st.integers(0, 99),
)
def test_any_lists(built, case, shapes, dtypes, maximize, bad, seed):
    name, settings = case
    param, grad, state = dtypes
    drawn = lists(name, shapes, param=param, grad=grad, state=state, plain=settings in ("plain", "decay"), seed=seed)
    for each in drawn[1]:
        if bad is not None and each.numel():
            each.view(-1)[seed % each.numel()] = bad
    assert alike(*both(name, settings, drawn, factor=torch.tensor(0.7), maximize=maximize))


def test_several_threads_share_one_list(built):
    drawn = lists("adam", [(100_003,), (7,), (50_000,)], grad=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert alike(*both("adam", "adamw", drawn))
    finally:
        torch.set_num_threads(before)


# -- the reference, and so the kernels, against float64 --------------------------------------------------------------


def ulps(mine, exact):
    """How many units in the last place of float32 apart, at most, where the exact value is not nearly 0."""
    big = exact.abs() > 1e-6
    spacing = torch.nextafter(exact[big].float().abs(), torch.tensor(math.inf)).double() - exact[big].float().abs()
    return ((mine[big].double() - exact[big]).abs() / spacing).max().item()


@pytest.mark.parametrize("settings", ADAMS)
def test_adam_is_the_published_rule(settings):
    lr, beta1, beta2, eps, decay, decoupled, corrects, inside = ADAMS[settings]
    params, grads, exp_avgs, exp_avg_sqs, steps, _ = lists("adam", [(1000,)])
    steps[0].fill_(4.0)
    p, g, m, v = (each[0].double() for each in (params, grads, exp_avgs, exp_avg_sqs))
    g = g * torch.tensor(0.7).double()
    if decoupled:
        p = p - lr * decay * p
    else:
        g = g + decay * p
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    c1, c2 = (1 - beta1**5, 1 - beta2**5) if corrects else (1.0, 1.0)
    exact = p - lr * (m / c1) / (((v + eps) / c2).sqrt() if inside else (v / c2).sqrt() + eps)
    adam_(
        *(params, grads, exp_avgs, exp_avg_sqs, steps),
        **{"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay, "decoupled": decoupled},
        **{"bias_correction": corrects, "eps_inside_sqrt": inside, "grad_factor": torch.tensor(0.7)},
    )
    assert (params[0].double() - exact).abs().max() < 1e-6
    assert (exp_avgs[0].double() - m).abs().max() < 5e-7
    assert ulps(exp_avg_sqs[0], v) < 4
    assert steps[0].item() == 5.0


@pytest.mark.parametrize("settings", SGDS)
def test_sgd_is_the_published_rule(settings):
    lr, momentum, dampening, decay, nesterov, after, first = SGDS[settings]
    params, grads, buffers, _ = lists("sgd", [(1000,)], plain=momentum == 0)
    p, g = params[0].double(), grads[0].double()
    d = g if after else g + decay * p
    if momentum:
        b = d if first else momentum * buffers[0].double() + (1 - dampening) * d
        d = d + momentum * b if nesterov else b
    exact = p - lr * (d + decay * p if after else d)
    sgd_(
        *(params, grads, buffers),
        **{"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov},
        **{"wd_after_momentum": after, "first": first},
    )
    assert (params[0].double() - exact).abs().max() < 1e-6
    assert (params[0].double() - p).abs().max() > 1e-2


# -- found_inf, refusals, opcheck ------------------------------------------------------------------------------------


@pytest.fixture(params=["reference", "kernel"])
def implementation(request):
    """The operators, or their references, by name."""
    if request.param == "reference":
        return REFERENCES
    request.getfixturevalue("built")
    return OPERATORS


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("found", [1.0, 0.5, math.nan])
def test_an_overflow_leaves_every_bit(implementation, name, settings, found):
    drawn = lists(name, SHAPES, grad=torch.float16, copy=torch.float16, plain=settings in ("plain", "decay"))
    drawn[1][2][3] = math.inf
    mine = copied(drawn)
    implementation[name](*mine, None, torch.tensor([found]), False, *numbers(name, settings))
    assert all(alike(a, b) for a, b in zip(drawn, mine, strict=True))
    implementation[name](*mine, None, torch.tensor([0.0]), False, *numbers(name, settings))
    assert not alike(drawn[0], mine[0])


@pytest.mark.parametrize("name", OPERATORS)
def test_no_tensors_at_all(implementation, name):
    settings = {"sgd": "momentum", "adam": "adamw"}[name]
    empty = [[]] * (4 if name == "sgd" else 6)
    implementation[name](*empty, torch.ones(1), torch.zeros(1), False, *numbers(name, settings))


def refused(implementation, change, words):
    drawn = lists("adam", [(4, 5), (3,)])
    change(drawn)
    with pytest.raises(RuntimeError, match=words):
        implementation["adam"](*drawn, None, None, False, *ADAMS["adamw"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda all_lists: all_lists[1].pop(), "2 params, 1 grads: expected lists of equal length"),
        (lambda all_lists: all_lists[2].pop(), "2 params, 1 states: expected lists of equal length"),
        (lambda all_lists: all_lists[5].append(torch.ones(4, 5)), "2 params, 1 copies: expected lists of equal length"),
        (lambda all_lists: all_lists[1].__setitem__(1, torch.ones(4)), "grad 1: expected the shape of its parameter"),
        (lambda all_lists: all_lists[1].__setitem__(1, torch.ones(3, dtype=torch.int32)), "grad 1: expected float16"),
        (lambda all_lists: all_lists[1].__setitem__(1, torch.ones(3, dtype=torch.cfloat)), "grad 1: expected float16"),
        (lambda all_lists: all_lists[3].__setitem__(1, torch.ones(1).expand(3)), "state 1 is expanded"),
        (
            lambda all_lists: all_lists[4].__setitem__(0, torch.ones((), dtype=torch.float64)),
            "step 0: expected one float",
        ),
    ],
)
def test_bad_lists_are_refused_by_index(implementation, change, words):
    refused(implementation, change, words)


@pytest.mark.parametrize(("place", "words"), [(0, "param 1"), (1, "grad 1"), (2, "state 1"), (4, "step 1")])
def test_memory_that_is_not_there_is_refused(implementation, place, words):
    refused(implementation, lambda drawn: drawn[place][1].untyped_storage().resize_(0), f"^{words} has no memory")


def overlapping():
    """Lists for Adam of which two share memory, by the names of the two."""
    whole, odd = torch.ones(8), torch.ones(9)

    def of(params, **changed):
        shapes = [param.shape for param in params]
        fresh = {name: [torch.ones(shape) for shape in shapes] for name in ("grads", "exp_avgs", "exp_avg_sqs")}
        fresh["steps"] = [torch.zeros(()) for _ in shapes]
        return [params, *{**fresh, **changed}.values(), []]

    return {
        "param 0 and param 1": of([whole, whole]),
        "param 1 and param 0": of([whole[2:], whole[:6]]),
        "param 0 and state 0": of([whole], exp_avgs=[whole]),
        "state 0 and state 0": of([whole], exp_avgs=[odd[:8]], exp_avg_sqs=[odd[1:]]),
        "param 0 and grad 0": of([whole], grads=[whole]),
        "param 0 and grad 1": of([whole[:4], odd[:4]], grads=[torch.ones(4), whole[2:6]]),
        "step 0 and step 1": of([whole, odd], steps=[torch.zeros(())] * 2),
    }


@pytest.mark.parametrize("names", overlapping())
def test_tensors_that_overlap_are_refused_and_left(implementation, names):
    drawn = overlapping()[names]
    before = copied(drawn)
    with pytest.raises(RuntimeError, match=f"^{names} overlap"):
        implementation["adam"](*drawn, None, None, False, *ADAMS["adamw"])
    assert all(alike(a, b) for a, b in zip(drawn, before, strict=True))


def test_gradients_may_be_shared_and_columns_interleave(implementation):
    matrix, grad = torch.ones(4, 2), torch.ones(4)
    implementation["sgd"]([matrix[:, 0], matrix[:, 1]], [grad, grad], [], [], None, None, False, *SGDS["plain"])
    assert torch.equal(matrix, torch.full((4, 2), 0.9))


def test_a_momentum_without_buffers_is_refused():
    with pytest.raises(RuntimeError, match=r"^momentum=0.9 without momentum_buffers"):
        sgd_([torch.ones(2)], [torch.ones(2)], lr=0.1, momentum=0.9)
    sgd_([], [], lr=0.1, momentum=0.9)


def test_scalars_are_checked(implementation):
    drawn = lists("adam", [(3,)])
    with pytest.raises(RuntimeError, match=r"^grad_factor:"):
        implementation["adam"](*drawn, torch.ones(2), None, False, *ADAMS["adamw"])
    with pytest.raises(RuntimeError, match=r"^found_inf:"):
        implementation["adam"](*drawn, None, torch.ones((), dtype=torch.float64), False, *ADAMS["adamw"])


def test_sparse_gradients_are_refused():
    drawn = lists("adam", [(3,)])
    drawn[1] = [torch.ones(3).to_sparse()]
    with pytest.raises(RuntimeError, match="grad 0 is not strided"):
        multi_tensor_adam__reference(*drawn, None, None, False, *ADAMS["adamw"])


@pytest.mark.parametrize(("name", "settings"), [("sgd", "momentum"), ("sgd", "plain"), ("adam", "adamw")])
def test_the_schema_says_what_happens(built, name, settings):
    drawn = lists(name, [(3,), (2, 2)], grad=torch.float16, copy=torch.float16, plain=settings == "plain")
    opcheck(OPERATORS[name], (*drawn, torch.ones(1), torch.zeros(1), False, *numbers(name, settings)))
