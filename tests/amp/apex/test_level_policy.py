"""A user's policy at each level: module rules work the same at O0 to O3, op rules count, and what is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn

from amplab import amp
from amplab.policies import CastPolicy, PrecisionPolicy, cast_tree, disable_casts

LEVELS = ("O0", "O1", "O2", "O3")
RULES = {"1": "float32", "2": torch.bfloat16}


class Watched(nn.Linear):
    """Notes the dtypes of what it gets, what it multiplies with and what it makes of it."""

    def forward(self, x):
        output = super().forward(x)
        self.seen = (x.dtype, self.weight.dtype, output.dtype)
        return output


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Watched(8, 8) for _ in range(4)))


@pytest.fixture
def inputs():
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def returned(session, model, inputs):
    """The dtypes that each layer returns to those around."""
    dtypes = []
    handles = [layer.register_forward_hook(lambda _, args, output: dtypes.append(output.dtype)) for layer in model]
    with session.casting():
        model(inputs)
    for handle in handles:
        handle.remove()
    return dtypes


f32, f16, b16 = torch.float32, torch.float16, torch.bfloat16
INSIDE = {
    "O0": ((f32, f32, f32), (f32, f32, b16)),
    "O1": ((f32, f32, f32), (f32, f32, b16)),
    "O2": ((f32, f32, f32), (b16, b16, b16)),
    "O3": ((f32, f32, f32), (b16, b16, b16)),
}


@pytest.mark.parametrize("level", LEVELS)
def test_inside_and_returned_by_the_rule(session, model, inputs, level):
    session.initialize(model, opt_level=level, verbosity=0)
    first, _, _, last = returned(session, model, inputs)
    session.initialize(model, opt_level=level, verbosity=0, policy=PrecisionPolicy(module_rules=RULES))
    assert returned(session, model, inputs) == [first, f32, b16, last]
    assert (model[1].seen, model[2].seen) == INSIDE[level]


@pytest.mark.parametrize("level", LEVELS)
def test_on_request_outside_as_without_rules(session, model, inputs, level):
    session.initialize(model, opt_level=level, verbosity=0)
    expected = returned(session, model, inputs)
    policy = PrecisionPolicy(module_rules=RULES, cast_outputs_back=True)
    session.initialize(model, opt_level=level, verbosity=0, policy=policy)
    assert returned(session, model, inputs) == expected
    assert model[1].seen == INSIDE[level][0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_float32_rule_computes_the_same_at_every_level(session, model, inputs, level):
    expected = model[1](inputs.half().float())
    policy = PrecisionPolicy(module_rules={"1": "float32"})
    session.initialize(model, opt_level=level, verbosity=0, policy=policy)
    seen = []
    model[0].register_forward_hook(lambda *_: inputs.half())
    model[2].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with session.casting():
        model(inputs)
    assert torch.equal(seen[0], expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float8_e4m3", "tf32"])
@pytest.mark.parametrize("level", LEVELS)
def test_training_goes_down_under_rules(session, problem, level, precision):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    policy = PrecisionPolicy(module_rules={"0": precision, "3": "float32"})
    session.initialize(model, optimizer, opt_level=level, verbosity=0, policy=policy)
    losses = problem.train(session, model, optimizer, range(40))
    assert sum(losses[-8:]) < 0.4 * sum(losses[:8])
    masters = list(session.master_params(optimizer))
    assert level == "O3" or all(master.dtype is torch.float32 for master in masters)


def test_half_weights_under_rules_have_masters_and_float32_ones_none(session, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0, policy=PrecisionPolicy(module_rules=RULES))
    assert [layer.weight.dtype for layer in model] == [f16, f32, b16, f16]
    masters = list(session.master_params(optimizer))
    assert masters[2] is model[1].weight
    assert masters[4] is not model[2].weight


def test_checkpoints_hold_float32_under_all_rules(session, model):
    before = {name: values.clone() for name, values in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0, policy=PrecisionPolicy(module_rules=RULES))
    saved = model.state_dict()
    assert all(torch.equal(saved[name], values) for name, values in before.items())


@pytest.mark.parametrize("level", LEVELS)
def test_reset_takes_everything_off(session, model, inputs, level):
    expected, weights = model(inputs), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PrecisionPolicy(module_rules=RULES, op_rules={"linear": "bfloat16"})
    session.initialize(model, optimizer, opt_level=level, verbosity=0, policy=policy)
    session.reset()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    if level != "O3":  # which has no masters
        assert all(torch.equal(values, weights[name]) for name, values in model.state_dict().items())
        assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_copies_and_pickles_run_by_the_rules(session, model, inputs, level):
    session.initialize(model, opt_level=level, verbosity=0, policy=PrecisionPolicy(module_rules=RULES))
    expected = model(inputs)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(inputs), expected)
        assert (each[1].seen, each[2].seen) == (model[1].seen, model[2].seen)


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_inside_leaves_everything_in_order(session, model, inputs, level):
    session.initialize(model, opt_level=level, verbosity=0, policy=PrecisionPolicy(module_rules=RULES))
    expected = model(inputs)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model[2](inputs[:, :3])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(inputs[:, :3])
    assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_rules_by_op_count_at_every_level(session, inputs, level):
    class Sharp(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(torch.sigmoid(self.first(x)))

    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.sigmoid:
                seen.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    model = Sharp()
    session.initialize(model, opt_level=level, verbosity=0, policy=PrecisionPolicy(op_rules={"sigmoid": "bfloat16"}))
    with Watch(), session.casting():
        model(inputs)
    assert seen == [torch.bfloat16]


def test_the_policys_lists_and_dtype_are_o1s(session, model, inputs):
    session.initialize(model, opt_level="O1", verbosity=0, policy=PrecisionPolicy(compute_dtype="bfloat16"))
    assert model(inputs).dtype is torch.bfloat16
    session.initialize(model, opt_level="O1", verbosity=0)
    assert model(inputs).dtype is torch.float16


def test_rules_are_given_to_the_models_that_they_name(session, inputs):
    generator, critic = nn.Sequential(nn.Linear(8, 8)), nn.ModuleDict({"head": Watched(8, 8)})
    policy = PrecisionPolicy(module_rules={"head": "float32"})
    session.initialize([generator, critic], opt_level="O2", verbosity=0, policy=policy)
    assert (generator[0].weight.dtype, critic["head"].weight.dtype) == (f16, f32)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def test_tied_weights_want_one_dtype_where_weights_are_cast(session):
    rules = PrecisionPolicy(module_rules={"head": "float32"})
    model = Tied()
    with pytest.raises(ValueError, match=r"head.weight and embed.weight are the same parameter"):
        session.initialize(model, opt_level="O2", verbosity=0, policy=rules)
    assert model.head.weight.dtype is f32
    session.initialize(model, opt_level="O1", verbosity=0, policy=rules)
    assert model(torch.tensor([1])).dtype is f32
    both = PrecisionPolicy(module_rules={"head": "float32", "embed": "float32"})
    session.initialize(model, opt_level="O2", verbosity=0, policy=both)
    assert model.head.weight.dtype is f32
    assert model(torch.tensor([1])).dtype is f32


@pytest.mark.parametrize("level", LEVELS)
def test_refusals_come_before_anything_is_changed(session, model, level):
    refused = (
        ({"5": "float32"}, "'5' matches no module of this Sequential; the closest names are '0', '1', '2'"),
        ({"[01]": "float32", "[12]": "tf32"}, r"contradict each other in '1', and neither is more specific"),
    )
    for rules, message in refused:
        with pytest.raises(ValueError, match=message):
            session.initialize(model, opt_level=level, verbosity=0, policy=PrecisionPolicy(module_rules=rules))
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    with pytest.raises(TypeError, match=r"policy='apex/float16': expected a PrecisionPolicy"):
        session.initialize(model, opt_level=level, verbosity=0, policy="apex/float16")


def test_a_policy_in_another_dtype_than_the_weights_is_refused(session, model):
    policy = PrecisionPolicy(compute_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"but the model is cast to torch.float16"):
        session.initialize(model, opt_level="O2", verbosity=0, policy=policy)
    session.initialize(model, opt_level="O2", verbosity=0, policy=policy, cast_model_type=torch.bfloat16)
    assert model[0].weight.dtype is b16


def test_the_apex_face_takes_a_policy(model, inputs):
    amp.initialize(model, opt_level="O1", verbosity=0, policy=PrecisionPolicy(module_rules={"1": "float32"}))
    model(inputs)
    assert model[1].seen == (f32, f32, f32)
    with disable_casts():
        assert model(inputs).dtype is f32
    amp.reset()
    assert cast_tree(model(inputs), f32).dtype is f32


def test_registered_functions_count_inside_ruled_modules(session, inputs):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()))
    session.register_function(CastPolicy.FP32, torch, "sigmoid")
    returned = []
    model[1][1].register_forward_hook(lambda _, args, output: returned.append(output.dtype))
    session.initialize(model, opt_level="O1", verbosity=0, policy=PrecisionPolicy(module_rules={"1": "bfloat16"}))
    model(inputs)
    assert returned == [f32]
