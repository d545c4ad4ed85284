"""A remedy is code in the words of the face in use, and it runs."""

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
        assert amplab.amp.default_session().opt_level == level
        if level == "O2":
            assert model["attention"].weight.dtype == (torch.float32 if module == "attention" else torch.float16)
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
