"""A remedy is code in the words of the face in use, and it runs."""

import math

import pytest
import torch
from torch import nn

import amplab
from amplab.diagnose.remedies import in_float32
from amplab.trace import OpRecord


def record(op="matmul", module="attention", **fields):
    return OpRecord(0, op, f"aten.{op}.default", "forward", module, (), (), "", **fields)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("module", ["attention", "Net", ""])
def test_it_can_be_run_as_it_stands(level, module):
    model = nn.ModuleDict({"attention": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"amplab": amplab, "amp": amplab.amp, "model": model, "optimizer": optimizer}
    try:
        exec(in_float32(record(module=module), level=level).partition("# or")[0], names)
        assert amplab.amp.default_session().opt_level == (level if module == "attention" else "O1")
        assert model["attention"].weight.dtype == torch.float32
    finally:
        amplab.amp.reset()


def test_torchs_face_has_no_policy_to_set():
    assert in_float32(record(), level=None).startswith(
        "with torch.autocast(x.device.type, enabled=False):\n    y = matmul"
    )


def test_a_cast_is_left_out():
    assert in_float32(record("cast", is_cast=True), "note").splitlines()[1:] == [
        "    y = x.float()  # and go on in float32",
        "# note",
    ]


def test_an_op_that_no_rule_can_name_is_mended_where_it_is():
    assert "policy" not in in_float32(record("getitem_of_mine", ""))


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

    return loss_fn().item(), amplab.doctor(names["model"], loss_fn, optimizers=names["optimizer"])


@pytest.mark.parametrize(
    ("kind", "level", "words"),
    [
        ("exp", "O2", "O1"),
        ("exp", "O3", "O1"),
        ("nested", "O2", "'body'"),
        ("nested", "O3", "'body'"),
        ("large", "O1", "'linear'"),
        ("large", "O2", "'linear'"),
        ("large", "O3", "'linear'"),
    ],
)
def test_pasted_it_makes_the_loss_finite(kind, level, words):
    try:
        loss, findings = overflowing(kind, level)
        assert not math.isfinite(loss)
        assert words in findings[0].remedy
        assert ("A softmax reads them" in findings[0].cause) == (kind == "large")
        amplab.amp.reset()
        mended, _ = overflowing(kind, level, findings[0].remedy.partition("# or around")[0])
        assert math.isfinite(mended)
    finally:
        amplab.amp.reset()


def test_a_cast_under_half_weights_goes_to_bfloat16():
    assert "cast_model_type=torch.bfloat16" in in_float32(record("cast", is_cast=True), level="O2")
