"""Functions put on a list by the user: torch's as rows of the policy, others as attributes replaced for a while."""

import copy
import pickle
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp
from amplab.amp.apex.registered_functions import RegisteredFunctions, table_with
from amplab.policies import APEX, CastPolicy, PrecisionPolicy


@pytest.fixture
def halves():
    return torch.ones(2, 2).half()


@pytest.fixture
def library():
    """A module as a user's package would hold it: a function, and a class with a method and a static method."""
    module = types.ModuleType("library")

    class Pool:
        def forward(self, x, *, scale=None):
            return x if scale is None else (x, scale)

        @staticmethod
        def apply(x):
            return x

    module.identity = lambda *args, **kwargs: (args, kwargs)
    module.Pool = Pool
    return module


def o1(model=None, **options):
    return amp.initialize(nn.Linear(2, 2) if model is None else model, opt_level="O1", verbosity=0, **options)


REGISTER = {
    "half": amp.register_half_function,
    "float": amp.register_float_function,
    "promote": amp.register_promote_function,
}


@pytest.mark.parametrize(
    ("kind", "op", "call", "before", "after"),
    [
        ("half", "exp", torch.exp, torch.float32, torch.float16),
        ("half", "exp", lambda h: h.float().exp(), torch.float32, torch.float16),
        ("half", "sigmoid", lambda h: torch.sigmoid(h.float()), torch.float32, torch.float16),
        ("float", "sigmoid", nn.Sigmoid(), torch.float16, torch.float32),
        ("float", "sigmoid", F.sigmoid, torch.float16, torch.float32),
        ("float", "mm", lambda h: torch.mm(h, h), torch.float16, torch.float32),
        ("half", "einsum", lambda h: torch.einsum("ij,jk", h.float(), h.float()), torch.float16, torch.float16),
        ("promote", "mm", lambda h: torch.mm(h, h.float()), torch.float16, torch.float32),
        ("promote", "mm", lambda h: torch.mm(h, h), torch.float16, torch.float16),
    ],
)
def test_a_function_of_torch_follows_the_user_not_the_list(halves, kind, op, call, before, after):
    o1()
    assert call(halves).dtype == before
    amp.reset()
    REGISTER[kind](torch, op)
    o1()
    assert call(halves).dtype == after
    amp.reset()
    o1()
    assert call(halves).dtype == before


def test_nothing_of_torch_is_replaced():
    before = {home: dict(vars(home)) for home in (torch, torch.Tensor, F)}
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(F, "softmax")
    amp.register_half_function(torch.Tensor, "exp")
    o1()
    assert {home: dict(vars(home)) for home in before} == before


def test_registering_sigmoid_makes_the_refused_loss_work(halves):
    """The commonest registration of all: apex's own advice for BCELoss."""
    amp.register_float_function(torch, "sigmoid")
    o1()
    assert nn.BCELoss()(torch.sigmoid(halves), torch.ones(2, 2)).dtype == torch.float32


def test_allow_banned_runs_the_refused_loss_in_float32(halves):
    o1()
    with pytest.raises(NotImplementedError, match=r"^amp does not work out-of-the-box with `F.binary_cross_entropy`"):
        F.binary_cross_entropy(halves, halves)
    o1(allow_banned=True)
    loss = F.binary_cross_entropy(halves / 2, halves)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.binary_cross_entropy(torch.full((2, 2), 0.5), torch.ones(2, 2)))


def test_batch_norm_can_be_registered_by_the_name_inside_the_module(halves):
    norm = nn.BatchNorm1d(2)
    o1()
    assert norm(halves).dtype == torch.float16
    amp.reset()
    amp.register_float_function(torch, "batch_norm")
    o1()
    assert norm(halves).dtype == torch.float32


