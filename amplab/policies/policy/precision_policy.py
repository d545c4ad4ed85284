"""PrecisionPolicy: an op table, the precision that its lower-precision rows compute in, and the user's rules.

A policy is an immutable value. `CastingEngine` applies it op by op; `apply_policy` applies it to a model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from amplab.formats import FloatFormat
from amplab.formats.kept_property import kept_property
from amplab.policies.policy.module_rules import ModuleRule, checked_module_rules
from amplab.policies.policy.op_overrides import OpOverride, op_overrides, rules_by_function, rules_of_policy
from amplab.policies.policy.policy_rows import PolicyRows, policy_rows
from amplab.policies.policy.policy_text import read_policy, write_policy
from amplab.policies.policy.precisions import Precision, precision_name, precision_of, tensor_dtype
from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_names import TABLES, find_op, find_row, find_table, nearest
from amplab.policies.tables.op_table import CastPolicy, OpRule, OpTable, resolve, spelling_of

__all__ = ["PrecisionPolicy"]

_TABLES = {**TABLES, "none": None}


@dataclasses.dataclass(frozen=True, init=False)
class PrecisionPolicy:
    """Which op runs in which dtype: the lists of a table, and the user's rules, which override them.

    The string form is "table/dtype" followed by the rules; `parse` is its inverse:

    >>> policy = PrecisionPolicy(op_rules={"softmax": "bfloat16"}, module_rules={"blocks.*.attn": torch.float32})
    >>> str(policy)
    'apex/float16; op softmax=bfloat16; module blocks.*.attn=float32'
    >>> PrecisionPolicy.parse(str(policy)) == policy
    True

    A precision is a torch dtype, a name, or a format of `amplab.formats`. "tf32", "float8_e4m3" and "float8_e5m2" are
    simulated: tensors stay float32, and ops of the lower-precision list round the values that they read and write
    (see `simulated_rounding`).

    An op rule names an op ("softmax": all its spellings), a spelling ("torch.nn.functional.softmax") or a function;
    a rule for a spelling overrides a rule for the op. A module rule is an fnmatch pattern over the names of
    `named_modules`. Module rules take effect when the policy is applied to a model with `apply_policy(policy, model)`
    or `amp.initialize(model, ..., policy=policy)`; `amplab.autocast` knows no model and refuses them.

    What a ruled module or op returns keeps the dtype of the rule, so that a value beyond 65504 stays finite. Where the
    lists of a table are in force, the ops that follow are cast as the lists say. With 16-bit weights (O2, O3) and with
    `table=None` nothing else is cast, so an op that gets tensors of different dtypes runs in the dtype of its weights;
    norms, losses and other ops of the float32 lists run in float32 (see `mixed_arguments`).

    Args:
        table: the op table, or the name of one in TABLES ("apex", "torch_cuda", "torch_cpu"). With None, only
            the rules cast.
        compute_dtype: the precision of lower-precision ops; float32 casts nothing down.
        op_rules: op -> a precision (float32 casts up, the others cast down), or the name of a cast policy.
        module_rules: pattern -> the precision inside the matching modules.
        cast_outputs_back: cast what ruled modules return, and with `table=None` what ruled ops return, to the dtype
            that it would have without the rule. The code around then meets the same dtypes as without rules, but a
            float32 value beyond 65504 becomes infinite in float16.

    Raises:
        TypeError: `table` is not an OpTable, a name or None.
        ValueError: an unknown table, precision or op, or rules that contradict each other.
    """

    table: OpTable | None
    compute_dtype: Precision
    op_rules: tuple[OpOverride, ...]
    module_rules: tuple[ModuleRule, ...]
    cast_outputs_back: bool

    def __init__(
        self,
        table: OpTable | str | None = APEX,
        compute_dtype: Precision | str = torch.float16,
        op_rules: Iterable[OpOverride] | Mapping[Any, Any] = (),
        module_rules: Iterable[ModuleRule] | Mapping[str, Any] = (),
        *,
        cast_outputs_back: bool = False,
    ) -> None:
        found = find_table(table) if isinstance(table, str) else table
        if not isinstance(found, OpTable | None):
            raise TypeError(
                f"table={table!r}: expected an OpTable, a name ({', '.join(sorted(TABLES))}), or None "
                "to cast by op_rules only."
            )
        if not isinstance(cast_outputs_back, bool):
            raise TypeError(f"cast_outputs_back={cast_outputs_back!r}: expected True or False.")
        put = functools.partial(object.__setattr__, self)  # the dataclass is frozen
        put("table", found)
        put("compute_dtype", precision_of(compute_dtype, "compute_dtype"))
        put("op_rules", op_overrides(op_rules, found))
        put("module_rules", checked_module_rules(module_rules))
        put("cast_outputs_back", cast_outputs_back)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the fields; function objects are looked up again on load."""
        fields = self.table, self.compute_dtype, self.op_rules, self.module_rules, self.cast_outputs_back
        return _rebuilt, fields

    def __str__(self) -> str:
        """Return the form that `parse` accepts."""
        return write_policy(
            "none" if self.table is None else self.table.name,
            precision_name(self.compute_dtype),
            [(rule.op, rule.word) for rule in self.op_rules],
            [(rule.pattern, precision_name(rule.precision)) for rule in self.module_rules],
            cast_outputs_back=self.cast_outputs_back,
        )

    @classmethod
    def parse(cls, text: str) -> PrecisionPolicy:
        """Return the policy whose string form is `text`, e.g. "apex/float16; op softmax=float32".

        Raises:
            ValueError: `text` does not have this form, or a rule in it is invalid.
        """
        table, dtype, op_rules, patterns, cast_outputs_back = read_policy(text)
        if table not in _TABLES:
            raise ValueError(
                f"policy {text!r}: expected 'table/dtype' with a table of {sorted(_TABLES)}, "
                f"e.g. 'apex/float16'{nearest(table, _TABLES) or '.'}"
            )
        return cls(_TABLES[table], dtype, op_rules, patterns, cast_outputs_back=cast_outputs_back)

    @property
    def simulated(self) -> FloatFormat | None:
        """The simulated format of lower-precision ops; None if they compute in a torch dtype."""
        return self.compute_dtype if isinstance(self.compute_dtype, FloatFormat) else None

    @property
    def tensor_dtype(self) -> torch.dtype:
        """The dtype of tensors that lower-precision ops return: float32 for a simulated format."""
        return tensor_dtype(self.compute_dtype)

    def explain(self, func: Callable[..., Any] | str) -> OpRule:
        """Return the row that applies to `func`: the user's rule, else the row of the table, else a fall_through row.

        >>> print(PrecisionPolicy().explain(torch.nn.functional.softmax))
        softmax [fp32] softmax: probabilities below 2^-25 are zero in float16
        >>> print(PrecisionPolicy().explain(torch.relu))
        relu [fall_through] relu: on no list of apex/float16; runs in the dtype of its arguments
        >>> print(PrecisionPolicy(op_rules={"softmax": "bfloat16"}).explain(torch.nn.functional.softmax))
        softmax [lower_precision_fp] softmax: your rule, bfloat16; the apex list has fp32

        Raises:
            ValueError: torch has no function of this name.
        """
        if isinstance(func, str):
            named = find_row(func, self.table)
            spelt = (resolve(each) for each in (() if named is None else named.spellings))
            func = next((each for each in spelt if each is not None), None) or find_op(func)
        row = self.by_function.get(func) or self.unlisted(func)
        precision = self.precision(func)
        if row.cast is CastPolicy.LOWER_PRECISION_FP and isinstance(precision, FloatFormat):
            simulated = f"simulated in {precision.name}: float32 tensors, values rounded"
            return dataclasses.replace(row, reason=f"{row.reason}; {simulated}")
        return row

    def rows(self) -> PolicyRows:
        """Return every row with the dtype that it runs in, user rules first; displays as text and as HTML.

        >>> PrecisionPolicy("torch_cuda").rows()[0]["runs in"]
        'float16'
        """
        rules = dict(rules_of_policy(self.op_rules, self.table))
        own = {rule: override.precision for rule, override in rules.items() if override is not None}
        lower = {rule: precision_name(own.get(rule) or self.compute_dtype) for rule in rules}
        table = "none" if self.table is None else self.table.name
        return policy_rows(rules, table=table, lower=lower, title=str(self))

    def unlisted(self, func: Callable[..., Any]) -> OpRule:
        """Return the fall_through row of an op that neither the table nor a rule names."""
        op = (spelling_of(func) or str(getattr(func, "__name__", "op"))).rpartition(".")[2]
        lists = write_policy(self.table.name if self.table else "none", precision_name(self.compute_dtype))
        return OpRule(op, CastPolicy.FALL_THROUGH, f"{op}: on no list of {lists}; runs in the dtype of its arguments")

    def precision(self, func: Callable[..., Any]) -> Precision:
        """Return the precision of `func` if its row is lower_precision_fp: that of its rule, else compute_dtype."""
        _, override = self._overrides.get(func, (None, None))
        return self.compute_dtype if override is None else override.precision or self.compute_dtype

    @kept_property
    def by_function(self) -> dict[Callable[..., Any], OpRule]:
        """Function object -> row; rows from user rules replace the rows of the table."""
        listed = {} if self.table is None else self.table.by_function
        return listed | {func: row for func, (row, _) in self._overrides.items()}

    @kept_property
    def _overrides(self) -> dict[Callable[..., Any], tuple[OpRule, OpOverride]]:
        return rules_by_function(self.op_rules, self.table)


def _rebuilt(
    table: OpTable | None,
    compute_dtype: Precision,
    op_rules: tuple[OpOverride, ...],
    module_rules: tuple[ModuleRule, ...],
    cast_outputs_back: bool,
) -> PrecisionPolicy:
    return PrecisionPolicy(table, compute_dtype, op_rules, module_rules, cast_outputs_back=cast_outputs_back)
