"""Remedies that are rules of a policy: at O1 and at O2 the pasted rule mends the run, and it learns as in float32."""

from dataclasses import replace

import pytest
import torch
from pasting import final_loss, mended
from patients import SIZES, sizes_and_seeds
from rule_wards import RULE_WARDS
from test_clinic import diagnosed, findings_of

import amplab

STEPS = 300


@pytest.mark.parametrize(("size", "seed"), sizes_and_seeds())
@pytest.mark.parametrize("suggestion", ["first", "rule"])
@pytest.mark.parametrize("name", RULE_WARDS)
def test_the_pasted_rule_mends_the_run_and_it_learns_as_in_float32(name, suggestion, size, seed, tmp_path):
    """The first suggestion may be the user's line instead; the rule is then the second one."""
    ward = RULE_WARDS[name]
    finding = diagnosed(ward, size, seed, broken=True)[0]
    assert (finding.name, finding.module) == (ward.name, ward.module)
    rule = finding.remedy[finding.remedy.index("policy = amplab.policies.PrecisionPolicy(") :]
    if suggestion == "rule":
        finding = replace(finding, remedy=rule)
    elif rule == finding.remedy:
        pytest.skip("the rule is the first suggestion: the case `rule` pastes it")
    elif "rule_wards.py" not in finding.line:
        pytest.skip(f"the first suggestion is for a line that the ward does not hold: {finding.line}")
    assert f'opt_level="{name[-2:]}"' in finding.remedy

    def after():
        torch.manual_seed(seed)
        return mended("rule_wards.RULE_WARDS", name, finding, size, seed, tmp_path)

    try:
        found = findings_of(after())
        assert not found.harmful, str(found.harmful)
        loss = final_loss(after(), STEPS)
    finally:
        amplab.amp.reset()
    torch.manual_seed(seed)
    twin = ward.admit(size, seed, False)
    expected = final_loss(twin, STEPS)
    twin.amp.reset()
    assert loss < 1.03 * expected, finding.remedy


def test_a_layer_that_a_norm_reads_is_named_alone_and_one_that_a_layer_reads_with_it():
    rules = [
        diagnosed(RULE_WARDS[f"{name} at O2"], SIZES[0], 0, broken=True)[0].remedy.splitlines()[0] for name in NAMES
    ]
    assert rules == [
        "policy = amplab.policies.PrecisionPolicy(module_rules={'block.wo': 'float32'})",
        "policy = amplab.policies.PrecisionPolicy(module_rules={'up': 'float32', 'down': 'float32'})",
    ]


NAMES = ("feed-forward", "layer read by a layer")
