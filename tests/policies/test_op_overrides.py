"""Rules by op: what a name covers, what wins, what an engine does by them, and what is refused."""

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from amplab.policies import APEX, CastingEngine, CastPolicy, PrecisionPolicy, cpu_half, explaining
from amplab.policies.policy.op_overrides import OPERATORS, op_overrides, rules_by_function

X = torch.linspace(-2, 2, 16).reshape(4, 4)
HALF = X.half()


def run(func, *args, dtype=torch.float16, table=APEX, **rules):
    with CastingEngine(PrecisionPolicy(table, dtype, rules)).active():
        return func(*args)


def test_a_name_covers_every_spelling_and_a_spelling_only_itself():
    named = rules_by_function(op_overrides({"matmul": "fp32"}, APEX), APEX)
    assert {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.linalg.matmul} <= set(named)
    spelt = rules_by_function(op_overrides({torch.matmul: "fp32"}, APEX), APEX)
    assert set(spelt) == {torch.matmul}


def test_a_spellings_rule_beats_its_names():
    rules = {"softmax": torch.float32, F.softmax: "bfloat16"}
    with CastingEngine(PrecisionPolicy(op_rules=rules)).active():
        assert F.softmax(HALF, 0).dtype is torch.bfloat16
        assert torch.softmax(HALF, 0).dtype is torch.float32


def test_the_users_rule_wins_over_the_list():
    assert torch.equal(run(F.linear, X, X, linear="fp32"), F.linear(X, X))
    softmax = run(lambda x: F.softmax(x, 0), X, softmax="lower_precision_fp")
    assert torch.equal(softmax, F.softmax(HALF, 0))
    assert softmax.dtype is torch.float16
    bfloat16 = run(lambda x: x @ x, X, matmul="bfloat16")
    assert torch.equal(bfloat16, X.bfloat16() @ X.bfloat16())
    assert run(lambda x: x.exp(), HALF, exp="fall_through").dtype is torch.float16


def test_rules_reach_ops_on_no_list_and_policies_without_table():
    assert torch.equal(run(torch.relu, HALF, relu="float32"), torch.relu(HALF.float()))
    assert run(torch.exp, X, table=None, linear="float16").dtype is torch.float32
    assert run(F.linear, X, X, table=None, linear="float16").dtype is torch.float16


def test_without_lists_an_op_with_a_rule_returns_the_dtype_of_the_rule():
    softmax = run(lambda x: F.softmax(x, 0), HALF, table=None, softmax="float32")
    assert torch.equal(softmax, F.softmax(HALF.float(), 0))
    lowered = run(F.linear, X, X, table=None, linear="bfloat16")
    assert torch.equal(lowered, F.linear(X.bfloat16(), X.bfloat16()))
    product = run(lambda x: F.softmax(x, 0) @ x, HALF, table=None, softmax="float32")
    assert product.dtype is torch.float16


def test_on_request_it_returns_the_dtype_it_would_have_without():
    def restored(call, **rules):
        with CastingEngine(PrecisionPolicy(None, op_rules=rules, cast_outputs_back=True)).active():
            return call()

    softmax = restored(lambda: F.softmax(HALF, 0), softmax="float32")
    assert torch.equal(softmax, F.softmax(HALF.float(), 0).half())
    lowered = restored(lambda: F.linear(X, X), linear="bfloat16")
    assert torch.equal(lowered, F.linear(X.bfloat16(), X.bfloat16()).float())
    assert restored(lambda: torch.max(HALF, 0), max="float32").values.dtype is torch.float16


def test_a_composite_under_a_rule_computes_whole_in_that_precision():
    attention = torch.nn.MultiheadAttention(4, 2)
    expected = attention(X, X, X)[0]

    def attend():
        return attention(X, X, X)[0]

    assert run(attend).dtype is torch.float16
    assert torch.equal(run(attend, multi_head_attention_forward="float32"), expected)