def test_other_spellings_of_a_claimed_row_keep_their_row():
    registered = RegisteredFunctions()
    registered.add(CastPolicy.LOWER_PRECISION_FP, torch, "softmax")
    registered.add(CastPolicy.PROMOTE, torch.Tensor, "add")
    table = table_with(APEX, registered.all())
    assert table.rule(F.softmax).cast is table.rule(torch.softmax).cast is CastPolicy.LOWER_PRECISION_FP
    assert table.rule(torch.special.softmax).cast is CastPolicy.FP32
    assert table.rule(torch.Tensor.__add__).reason == APEX.rule(torch.Tensor.__add__).reason
    assert table.rule(torch.add).reason == "add: registered by the user as a promote function"
    assert table_with(APEX, ()) is APEX


def test_the_later_of_two_registrations_counts(halves):
    amp.register_half_function(torch, "exp")
    amp.register_float_function(torch, "exp")
    o1()
    assert torch.exp(halves).dtype == torch.float32


def test_what_was_named_counts_more_than_what_follows_from_a_name():
    registered = RegisteredFunctions()
    registered.add(CastPolicy.FP32, torch.Tensor, "relu")
    registered.add(CastPolicy.LOWER_PRECISION_FP, torch, "relu")
    table = table_with(APEX, registered.all())
    assert table.rule(torch.Tensor.relu).cast is CastPolicy.FP32
    assert table.rule(torch.relu).cast is table.rule(F.relu).cast is CastPolicy.LOWER_PRECISION_FP


@pytest.mark.parametrize(
    ("kind", "given", "seen"),
    [
        ("half", torch.float32, torch.float16),
        ("half", torch.bfloat16, torch.float16),
        ("half", torch.float64, torch.float64),
        ("half", torch.int64, torch.int64),
        ("float", torch.float16, torch.float32),
        ("float", torch.float64, torch.float64),
    ],
)
def test_a_function_of_the_user_casts_its_arguments(library, kind, given, seen):
    original = library.identity
    REGISTER[kind](library, "identity")
    assert library.identity is original
    o1()
    tensor, pair = torch.ones(2).to(given), (torch.ones(2).to(given), 3)
    (one, two, word), options = library.identity(tensor, pair, "text", key=tensor)
    assert [each.dtype for each in (one, two[0], options["key"])] == [seen] * 3
    assert (type(two), two[1], word) == (tuple, 3, "text")
    with amp.disable_casts():
        assert library.identity(tensor)[0][0] is tensor
    amp.reset()
    assert library.identity is original


def test_a_promoted_function_of_the_user_meets_one_dtype(library, halves):
    amp.register_promote_function(library, "identity")
    o1()
    args, options = library.identity(halves, halves.float(), other=halves)
    assert {each.dtype for each in (*args, *options.values())} == {torch.float32}
    assert library.identity(halves, halves)[0][0] is halves


def test_methods_and_static_methods(library, halves):
    amp.register_float_function(library.Pool, "forward")
    amp.register_float_function(library.Pool, "apply")
    before = dict(vars(library.Pool))
    o1()
    assert library.Pool().forward(halves, scale=halves)[1].dtype == torch.float32
    assert library.Pool.apply(halves).dtype == library.Pool().apply(halves).dtype == torch.float32
    amp.reset()
    assert dict(vars(library.Pool)) == before


def test_an_inherited_method_is_inherited_again_after_reset(library):
    child = type("Child", (library.Pool,), {})
    amp.register_half_function(child, "forward")
    o1()
    assert "forward" in vars(child)
    amp.reset()
    assert "forward" not in vars(child)


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_other_levels_leave_functions_alone(library, level):
    original = library.identity
    amp.register_half_function(library, "identity")
    amp.register_half_function(torch, "exp")
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert library.identity is original
    assert torch.exp(torch.ones(2)).dtype == torch.float32
    o1()  # they have waited
    assert library.identity is not original
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert library.identity is original


