"""What explaining() says while ops run, and that nothing is said otherwise."""

import threading

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.policies import CastingEngine, PrecisionPolicy, cpu_half, disable_casts, explaining


class Watch(TorchDispatchMode):
    """Notes the decision at every op."""

    def __init__(self, explanation):
        super().__init__()
        self.explanation, self.seen = explanation, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func.overloadpacket.__name__, self.explanation.decision))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watch():
    with cpu_half("native"), CastingEngine().active(), explaining() as explanation, Watch(explanation) as watch:
        yield watch
    assert explanation.decision is None


def test_casts_and_the_op_are_distinguished(watch):
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    watch.seen.clear()
    F.linear(x, weight)
    (_, first), (_, second), *_, (op, last) = watch.seen
    assert [decision.kind for decision in (first, second, last)] == ["cast", "cast", "op"]
    assert op == "mm"
    assert first.op == last.op == "linear"
    assert first.reason.startswith("cast to float16 for linear: products of two float16 values are exact in float32")
    assert last.reason == last.rule.reason


def test_reasons_for_fp32_promote_and_unlisted(watch):
    half = torch.ones(3, dtype=torch.float16)
    watch.seen.clear()
    F.softmax(half, 0)
    half + torch.ones(3)
    torch.relu(half)
    said = [(op, decision and (decision.kind, decision.reason)) for op, decision in watch.seen]
    assert (
        "_to_copy",
        (
            "cast",
            "cast to float32 for softmax: probabilities below 2^-25 are zero in float16",
        ),
    ) in said
    assert (
        "_softmax",
        (
            "op",
            "softmax: probabilities below 2^-25 are zero in float16",
        ),
    ) in said
    assert any(op == "_to_copy" and said[0] == "cast" and "widest" in said[1] for op, said in said)
    assert ("relu", ("op", "relu: on no list of apex/float16; runs in the dtype of its arguments")) in said
    assert watch.seen[-1][1].rule is None


def test_nothing_is_said_between_ops_or_after_errors(watch):
    with pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert watch.explanation.decision is None


def test_backward_reports_no_decision_of_its_own(watch):
    loss = F.linear(torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)).sum()
    watch.seen.clear()
    loss.backward()
    assert watch.seen
    assert {decision for op, decision in watch.seen if op != "ones_like"} == {None}  # that one is called from Python


def test_a_nested_block_yields_the_same_explanation(watch):
    with explaining() as again:
        assert again is watch.explanation
    F.softmax(torch.ones(3), 0)
    assert watch.seen[-1][1].op == "softmax"


def test_engines_entered_inside_report_too():
    with explaining() as explanation, Watch(explanation) as watch:
        torch.exp(torch.ones(1))
        with CastingEngine(PrecisionPolicy(compute_dtype=torch.bfloat16)).active():
            torch.mm(torch.ones(1, 1), torch.ones(1, 1))
            with disable_casts():
                torch.exp(torch.ones(1).half())
    decisions = {op: decision for op, decision in watch.seen if op in ("exp", "mm", "_to_copy")}
    assert watch.seen[1] == ("exp", None)
    assert decisions["mm"].rule.op == "mm"
    assert decisions["_to_copy"] is None or decisions["_to_copy"].op in ("mm", "to", "half")


def test_other_threads_do_not_report_here(watch):
    def work():
        with CastingEngine().active():
            torch.mm(torch.ones(1, 1), torch.ones(1, 1))
            seen.append(watch.explanation.decision)

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


def test_decisions_are_values():
    rule = PrecisionPolicy().explain(F.softmax)
    from amplab.policies import Decision

    assert Decision("softmax", rule, "op", "") == Decision("softmax", rule, "op", "")