def test_a_banned_op_says_whose_rule_it_was():
    with pytest.raises(
        NotImplementedError, match=r"exp is banned .*your rule, banned; the apex list has fp32.*remove the rule"
    ):
        run(torch.exp, HALF, exp="banned")
    assert run(torch.exp, X, exp="banned").dtype is torch.float32


def test_decisions_name_the_users_rule():
    policy = PrecisionPolicy(op_rules={"softmax": "bfloat16"})
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(watched.decision)
            return func(*args, **(kwargs or {}))

    with Watch(), CastingEngine(policy).active(), explaining() as watched:
        F.softmax(X, 0)
    first, *_, last = seen
    assert (first.kind, first.rule.by_user, first.detail) == ("cast", True, "cast to bfloat16")
    assert last.kind == "op"
    assert last.reason == "softmax: your rule, bfloat16; the apex list has fp32"


def test_half_products_keep_their_way_on_the_cpu():
    with cpu_half("fp32_accumulate"):
        expected = run(F.linear, X, X)
        assert torch.equal(run(F.linear, X, X, dtype=torch.bfloat16, linear="float16"), expected)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"sofmax": "fp32"}, r"'sofmax' is not an op of torch; did you mean .*'softmax'"),
        ({"torch.conv4d": "fp32"}, r"'torch.conv4d' is not an op of torch; did you mean 'conv"),
        ({"numpy.exp": "fp32"}, r"'numpy.exp' is not an op of torch"),
        ({len: "fp32"}, r"<built-in function len> is not an op of torch; expected a function such as torch.softmax"),
        ({lambda x: x: "fp32"}, r"is not an op of torch; .* module_rules"),
        ({3: "fp32"}, r"3 is not an op of torch"),
        ({"exp": torch.int8}, r"op_rules\['exp'\]=torch.int8: expected a dtype such as torch.float32, or one of"),
        ({"exp": "half"}, r"op_rules\['exp'\]='half': expected a dtype"),
        ({"sum": "fp32_set_opt_dtype"}, r"op_rules\['sum'\]='fp32_set_opt_dtype': expected a dtype"),
        ({"add_": "fp32"}, r"add_ is in-place, .*'add'"),
        ({"__iadd__": "float16"}, r"__iadd__ is in-place, .*'add'"),
        (
            {F.softmax: "fp32", "torch.nn.functional.softmax": "tf32"},
            r"softmax is float32 .* and tf32",
        ),
    ],
)
def test_refusals_say_what_is_allowed(rules, message):
    with pytest.raises(ValueError, match=message):
        PrecisionPolicy(op_rules=rules)


def test_in_place_ops_may_match_fall_through_or_be_banned():
    assert (
        rules_by_function(op_overrides({"add_": "banned"}, APEX), APEX)[torch.Tensor.add_][0].cast is CastPolicy.BANNED
    )


def test_a_function_is_named_as_it_was_given():
    assert str(PrecisionPolicy(op_rules={torch.mm: "float32"})) == "apex/float16; op torch.mm=float32"
    assert PrecisionPolicy(op_rules={torch.mm: "float32"}) == PrecisionPolicy(op_rules={"torch.mm": "float32"})


@pytest.mark.parametrize("name", ["__matmul__", "torch.Tensor.__add__", "__truediv__"])
def test_an_operator_that_runs_under_another_name_is_refused_with_that_name(name):
    with pytest.raises(ValueError, match=f"no effect.*'{OPERATORS[name.rpartition('.')[2]]}'"):
        op_overrides({name: "float32"}, APEX)


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_torch_runs_each_such_operator_under_the_other_name(operator):
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, seen = torch.ones(2, 2), []
    with Seen():
        getattr(x, operator)(x)
    assert [func.__name__ for func in seen] == [OPERATORS[operator]]
    assert seen[0] is not getattr(torch.Tensor, operator)


@pytest.mark.parametrize(
    "name", ["zeros", "torch.randn", "arange", "full", "to", "half", "new_zeros", torch.Tensor.float]
)
def test_a_rule_for_a_call_that_sets_its_own_dtype_is_refused(name):
    with pytest.raises(ValueError, match="sets the dtype"):
        op_overrides({name: "float32"}, APEX)
