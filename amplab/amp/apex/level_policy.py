"""How a user's PrecisionPolicy applies at each level.

    level   lists and compute dtype      op_rules    module_rules
    O0      none                         apply       casts by op inside the modules, weights float32
    O1      the policy's                 apply       casts by op inside the modules, weights float32
    O2 O3   none, cast_model_type        apply       weights of the modules in the rule's dtype

The casts at the boundaries of those modules are in `amplab.policies.modules.module_regions`, those of ops that get
both what a rule returns and tensors of another dtype in `amplab.policies.casting.mixed_arguments`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from amplab.amp.apex.model_weights import refuse_torn_params
from amplab.amp.apex.opt_levels import OptProperties
from amplab.amp.apex.registered_functions import Registration, table_with
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies import OpTable, PrecisionPolicy
from amplab.policies.policy.module_rules import names_in, precisions_by_module
from amplab.policies.policy.precisions import tensor_dtype

__all__ = ["checked_policies", "engine_policy", "ruled_dtypes", "with_registered"]


def engine_policy(
    properties: OptProperties, policy: PrecisionPolicy | None, registrations: Sequence[Registration] = ()
) -> PrecisionPolicy | None:
    """Return the policy of the engine around the models; None if no engine is needed."""
    policy = PrecisionPolicy() if policy is None else policy
    if properties.patch_torch_functions:
        return with_registered(policy, registrations)
    if properties.cast_model_type in LOW_PRECISION_DTYPES:
        return dataclasses.replace(policy, table=None, compute_dtype=properties.cast_model_type)
    has_rules = bool(policy.op_rules or policy.module_rules)
    return dataclasses.replace(policy, table=None, compute_dtype=torch.float32) if has_rules else None


def with_registered(policy: PrecisionPolicy, registrations: Sequence[Registration]) -> PrecisionPolicy:
    """Return ``policy`` with the rows of registered functions before those of its table."""
    if not any(each.spellings for each in registrations):
        return policy
    return dataclasses.replace(policy, table=table_with(policy.table or OpTable("none", ()), registrations))


def checked_policies(policy: Any, models: Sequence[nn.Module], cast_model_type: Any) -> list[PrecisionPolicy]:
    """Return the policy of each model: ``policy`` with the module rules that name a module of this model.

    Args:
        policy: the user's argument; None for the default.
        models: models that `checked_models` returned.
        cast_model_type: the property in force.

    Raises:
        TypeError: not a policy.
        ValueError: a rule that matches no module of any model, rules that contradict each other, or a compute
            dtype that is neither the default nor the dtype that the models are cast to.
    """
    policy = PrecisionPolicy() if policy is None else policy
    if not isinstance(policy, PrecisionPolicy):
        raise TypeError(f"policy={policy!r}: expected a PrecisionPolicy; use PrecisionPolicy.parse for a string.")
    half = cast_model_type in LOW_PRECISION_DTYPES
    if half and policy.compute_dtype not in (cast_model_type, torch.float16):
        raise ValueError(
            f"policy={str(policy)!r} computes in {policy.compute_dtype}, but the model is cast to {cast_model_type}. "
            "At O2 and O3 set the dtype with cast_model_type, and use only op_rules and module_rules of the policy."
        )
    for rule in policy.module_rules:
        if not any(names_in(model, rule) for model in models):
            precisions_by_module(models[0], [rule])  # raises, and lists the modules
    chosen = [
        dataclasses.replace(policy, module_rules=tuple(each for each in policy.module_rules if names_in(model, each)))
        for model in models
    ]
    for model, own in zip(models, chosen, strict=True):
        own_dtypes = ruled_dtypes(model, own)
        refuse_torn_params(model, own_dtypes if half else {})
    return chosen


def ruled_dtypes(model: nn.Module, policy: PrecisionPolicy) -> Mapping[nn.Module, torch.dtype]:
    """Return the dtype of the weights of each module that a module rule applies to, if weights are cast."""
    ruled = precisions_by_module(model, policy.module_rules)
    return {module: tensor_dtype(rule.precision) for module, rule in ruled.items()}
