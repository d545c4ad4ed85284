"""The reason of every kind of op, in words."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.amp import Session
from amplab.policies import APEX, CastingEngine, PrecisionPolicy, cpu_half, disable_casts
from amplab.trace import trace_step
from amplab.trace.reasons import lazy_records_of, records_of
from amplab.trace.step import record_step


class Free(nn.Module):
    """Runs any function of one float32 weight of shape (4, 4)."""

    def __init__(self, run, dtype=torch.float32):
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.eye(4, dtype=dtype)), run

    def forward(self):
        return self.run(self.weight)


def forward(run, *, policy=None, dtype=torch.float32):
    """The records of `run` in forward that a table shows, the closing sum left out."""
    model = Free(run, dtype)
    context = {} if policy is None else {"casting": CastingEngine(policy).active()}
    trace = trace_step(model, lambda: model().float().sum(), **context)
    return [record for record in trace if record.phase == "forward" and record.module and not record.folds]


O1 = PrecisionPolicy()


def test_a_listed_op_gives_its_list_and_row():
    cast, product = forward(lambda w: F.linear(w, w), policy=O1)
    assert cast.reason == "cast to float16 for linear: lower_precision_fp list"
    assert product.reason == f"lower_precision_fp list, {APEX.rule(F.linear).reason}"
    _, raised, softmax = forward(lambda w: torch.softmax(w.half(), 0), policy=O1)
    assert raised.reason == "cast to float32 for softmax: fp32 list"
    assert softmax.reason == f"fp32 list, {APEX.rule(torch.softmax).reason}"


def test_an_op_in_no_list_falls_through():
    (relu,) = forward(torch.relu, policy=O1)
    assert relu.reason == "in no list: runs in its input dtype"
    *_, relu = forward(lambda w: torch.relu(w.half()), policy=O1)
    assert relu.reason == "in no list: runs in its input dtype: the code requested float16: half"
    *_, relu = forward(lambda w: torch.relu(w @ w), policy=O1)
    assert relu.reason == "in no list: runs in its input dtype, float16 from matmul"
    assert relu.outputs[0].dtype == torch.float16


def test_promotion_by_the_list_and_by_torch():
    _, widened, added = forward(lambda w: w.half() + w, policy=O1)
    assert widened.reason == "cast to the widest dtype of the arguments for add: promote list"
    assert added.reason == f"promote list, {APEX.rule(torch.add).reason}"
    (added,) = forward(lambda w: w + w, policy=O1)
    assert added.reason == "promote list, add: its arguments are already float32"
    _, added = forward(lambda w: w.half() + w)
    assert added.reason == "no op list applies: torch promotes float16 and float32 to float32"
    assert added.outputs[0].dtype == torch.float32


def test_without_a_table_every_op_runs_as_it_comes():
    for policy in (None, PrecisionPolicy(table=None)):
        (product,) = forward(lambda w: w @ w, policy=policy)
        assert product.reason == "no op list applies: runs in its input dtype"
        (product,) = forward(lambda w: w @ w, policy=policy, dtype=torch.float16)
        assert product.reason == "runs in float16, the dtype of the weights of the model"


@pytest.mark.parametrize(
    ("level", "dtype", "why"),
    [
        ("O1", "float32", f"fp32 list, {APEX.rule(F.cross_entropy).reason}"),
        ("O2", "float32", "runs in its input dtype: a hook on Sequential cast its output to float32"),
    ],
)
def test_the_reason_of_a_loss_names_what_decided(level, dtype, why):
    model, session = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Session()
    session.initialize(model, opt_level=level, verbosity=0)
    labels = torch.zeros(2, dtype=torch.int64)
    trace = trace_step(model, lambda: F.cross_entropy(model(torch.ones(2, 4)), labels), casting=session.casting())
    softmax, loss = (
        each for each in trace if each.op == "cross_entropy" and each.phase == "forward" and not each.is_view
    )
    assert [info.dtype_name for info in softmax.outputs] == [dtype]
    assert softmax.reason == loss.reason == why


def test_at_o2_ops_run_in_the_dtype_of_the_weights_and_of_the_ops_before():
    model, session = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Session()
    session.initialize(model, opt_level="O2", verbosity=0)
    trace = trace_step(model, lambda: model(torch.ones(2, 4)).sum(), casting=session.casting())
    linear = "runs in float16, the dtype of the weights of 0; a hook on Sequential cast its input to float16"
    assert reasons(trace, "0") == [linear]
    assert reasons(trace, "1") == ["runs in its input dtype, float16 from linear; the weights of 0 are float16"]


def test_no_table_applies_while_casts_are_disabled():
    def run(w):
        with disable_casts():
            return w @ w

    (product,) = forward(run, policy=O1)
    assert product.reason == "no op list applies: runs in its input dtype"
    assert product.outputs[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda w: w.half(), "requested in the code: half"),
        (lambda w: w.to(torch.bfloat16), "requested in the code: to"),
        (lambda w: w.type(torch.float64), "requested in the code: type"),
        (lambda w: torch.zeros(4, 4, dtype=torch.float16).copy_(w), "requested in the code: copy_"),
    ],
)
@pytest.mark.parametrize("policy", [None, O1])
def test_casts_that_the_code_asks_for(run, reason, policy):
    cast = next(record for record in forward(run, policy=policy) if record.is_cast)
    assert cast.op == "cast"
    assert cast.reason == reason


def test_casts_of_hooks_say_so(scenario):
    model, loss = scenario("mlp")
    session = Session()
    session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    first, last = (record for record in trace_step(model, loss).casts if record.phase == "forward")
    assert first.reason == "a hook on Mlp casts its input to float16"
    assert last.reason == "a hook on Mlp casts its output to float32"
    session.reset()


def test_views_and_integers_have_nothing_to_decide():
    model = Free(lambda w: w.t() + torch.arange(4).add(1) + torch.empty(4).zero_().unsqueeze_(0))
    trace = trace_step(model, lambda: model().sum())
    reasons = {record.op: record.reason for record in trace if record.phase == "forward"}
    assert reasons["t"] == "a view: computes nothing"
    assert reasons["unsqueeze_"] == reasons["empty"] == "a view: computes nothing"
    assert reasons["arange"] == "reads no floating-point tensor"


def test_backward_starts_from_one_and_the_scale_is_named():
    model = Free(torch.exp, torch.float16)
    trace = trace_step(model, lambda: model().sum(), loss_scale=4.0)
    scaling = [record for record in trace if "small gradients" in record.reason]
    assert [(record.op, record.outputs[0].dtype) for record in scaling] == [
        ("cast", torch.float32),
        ("scale_loss", torch.float32),
    ]
    seed = next(record for record in trace if record.phase == "backward")
    assert (seed.op, seed.reason) == ("backward", "start of backward: the gradient of the loss is 1")


def test_the_mirror_of_a_cast_is_a_cast():
    model = Free(lambda w: F.linear(w, w))
    trace = trace_step(model, lambda: model().sum(), casting=CastingEngine(O1).active())
    there, back = (next(record for record in trace.casts if record.phase == phase) for phase in ("forward", "backward"))
    assert back.reason.startswith("gradient of cast #")
    assert (there.outputs[0].dtype, trace.casts[-1].outputs[0].dtype) == (torch.float16, torch.float32)


def test_a_gradient_that_autograd_casts_by_itself():
    model = Free(lambda w: w * torch.ones(4, 4, dtype=torch.float64))
    trace = trace_step(model, lambda: model().sum())
    (cast,) = trace.casts
    assert cast.phase == "backward"
    assert cast.reason.startswith("autograd casts the gradient to the input dtype of mul #")


@pytest.mark.parametrize("mode", ["fp32_accumulate", "native"])
def test_casts_inside_an_op_count_nowhere(mode):
    """Attention of matrices takes torch's own route on the CPU, which computes in float32."""
    model = Free(lambda w: F.scaled_dot_product_attention(w, w, w), torch.float16)
    engine = CastingEngine(PrecisionPolicy(table=None))
    with cpu_half(mode):
        trace = trace_step(model, lambda: model().sum(), casting=engine.active())
    inner = [record for record in trace if "inside the op" in record.note]
    assert {(record.op, record.phase) for record in inner} == {
        ("scaled_dot_product_attention", "forward"),
        ("scaled_dot_product_attention", "backward"),
    }
    assert trace.casts == ()
    assert trace.cast_bytes == 0


