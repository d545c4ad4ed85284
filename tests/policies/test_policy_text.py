"""The string form and its parts: plain names as they are, others in quotes, anything else refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amplab.policies.policy.policy_text import read_policy, write_policy

NAMES = st.dictionaries(st.text(), st.sampled_from(["float32", "tf32", "promote"]))


@settings(deadline=None)
@given(NAMES, NAMES, st.booleans())
def test_any_names_come_back(op_rules, module_rules, cast_outputs_back):
    text = write_policy("apex", "float16", op_rules.items(), module_rules.items(), cast_outputs_back=cast_outputs_back)
    assert read_policy(text) == ("apex", "float16", op_rules, module_rules, cast_outputs_back)


def test_plain_names_need_no_quotes_and_spaces_are_ignored():
    text = write_policy("apex", "float16", [("softmax", "float32")], [("blocks.[0-3].*", "tf32"), ("a;b", "tf32")])
    assert text == 'apex/float16; op softmax=float32; module blocks.[0-3].*=tf32; module "a;b"=tf32'
    assert read_policy(" apex/float16 ;op  softmax = float32 ").op_rules == {"softmax": "float32"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "apex", "apex/", "apex/float16;", "apex/float16; module a", "apex/float16; x a=b"),
        "apex/float16; cast_outputs_back=1",
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="expected 'table/dtype', then rules such as"):
        read_policy(text)
