"""Which modules a pattern names, which rule counts where, and what is refused."""

import pytest
import torch
from torch import nn

from amplab.policies.policy.module_rules import checked_module_rules, precisions_by_module, ruled_modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.mlp(self.attn(x))


class Net(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(4, 4),
            nn.ModuleList(Block() for _ in range(depth)),
            nn.Linear(4, 4),
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def begins(model, rules):
    """Where rules begin: name -> (inside, around)."""
    found = ruled_modules(model, checked_module_rules(rules))
    return {each.name: (str(each.rule), str(each.around)) for each in found}


def test_a_pattern_names_modules_and_all_inside():
    assert begins(Net(), {"blocks.*.attn": "bfloat16"}) == {
        "blocks.0.attn": ("blocks.*.attn=bfloat16", "None"),
        "blocks.1.attn": ("blocks.*.attn=bfloat16", "None"),
    }


def test_a_list_of_modules_hands_its_rule_to_what_it_holds():
    assert list(begins(Net(), {"blocks": torch.float32})) == ["blocks.0", "blocks.1"]


def test_the_model_itself_is_named_by_the_empty_name_and_the_star():
    assert list(begins(Net(), {"": "float32"})) == [""]
    assert list(begins(Net(), {"*": "float32"})) == [""]


def test_the_more_specific_rule_counts():
    assert begins(Net(1), {"blocks.*": "bfloat16", "blocks.*.attn": "float32"}) == {
        "blocks.0": ("blocks.*=bfloat16", "None"),
        "blocks.0.attn": ("blocks.*.attn=float32", "blocks.*=bfloat16"),
    }
    everywhere = begins(Net(1), {"*": "bfloat16", "blocks.0.attn.1": "float16"})
    assert everywhere == {"": ("*=bfloat16", "None"), "blocks.0.attn.1": ("blocks.0.attn.1=float16", "*=bfloat16")}


def test_an_equal_rule_inside_begins_nothing():
    assert list(begins(Net(1), {"blocks.*": "float32", "blocks.0.attn": "float32"})) == ["blocks.0"]


def test_a_module_at_two_places_begins_once():
    model = Net()
    model.blocks[1] = model.blocks[0]
    assert list(begins(model, {"blocks.1": "float32"})) == ["blocks.0"]


def test_rules_apply_inside():
    model = Net(1)
    counting = precisions_by_module(model, checked_module_rules({"blocks.0.attn": "bfloat16"}))
    assert set(counting) == set(model.blocks[0].attn.modules())


def test_contradictions_name_both_rules_and_the_remedy():
    rules = {"*.attn": "float32", "blocks.0.*": "bfloat16"}
    with pytest.raises(
        ValueError,
        match=r"blocks.0.\*=bfloat16 contradict each other in 'blocks.0.attn', .* add a rule for 'blocks.0.attn'",
    ):
        begins(Net(), rules)
    assert begins(Net(), {**rules, "blocks.0.attn": "bfloat16"})["blocks.0.attn"][0] == "blocks.0.attn=bfloat16"
    with pytest.raises(ValueError, match="contradict each other in 'head'"):
        begins(Net(), {"head": "float32", "hea?": "bfloat16"})


def test_a_pattern_without_a_module_names_the_nearest():
    with pytest.raises(ValueError, match=r"'blocks.\*.atn' matches no module of this Net.*'blocks.0.attn'"):
        begins(Net(), {"blocks.*.atn": "float32"})
    with pytest.raises(ValueError, match=r"'x' matches no module of this Linear.*none"):
        begins(nn.Linear(1, 1), {"x": "float32"})


def test_a_compiled_model_keeps_the_names_that_its_modules_had():
    compiled = torch.compile(Net(), backend="eager")
    for pattern in ("blocks.0.attn", "_orig_mod.blocks.0.attn"):
        assert begins(compiled, {pattern: "float32"}) == {"_orig_mod.blocks.0.attn": (f"{pattern}=float32", "None")}
    with pytest.raises(ValueError, match=r"the closest names are 'blocks.0.attn'"):
        begins(compiled, {"blocks.0.atn": "float32"})


@pytest.mark.parametrize("rules", [{torch.softmax: "float32"}, {3: "float32"}])
def test_what_is_no_pattern_is_refused(rules):
    with pytest.raises(ValueError, match=r"is not a pattern; expected a string"):
        checked_module_rules(rules)


def test_a_module_that_is_never_called_cannot_have_a_rule_of_its_own():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    with pytest.raises(ValueError, match=r"applies to 'attn.out_proj', .* rule for 'attn' instead"):
        begins(model, {"*.out_proj": "float32"})
    assert list(begins(model, {"attn": "float32"})) == ["attn"]


def test_pairs_are_refused_with_the_mapping_to_pass():
    with pytest.raises(ValueError, match=r"\('a', 'float32'\) is not a rule; pass a mapping"):
        checked_module_rules([("a", "float32")])