def test_mixed_dtypes_of_one_op_are_not_a_promotion():
    model = nn.BatchNorm1d(4)
    x = torch.ones(3, 4, dtype=torch.float16, requires_grad=True)
    trace = trace_step(model, lambda: model(x).float().square().sum())
    norm = next(record for record in trace if record.op == "batch_norm" and not record.folds)
    assert {info.dtype for info in norm.inputs} == {torch.float16, torch.float32}
    assert norm.reason == "no op list applies: runs in its input dtype"  # the caller's own float16 batch


def reasons(trace, module):
    return [
        record.reason for record in trace if record.module == module and record.phase == "forward" and not record.folds
    ]


@pytest.mark.parametrize(
    ("level", "after"),
    [
        ("O1", "lower_precision_fp list, " + APEX.rule(F.linear).reason),
        ("O2", "lower_precision_fp list, linear: its arguments came in different dtypes"),
    ],
)
@pytest.mark.parametrize("cast_outputs_back", [False, True])
def test_a_module_rule_is_the_reason_inside_and_at_its_borders(level, after, cast_outputs_back):
    model, session = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), Session()
    policy = PrecisionPolicy(module_rules={"1": "float32"}, cast_outputs_back=cast_outputs_back)
    session.initialize(model, opt_level=level, verbosity=0, policy=policy)
    trace = trace_step(model, lambda: model(torch.ones(2, 4)).float().sum(), casting=session.casting())
    assert reasons(trace, "1") == [
        "your rule 1=float32: the inputs of 1 are cast to float32",
        "your rule 1=float32 in 1: no casts: runs in its input dtype",
        *(["your rule 1=float32: the outputs of 1 are cast to float16"] if cast_outputs_back else []),
    ]
    if not cast_outputs_back:
        assert "cast to float16 for linear: lower_precision_fp list" in reasons(trace, "2")
        assert after in reasons(trace, "2")
    assert not any("rule" in reason for reason in (*reasons(trace, "0"), *reasons(trace, "2")))


