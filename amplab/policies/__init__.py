"""Which op runs in which dtype, and why: op tables as data, and the engine that casts by them.

Reading order: CastPolicy (the kinds of cast), OpRule and OpTable (rows with reasons), APEX, TORCH_CUDA and
TORCH_CPU (the lists), PrecisionPolicy (a table with a compute dtype), CastingEngine (carries it out),
CompiledEngine (carries it out in C++).
"""

from amplab.policies.apex_table import APEX
from amplab.policies.aten_accumulate import accumulate_fp32
from amplab.policies.cast_cache import CastCache
from amplab.policies.cast_policy import CastPolicy
from amplab.policies.compiled_engine import CompiledEngine
from amplab.policies.decision import Decision, Explanation
from amplab.policies.engine import (
    CastingEngine,
    casts_enabled,
    cpu_half,
    cpu_half_mode,
    disable_casts,
    explaining,
    thread_engines,
)
from amplab.policies.op_names import TABLES
from amplab.policies.op_table import OpRule, OpTable
from amplab.policies.policy_rows import PolicyRows
from amplab.policies.precision_policy import PrecisionPolicy
from amplab.policies.rnn_input import accept_half_input, match_rnn_input
from amplab.policies.torch_cpu_table import TORCH_CPU
from amplab.policies.torch_cuda_table import TORCH_CUDA
from amplab.policies.tree_cast import cast_tree

__all__ = [
    "APEX",
    "CastCache",
    "CastPolicy",
    "CastingEngine",
    "CompiledEngine",
    "Decision",
    "Explanation",
    "OpRule",
    "OpTable",
    "PolicyRows",
    "PrecisionPolicy",
    "TABLES",
    "TORCH_CPU",
    "TORCH_CUDA",
    "accept_half_input",
    "accumulate_fp32",
    "cast_tree",
    "casts_enabled",
    "cpu_half",
    "cpu_half_mode",
    "disable_casts",
    "explaining",
    "match_rnn_input",
    "thread_engines",
]
