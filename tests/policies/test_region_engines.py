"""engine_for: one engine for equal arguments, and never that of another policy."""

import torch

from amplab.policies import OpTable, PrecisionPolicy
from amplab.policies.casting.region_engines import engine_for


def test_equal_arguments_get_one_engine():
    policy = PrecisionPolicy()
    engine = engine_for(policy, torch.bfloat16, "cpu", True)
    assert engine is engine_for(policy, torch.bfloat16, "cpu", True)
    assert engine.policy == PrecisionPolicy(compute_dtype=torch.bfloat16)
    assert (engine.device_type, engine.cache_enabled) == ("cpu", True)
    others = [(torch.float16, "cpu", True), (torch.bfloat16, "meta", True), (torch.bfloat16, "cpu", False)]
    assert len({id(engine), *(id(engine_for(policy, *other)) for other in others)}) == 4


def test_a_collected_policy_is_not_confused_with_a_new_one():
    for index in range(70):  # more than are kept
        table = OpTable(f"table {index}", ())
        engine = engine_for(PrecisionPolicy(table), torch.float16, "cpu", True)
        assert engine.policy.table is table