def test_a_cell_that_runs_twice_does_not_wrap_twice(library):
    original = library.identity
    for _ in range(3):
        amp.register_half_function(library, "identity")
        o1()
        assert library.identity.__wrapped__ is original


def test_two_sessions_count_their_hold_on_an_attribute(library):
    original, sessions = library.identity, [amp.Session(), amp.Session()]
    for session in sessions:
        session.register_function(CastPolicy.LOWER_PRECISION_FP, library, "identity")
        session.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    sessions[0].reset()
    assert library.identity.__wrapped__ is original
    sessions[1].reset()
    assert library.identity is original


def test_a_replacement_by_other_code_stays(library):
    amp.register_half_function(library, "identity")
    o1()
    library.identity = other = lambda: None
    amp.reset()
    assert library.identity is other


@pytest.mark.parametrize("owner", [torch, "library"])
def test_registering_too_late_warns_and_says_what_to_do(library, owner, halves):
    owner, name = (torch, "sigmoid") if owner is torch else (library, "identity")
    model = o1()
    with pytest.warns(UserWarning, match=rf"^{name} is registered after amp.initialize, .*: call amp.initialize again"):
        amp.register_float_function(owner, name)
    assert torch.sigmoid(halves).dtype == torch.float16
    o1(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.register_float_function(owner, name)  # a cell that runs again
    assert owner is not torch or torch.sigmoid(halves).dtype == torch.float32


def test_a_refused_initialize_changes_nothing(library):
    amp.register_half_function(library, "identity")
    model = o1()
    replaced = library.identity
    with pytest.raises(RuntimeError):
        o1(model, master_weights=True)
    assert library.identity is replaced


def test_a_copied_and_a_pickled_model_cast_by_the_same_rows(halves):
    amp.register_float_function(torch, "sigmoid")
    model = o1(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()))
    duplicates = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    amp.reset()
    seen = []
    for duplicate in duplicates:
        duplicate[0].register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
        assert duplicate(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [torch.float16] * 2


REFUSALS = [
    (torch, "no_such_op", ValueError, "No function named no_such_op in module <module 'torch'"),
    (torch, "float16", TypeError, "torch.float16 is of type dtype"),
    (nn, "Linear", TypeError, "torch.nn.Linear is a class"),
    (nn.init, "zeros_", ValueError, "torch.nn.init.zeros_ is a function of torch that function modes cannot"),
    (torch.utils.checkpoint, "checkpoint", ValueError, "wrap it in your own function"),
    (torch, 3, TypeError, "name=3: expected the name of a function"),
]


@pytest.mark.parametrize(("owner", "name", "error", "message"), REFUSALS, ids=[str(each[1]) for each in REFUSALS])
def test_refusals(owner, name, error, message):
    with pytest.raises(error) as refusal:
        amp.register_half_function(owner, name)
    assert message in str(refusal.value)
    o1()  # nothing of it has stayed


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_float_function_without_effect_is_named(library, level):
    amp.register_float_function(torch, "sigmoid")
    amp.register_promote_function(library, "identity")
    amp.register_half_function(torch, "exp")
    with pytest.warns(UserWarning, match="registered as a") as told:
        amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    first, second = (str(each.message) for each in told)
    assert first.startswith(f"torch.sigmoid is registered as a float function, which has no effect at {level}")
    assert "op_rules={'sigmoid': 'float32'}" in first
    assert "identity is registered as a promote function" in second
    assert {each.filename for each in told} == {__file__}
    with pytest.warns(UserWarning, match=rf"torch.exp is registered as a float function, .* at {level}"):
        amp.register_float_function(torch, "exp")


def test_what_the_warning_says_to_write_has_the_effect():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
    returned = []
    model[1].register_forward_hook(lambda _, args, output: returned.append(output.dtype))
    amp.initialize(model, opt_level="O2", verbosity=0, policy=PrecisionPolicy(op_rules={"sigmoid": "float32"}))
    model(torch.ones(2, 2))
    assert returned == [torch.float32]
