"""Which op runs in which dtype, and why: op tables as data, and the engine that applies them.

    tables/     which list an op is on, and why: CastPolicy, OpRule, OpTable, and the lists APEX, TORCH_CUDA, TORCH_CPU
    policy/     PrecisionPolicy: a table, a compute dtype, and the user's rules by op and by module
    casting/    where tensors are cast: CastingEngine (plans made of steps, the weight-cast cache), CompiledEngine (the
                lists in C++), and what is switched on in a thread (thread_scopes, function_modes)
    modules/    where module rules apply: apply_policy and its hooks

What a rule computes keeps its dtype; `casting/mixed_arguments` casts the ops that get it with tensors of another dtype.

`nested_tensors` finds, replaces and casts the tensors in batches and outputs.
"""

from amplab.policies.casting.casting_state import CastingState, casting_state
from amplab.policies.casting.compiled_engine import CompiledEngine
from amplab.policies.casting.engine import CastingEngine
from amplab.policies.casting.explanation import Decision, Explanation
from amplab.policies.casting.half_on_cpu import accumulate_fp32
from amplab.policies.casting.steps import CastCache
from amplab.policies.casting.thread_scopes import (
    casting_engine,
    casts_enabled,
    cpu_half,
    cpu_half_mode,
    disable_casts,
    explaining,
    thread_engines,
)
from amplab.policies.modules.applied_policy import AppliedPolicy, accept_half_input, apply_policy, match_rnn_input
from amplab.policies.modules.module_regions import module_rule_at_work, register_module_rules
from amplab.policies.modules.recomputation import recomputing_by_rules
from amplab.policies.nested_tensors import cast_tree
from amplab.policies.policy.module_rules import ModuleRule
from amplab.policies.policy.op_overrides import OpOverride
from amplab.policies.policy.policy_rows import PolicyRows
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.policy.precisions import Precision
from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_names import TABLES
from amplab.policies.tables.op_table import CastPolicy, OpRule, OpTable
from amplab.policies.tables.torch_cpu_table import TORCH_CPU
from amplab.policies.tables.torch_cuda_table import TORCH_CUDA

__all__ = [
    "APEX",
    "AppliedPolicy",
    "CastCache",
    "CastPolicy",
    "CastingEngine",
    "CastingState",
    "CompiledEngine",
    "Decision",
    "Explanation",
    "ModuleRule",
    "OpOverride",
    "OpRule",
    "OpTable",
    "PolicyRows",
    "Precision",
    "PrecisionPolicy",
    "TABLES",
    "TORCH_CPU",
    "TORCH_CUDA",
    "accept_half_input",
    "accumulate_fp32",
    "apply_policy",
    "cast_tree",
    "casting_engine",
    "casting_state",
    "casts_enabled",
    "cpu_half",
    "cpu_half_mode",
    "disable_casts",
    "explaining",
    "match_rnn_input",
    "module_rule_at_work",
    "recomputing_by_rules",
    "register_module_rules",
    "thread_engines",
]
