"""What lesson 05 shows of lists, levels and module rules, and what its checks say to right and wrong answers."""

import pytest
import torch

from amplab.lab import ExperimentConfig, Trainer
from amplab.lessons.lesson_05 import (
    check_dtypes_at_o1,
    check_float32_rule,
    check_saving_rule,
    op_on_lists,
    transformer_run,
    xray_at,
)
from amplab.policies import TABLES, PrecisionPolicy

RIGHT_DTYPES = {
    "wide @ wide": "float16",
    "half.exp()": "float32",
    "half.relu()": "float16",
    "half + wide": "float32",
    "half.mean()": "float16",
}


def test_an_op_is_shown_on_every_list_with_its_reason() -> None:
    shown = op_on_lists("exp")
    assert list(shown.rows) == list(TABLES)
    assert shown.rows["apex"] == ("float32", "overflows float16 above 11.09 and underflows to zero below -17.33")
    assert repr(shown).startswith("exp: apex float32; torch_cuda float32; torch_cpu the dtype that arrives")
    assert "refused" in repr(op_on_lists("binary_cross_entropy"))
    assert "<table" in shown._repr_html_()


def test_the_xray_casts_at_each_op_at_o1_and_at_the_ends_of_the_model_at_o2() -> None:
    casts = {level: len(xray_at(level).casts) for level in ("O0", "O1", "O2", "O3")}
    assert casts["O0"] == 0
    assert casts["O1"] > casts["O2"] == casts["O3"] > 0


def test_a_module_rule_saves_the_run_as_o1_does() -> None:
    broken, saved = transformer_run(), transformer_run("block?.attention")
    assert broken.skipped.index(True) < 40
    assert broken.lost > 10
    assert repr(broken) == "<most of the last 20 steps skipped>"
    assert saved.lost == 0
    assert repr(saved) == "<none of the last 20 steps skipped>"
    config = ExperimentConfig(task="text", model="handmade-softmax", hidden=64, batch_size=4, lr=0.02, opt_level="O1")
    assert Trainer(config).run(60).skip_count == 0


def test_the_dtypes_of_an_answer_are_compared_with_those_of_real_ops() -> None:
    assert check_dtypes_at_o1(RIGHT_DTYPES).right
    assert check_dtypes_at_o1({op: dtype.replace("float16", "half") for op, dtype in RIGHT_DTYPES.items()}).right
    assert check_dtypes_at_o1({op: getattr(torch, dtype) for op, dtype in RIGHT_DTYPES.items()}).right
    assert "wide @ wide does not return float32" in repr(check_dtypes_at_o1({**RIGHT_DTYPES, "wide @ wide": "float"}))
    assert "'narrow' is not a dtype, such as 'float16'" in repr(
        check_dtypes_at_o1({**RIGHT_DTYPES, "half.exp()": "narrow"})
    )
    assert "half.mean() does not return float32" in repr(check_dtypes_at_o1({**RIGHT_DTYPES, "half.mean()": "float32"}))
    assert "the answer lacks 'half.exp()'" in repr(check_dtypes_at_o1({"wide @ wide": "float16"}))
    assert "Not answered yet" in repr(check_dtypes_at_o1(dict.fromkeys(RIGHT_DTYPES, ...)))  # type: ignore[arg-type]


def test_a_rule_for_matmul_leaves_the_other_ops_alone() -> None:
    assert check_float32_rule(PrecisionPolicy(op_rules={"matmul": torch.float32})).right
    assert "matmul is still lower_precision_fp" in repr(check_float32_rule(PrecisionPolicy()))
    rule = {"matmul": torch.float32}
    for more in ("linear", "bmm"):
        both = PrecisionPolicy(op_rules={**rule, more: torch.float32})
        assert f"{more} has changed too, to float32" in repr(check_float32_rule(both))
    in_bfloat16 = PrecisionPolicy(compute_dtype=torch.bfloat16, op_rules=rule)
    assert "has changed too, to bfloat16" in repr(check_float32_rule(in_bfloat16))
    modules = PrecisionPolicy(op_rules=rule, module_rules={"*": torch.float32})
    assert "also has rules for modules" in repr(check_float32_rule(modules))
    assert "is not a PrecisionPolicy" in repr(check_float32_rule({"matmul": torch.float32}))  # type: ignore[arg-type]


def test_a_pattern_saves_the_run_and_leaves_most_weights_half() -> None:
    assert check_saving_rule("*.attention").right
    assert "which module computes exp" in repr(check_saving_rule("output"))
    assert "name fewer modules" in repr(check_saving_rule("*"))
    assert "has the letters 'block'" in repr(check_saving_rule("block?.attention"))
    assert "is not a string: write a pattern" in repr(check_saving_rule(["*.attention"]))  # type: ignore[arg-type]
    assert "matches no module" in repr(check_saving_rule("attention"))


@pytest.mark.parametrize("check", [check_dtypes_at_o1, check_float32_rule, check_saving_rule])
def test_an_exercise_without_an_answer_says_so(check: object) -> None:
    assert "Not answered yet" in repr(check(...))  # type: ignore[operator]
