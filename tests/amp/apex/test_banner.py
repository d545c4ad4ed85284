"""What initialize prints, as text."""

import torch
from expecttest import assert_expected_inline

from amplab.amp import OPT_LEVELS, Session
from amplab.amp.apex.banner import banner


def printed(capsys, level, **overrides):
    model = torch.nn.Linear(2, 2)
    Session().initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, **overrides)
    return capsys.readouterr().out


def test_o0(capsys):
    assert_expected_inline(
        printed(capsys, "O0"),
        """\
Selected optimization level O0:  Pure FP32 training.

Defaults for this optimization level are:
enabled                : True
opt_level              : O0
cast_model_type        : torch.float32
patch_torch_functions  : False
keep_batchnorm_fp32    : None
master_weights         : False
loss_scale             : 1.0
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                : True
opt_level              : O0
cast_model_type        : torch.float32
patch_torch_functions  : False
keep_batchnorm_fp32    : None
master_weights         : False
loss_scale             : 1.0
""",
    )


def test_o1_with_an_override(capsys):
    assert_expected_inline(
        printed(capsys, "O1", loss_scale="128.0"),
        """\
Selected optimization level O1:  Insert automatic casts around Pytorch functions and Tensor methods.

Defaults for this optimization level are:
enabled                : True
opt_level              : O1
cast_model_type        : None
patch_torch_functions  : True
keep_batchnorm_fp32    : None
master_weights         : None
loss_scale             : dynamic
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                : True
opt_level              : O1
cast_model_type        : None
patch_torch_functions  : True
keep_batchnorm_fp32    : None
master_weights         : None
loss_scale             : 128.0
""",
    )


def test_o2_with_overrides(capsys):
    assert_expected_inline(
        printed(capsys, "O2", keep_batchnorm_fp32="False", master_weights=False),
        """\
Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master weights.

Defaults for this optimization level are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : True
master_weights         : True
loss_scale             : dynamic
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : False
master_weights         : False
loss_scale             : dynamic
""",
    )


def test_o3_has_no_blank_line(capsys):
    assert_expected_inline(
        "\n".join(printed(capsys, "O3").splitlines()[:3]),
        """\
Selected optimization level O3:  Pure FP16 training.
Defaults for this optimization level are:
enabled                : True""",
    )


def test_nothing_at_verbosity_0(capsys):
    assert printed(capsys, "O2", verbosity=0) == ""


def test_nothing_when_disabled(capsys):
    assert printed(capsys, "O2", enabled=False) == ""


def test_only_rank_0_of_a_group_prints(capsys):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank, first_line in ((0, "Selected optimization level O0:  Pure FP32 training."), (1, "")):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            assert printed(capsys, "O0").partition("\n")[0] == first_line
        finally:
            torch.distributed.destroy_process_group()


def test_banner_is_the_text_of_a_level_and_its_properties():
    level = OPT_LEVELS["O3"]
    lines = banner(level, level.properties).split("\n")
    assert lines[2:9] == lines[11:18] == level.properties.lines()
