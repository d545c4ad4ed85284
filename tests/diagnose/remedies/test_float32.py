"""A remedy is code in the words of the face in use, and it runs."""

import math

import pytest
import torch
from torch import nn

import amplab
from amplab.amp import Session
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.remedies.float32 import in_float32, kept_in_float32
from amplab.trace import OpRecord


def record(op="matmul", module="attention", **fields):
    return OpRecord(0, op, f"aten.{op}.default", "forward", module, (), (), "", **fields)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("module", ["attention", "Net", ""])
def test_it_runs_as_printed(level, module):
    model = nn.ModuleDict({"attention": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"amplab": amplab, "amp": amplab.amp, "model": model, "optimizer": optimizer}
    try:
        exec(in_float32(record(module=module), api=Api.of_opt_level(level)).partition("# or")[0], names)
        assert amplab.amp.default_session().opt_level == level
        ruled = level == "O1" or module == "attention"
        assert model["attention"].weight.dtype == (torch.float32 if ruled else torch.float16)
    finally:
        amplab.amp.reset()


REGIONS = {
    ApiStyle.APEX: lambda session: session.casting(),
    ApiStyle.AMPLAB: lambda _: amplab.autocast("cpu", torch.float16),
    ApiStyle.TORCH: lambda _: torch.autocast("cpu", torch.float16),
}


@pytest.mark.parametrize("casting", REGIONS)
def test_a_block_ends_the_casts_that_are_in_use(casting):
    """What torch.autocast does is not ended by amplab's, nor the other way round."""
    session, x = Session(), torch.full((2, 4000), 60.0)
    session.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    block = in_float32(record(module=""), api=Api(casting=casting)).partition("# or around that line alone:\n")
    names = {"amplab": amplab, "amp": amplab.amp, "torch": torch, "x": x, "other": x.t()}
    try:
        with REGIONS[casting](session):
            assert torch.matmul(x, x.t()).isinf().all()
            exec(block[2] or block[0], names)
        assert names["y"].dtype == torch.float32
        assert names["y"].isfinite().all()
    finally:
        session.reset()


def test_torchs_face_has_no_policy_to_set():
    assert in_float32(record(), api=Api(casting=ApiStyle.TORCH)).startswith(
        "with torch.autocast(x.device.type, enabled=False):\n    y = torch.matmul(x.float(), other.float())"
    )


def test_a_cast_is_left_out():
    assert in_float32(record("cast", is_cast=True), "note").splitlines()[1:] == [
        "    y = x.float()  # and continue in float32",
        "# note",
    ]


def test_an_op_that_no_rule_can_name_is_fixed_in_place():
    assert "policy" not in in_float32(record("getitem_of_mine", ""))


TAKES = {  # op: (what the dispatcher calls it, the other operand of x of 4 x 4, the result)
    "sum": ("aten.sum.default", None, lambda x, _: x.sum()),
    "mean": ("aten.mean.dim", None, lambda x, _: x.mean(-1)),
    "add": ("aten.add.Tensor", torch.ones(4, 4), torch.add),
    "mul": ("aten.mul.Tensor", 3.0, torch.mul),
    "pow": ("aten.pow.Tensor_Scalar", 2, torch.pow),
    "exp": ("aten.exp.default", None, lambda x, _: x.exp()),
    "matmul": ("aten.mm.default", torch.ones(4, 4).half(), lambda x, other: x @ other.float()),
    "linear": ("aten.addmm.default", torch.ones(4, 4).half(), lambda x, other: x @ other.float()),
    "softmax": ("aten._softmax.default", None, lambda x, _: x.softmax(-1)),
    "log_softmax": ("aten._log_softmax.default", None, lambda x, _: x.log_softmax(-1)),
    "layer_norm": ("aten.native_layer_norm.default", None, lambda x, _: nn.functional.layer_norm(x, (4,))),
    "cross_entropy": ("aten.nll_loss_forward.default", torch.arange(4), nn.functional.cross_entropy),
    "clamp": ("aten.clamp.default", None, lambda x, _: x),
    "baddbmm": ("aten.baddbmm.default", None, lambda x, _: x),
    "call_of_mine": ("mine.call.default", None, lambda x, _: x),
}


@pytest.mark.parametrize("op", TAKES)
@pytest.mark.parametrize("casting", ["APEX", "APEX_HALF", "HALF", "AMPLAB", "TORCH"])
def test_a_line_runs_with_nothing_but_x_and_other(op, casting):
    """All of it compiles, and the line for the place alone gives what torch does in float32."""
    aten, other, expected = TAKES[op]
    called = OpRecord(0, op, aten, "forward", "", (), (), "")
    x = torch.linspace(-1, 1, 16).view(4, 4).half()
    api = Api(casting=ApiStyle[casting])
    for code in in_float32(called, api=api), kept_in_float32(called, api=api):
        compile(code, "remedy", "exec")
        lines = [line for line in code.splitlines() if line.startswith(("with", "    y =", "y ="))]
        names = {"amplab": amplab, "amp": amplab.amp, "torch": torch, "x": x, "other": other}
        if lines:
            exec("\n".join(lines), names)
            torch.testing.assert_close(names["y"], expected(x.float(), other))


class Exp(nn.Module):
    """Weights by exp over its sum, which in half is inf over inf."""

    def __init__(self, body=None):
        super().__init__()
        self.body = body or nn.Linear(8, 8)

    def forward(self, x):
        logits = self.body(x)
        return logits if isinstance(self.body, Exp) else logits.exp() / logits.exp().sum(-1, keepdim=True)


class Large(nn.Module):
    """Logits beyond half's range, which a softmax reads in the next module."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.softmax = nn.Softmax(-1)

    def forward(self, x):
        return self.softmax(self.body(x))


class Variance(nn.Module):
    """A norm whose variance is taken as E[x^2] - E[x]^2; `variance` is a line that takes it instead."""

    def __init__(self, variance=None):
        super().__init__()
        self.body, self.head = nn.Linear(32, 64), nn.Linear(64, 8)
        self.variance = variance

    def forward(self, x):
        x = self.body(x)
        mean = x.mean(-1, keepdim=True)
        names = {"x": x, "variance": (x * x).mean(-1, keepdim=True) - mean * mean}
        exec(self.variance or "", names)
        return self.head((x - mean) * torch.rsqrt(names["variance"] + 1e-5))


def variance_loss(level, line=None, policy=None, nested=False):
    torch.manual_seed(0)
    inner = Variance(line)
    model = nn.Sequential(inner, nn.Linear(8, 8)) if nested else inner
    with torch.no_grad():
        inner.body.bias.add_(120.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 32), torch.arange(16) % 8
    names = {"amplab": amplab, "amp": amplab.amp, "torch": torch, "model": model, "optimizer": optimizer}
    exec(policy or f"amp.initialize(model, optimizer, opt_level={level!r}, verbosity=0)", names)

    def loss_fn():
        return nn.functional.cross_entropy(model(x).float(), y)

    return loss_fn().item(), amplab.doctor(model, step=loss_fn, optimizer=optimizer)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_variance_by_hand_is_found_and_fixed(level, nested):
    try:
        loss, findings = variance_loss(level, nested=nested)
        assert math.isnan(loss)
        assert (findings[0].name, findings[0].op) == ("variance-in-half", "rsqrt")
        rule, _, line = findings[0].remedy.rpartition("# or\n")
        assert bool(rule) == nested
        amplab.amp.reset()
        assert math.isfinite(variance_loss(level, line, nested=nested)[0])
        if nested:
            amplab.amp.reset()
            assert math.isfinite(variance_loss(level, policy=rule, nested=True)[0])
    finally:
        amplab.amp.reset()


def test_zeros_are_said_to_be_of_the_format_that_made_them():
    """The logarithm runs in float32; what it reads was half before."""
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    with torch.no_grad():
        model.weight.mul_(30)
    x = torch.randn(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amplab.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    try:
        findings = amplab.doctor(
            model, step=lambda: torch.log(torch.softmax(model(x).half(), -1).half() + 0.0).mean(), optimizer=optimizer
        )
        assert findings[0].name == "log-of-zero"
        assert "round to 0 in float16" in findings[0].cause
    finally:
        amplab.amp.reset()


def overflowing(kind, level, policy_of=None):
    """A model whose loss is NaN in half, initialized by `policy_of` where given; its loss, and the first finding."""
    torch.manual_seed(0)
    model = {"exp": Exp, "nested": lambda: Exp(Exp()), "large": Large}[kind]()
    with torch.no_grad():
        linear = next(each for each in model.modules() if isinstance(each, nn.Linear))
        linear.bias.add_(14)
        linear.weight.mul_(60000 if kind == "large" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"amplab": amplab, "amp": amplab.amp, "torch": torch, "model": model, "optimizer": optimizer}
    start = f"model, optimizer = amp.initialize(model, optimizer, opt_level={level!r}, verbosity=0)"
    exec(policy_of or start, names)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def loss_fn():
        return nn.functional.cross_entropy(names["model"](x).float(), torch.arange(8))

    return loss_fn().item(), amplab.doctor(names["model"], step=loss_fn, optimizer=names["optimizer"])


@pytest.mark.parametrize(
    ("kind", "level", "words"),
    [
        ("exp", "O2", "op_rules={'exp': 'float32'}"),
        ("exp", "O3", "op_rules={'exp': 'float32'}"),
        ("nested", "O2", "'body'"),
        ("nested", "O3", "'body'"),
        ("large", "O1", "module_rules={'body': 'float32'}"),
        ("large", "O2", "module_rules={'body': 'float32'}"),
        ("large", "O3", "module_rules={'body': 'float32'}"),
    ],
)
def test_pasted_it_makes_the_loss_finite(kind, level, words):
    try:
        loss, findings = overflowing(kind, level)
        assert not math.isfinite(loss)
        assert words in findings[0].remedy
        assert f'opt_level="{level}", policy=policy' in findings[0].remedy
        assert ("A softmax reads it" in findings[0].cause) == (kind == "large")
        amplab.amp.reset()
        mended, _ = overflowing(kind, level, findings[0].remedy.partition("# or around")[0])
        assert math.isfinite(mended)
    finally:
        amplab.amp.reset()


def test_a_cast_under_half_weights_goes_to_bfloat16():
    assert "cast_model_type=torch.bfloat16" in in_float32(record("cast", is_cast=True), api=Api.of_opt_level("O2"))