def test_a_lower_rule_names_itself_and_the_list():
    model, session = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)), Session()
    policy = PrecisionPolicy(module_rules={"1": "bfloat16"})
    session.initialize(model, opt_level="O1", verbosity=0, policy=policy)
    trace = trace_step(model, lambda: model(torch.ones(2, 4)).float().sum(), casting=session.casting())
    assert reasons(trace, "1") == [
        "your rule 1=bfloat16: the inputs of 1 are cast to bfloat16",
        "your rule 1=bfloat16 in 1: cast to bfloat16 for linear: lower_precision_fp list",
        f"your rule 1=bfloat16 in 1: lower_precision_fp list, {APEX.rule(F.linear).reason}",
    ]


def test_an_op_rule_is_the_reason():
    cast, softmax = forward(lambda w: F.softmax(w, 0), policy=PrecisionPolicy(op_rules={"softmax": "bfloat16"}))
    assert cast.reason == "cast to bfloat16 for softmax: your rule"
    assert softmax.reason == "softmax: your rule, bfloat16; the apex list has fp32"
    policy = PrecisionPolicy(None, op_rules={"softmax": "bfloat16"}, cast_outputs_back=True)
    there, _, back = forward(lambda w: F.softmax(w, 0), policy=policy)
    assert there.reason == back.reason == "cast to bfloat16 and back for softmax: your rule"


def test_a_simulated_op_is_shown_as_simulated():
    policy = PrecisionPolicy(compute_dtype="float8_e4m3")
    *rounded, product, result = forward(lambda w: F.linear(w, w), policy=policy)
    for record in (*rounded, result):
        assert record.op == "round_to_format"
        assert (
            record.reason == "rounded to float8_e4m3 (simulated: float32 tensors) for linear: lower_precision_fp list"
        )
    assert product.reason.endswith("; simulated in float8_e4m3: float32 tensors, values rounded")
    model = Free(lambda w: F.linear(w, w))
    trace = trace_step(model, lambda: model().sum(), casting=CastingEngine(policy).active())
    backward = {record.reason for record in trace if record.phase == "backward" and record.op == "round_to_format"}
    assert backward == {"simulated format: the gradient is rounded, too"}


@pytest.mark.parametrize("engine", [None, "apex/float16", "apex/bfloat16"])
def test_records_do_not_depend_on_the_order_of_reading(scenario, every_model, engine):
    model, loss = scenario(every_model)
    context = {} if engine is None else {"casting": CastingEngine(PrecisionPolicy.parse(engine)).active()}
    events = record_step(model, loss, **context)
    whole = records_of(events)
    backwards = lazy_records_of(events)
    assert tuple(backwards[index] for index in reversed(range(len(events))))[::-1] == whole
    assert [record.line for record in backwards] == [record.line for record in whole]
    assert lazy_records_of(events) == whole


def test_a_long_run_of_promotions_is_read_from_its_end():
    """One record asks for what came before it: a thousand of them must not ask one after the other."""
    model = Free(lambda x: sum([x] * 1500, x))
    events = record_step(model, lambda: model().sum(), casting=CastingEngine().active())
    assert "already float" in lazy_records_of(events)[1499].reason
