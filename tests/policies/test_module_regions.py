"""Ruled modules by op: what is computed inside, and in which dtype it is returned."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from amplab.formats import FLOAT8_E4M3
from amplab.policies import (
    CastingEngine,
    PrecisionPolicy,
    apply_policy,
    cpu_half,
    disable_casts,
    module_rule_at_work,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(autouse=True)
def nothing_stays_on_the_thread():
    before = _get_current_function_mode_stack()
    yield
    assert _get_current_function_mode_stack() == before
    assert module_rule_at_work() == ""


X = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)


def outputs(net, policy):
    """Name -> what each module returned under the policy."""
    seen = {}

    def keep(name):
        return lambda _, args, output: seen.__setitem__(name, output[0] if isinstance(output, tuple) else output)

    with apply_policy(policy, net):
        handles = [module.register_forward_hook(keep(name)) for name, module in net.named_modules()]
        try:
            net(X)
        finally:
            for handle in handles:
                handle.remove()
    return seen


RULES = [
    {"*": "float32"},
    {"blocks.0": "float32"},
    {"*.attn": "float32", "*.norm": "bfloat16"},
    {"*.mlp": "bfloat16", "*.mlp.2": "float32"},
    {"blocks.0": "float32", "blocks.0.mlp": "bfloat16"},
    {"blocks.1": "float8_e4m3", "blocks.1.mlp.2": "float16", "stem": "tf32"},
    {"head": "float8_e5m2"},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "tf32"])
def test_on_request_outputs_are_cast_back_to_what_they_would_have_been(net, rules, dtype):
    bare = PrecisionPolicy(compute_dtype=dtype)
    ruled = PrecisionPolicy(compute_dtype=dtype, module_rules=rules, cast_outputs_back=True)
    expected, found = outputs(net, bare), outputs(net, ruled)
    for name in ("",) if "*" in rules else ("", "stem", "blocks.0", "blocks.1", "head"):
        assert found[name].dtype is expected[name].dtype, name


def test_a_float32_rule_computes_and_returns_as_the_float32_module(net):
    found = outputs(net, PrecisionPolicy(module_rules={"blocks.0": "float32"}))
    assert torch.equal(found["blocks.0"], net.blocks[0](found["stem"].float()))
    assert found["stem"].dtype is found["head"].dtype is torch.float16


@pytest.mark.parametrize("table", ["apex", "torch_cuda", None])
@pytest.mark.parametrize("rules", [rules for rules in RULES if "*" not in rules], ids=str)
def test_what_follows_runs_with_what_a_rule_returns(net, rules, table):
    policy = PrecisionPolicy(table, "float16" if table else "float32", module_rules=rules)
    with apply_policy(policy, net):
        found = net(X)
    assert torch.allclose(found.float(), net(X), rtol=0.2, atol=0.2)


class Range(nn.Module):
    """Returns 2^17, which float16 cannot hold."""

    def forward(self, x):
        return x * 2.0**17


@pytest.mark.parametrize("inner", ["float32", "bfloat16"])
def test_values_beyond_float16_pass_a_border(inner):
    model = nn.Sequential(nn.Linear(4, 4), Range(), nn.LayerNorm(4), nn.Linear(4, 4))
    with apply_policy(PrecisionPolicy(module_rules={"1": inner}), model):
        found = model(torch.arange(8.0).reshape(2, 4))
    expected = model(torch.arange(8.0).reshape(2, 4))
    assert found.dtype is torch.float16
    assert torch.allclose(found.float(), expected, atol=0.05)
    with apply_policy(PrecisionPolicy(module_rules={"1": inner}, cast_outputs_back=True), model):
        assert not model(torch.arange(8.0).reshape(2, 4)).isfinite().all()


def test_a_16_bit_module_inside_a_float32_one_hands_on_its_dtype(net):
    returned = []
    net.blocks[0].mlp.register_forward_hook(lambda _, args, output: returned.append(output.dtype))
    with apply_policy(PrecisionPolicy(module_rules={"blocks.0": "float32", "blocks.0.mlp.0": "bfloat16"}), net):
        net(X)  # whose mlp.2 has float32 weights and gets bfloat16
    assert returned == [torch.float32]


def test_a_bfloat16_rule_computes_by_the_lists_in_bfloat16(net):
    found = outputs(net, PrecisionPolicy(module_rules={"*.mlp": torch.bfloat16}))
    entering = found["blocks.0.mlp.0"].dtype, found["blocks.0.mlp.1"].dtype, found["blocks.0.mlp.2"].dtype
    assert entering == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert found["blocks.0.mlp"].dtype is torch.bfloat16


def test_a_simulated_rule_rounds_inside(net):
    found = outputs(net, PrecisionPolicy(module_rules={"head": "float8_e4m3"}))
    assert found["head"].dtype is torch.float32
    q, x = FLOAT8_E4M3.round, found["blocks.1"].float()
    product = q(nn.functional.linear(q(x), q(net.head.weight), q(net.head.bias)))
    assert torch.equal(found["head"], product)


def test_gradients_are_float32_and_pass_the_borders(net):
    with cpu_half("fp32_accumulate"), apply_policy(PrecisionPolicy(module_rules={"head": "float32"}), net):
        net(X).float().sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    assert all(gradient.dtype is torch.float32 for gradient in gradients)
    assert torch.equal(net.head.bias.grad, torch.full((3,), 10.0))
    assert all(gradient.abs().sum() > 0 for gradient in gradients[:2])


def test_copies_and_pickles_keep_the_rules(net):
    policy = PrecisionPolicy(module_rules={"blocks.0": "float32", "*.1.mlp": "bfloat16"})
    with apply_policy(policy, net):
        copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        expected = net(X)
    plain = net(X)
    assert not torch.equal(expected.float(), plain)
    for each in copies:
        assert torch.equal(each(X), expected)


def test_removal_leaves_no_hook_and_may_be_repeated(net):
    applied = apply_policy(PrecisionPolicy(module_rules={"head": "float32"}), net)
    assert str(applied) == "AppliedPolicy('apex/float16; module head=float32')"
    applied.remove()
    applied.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_refused_rule_leaves_no_hook(net):
    with pytest.raises(ValueError, match=r"'haed' matches no module of this Net.*'head'"):
        apply_policy(PrecisionPolicy(module_rules={"haed": "float32"}), net)
    assert not net._forward_hooks
    with pytest.raises(TypeError, match=r"apply_policy\(str, Net\): expected a PrecisionPolicy"):
        apply_policy("apex/float16", net)


def test_exceptions_inside_leave_the_rule(net):
    with apply_policy(PrecisionPolicy(module_rules={"blocks.*": "float32", "*.mlp": "bfloat16"}), net):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net.blocks[0].mlp(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="normalized_shape"):
            net.blocks[0](torch.ones(2, 5, 3))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(2, 3))
        assert module_rule_at_work() == ""
        assert net(X).dtype is torch.float16


def test_an_interrupt_inside_ends_the_rule(net):
    def interrupt(*_):
        raise KeyboardInterrupt

    with apply_policy(PrecisionPolicy(module_rules={"blocks.0": "float32", "head": "float32"}), net):
        expected = net(X)
        handle = net.blocks[0].norm.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            net(X)
        assert module_rule_at_work() == ""
        handle.remove()
        assert torch.equal(net(X), expected)
        assert module_rule_at_work() == ""


def test_removal_leaves_what_an_interrupt_left_open(net):
    def interrupt(*_):
        raise KeyboardInterrupt

    with apply_policy(PrecisionPolicy(module_rules={"blocks.0": "float32"}), net):
        net.blocks[0].norm.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            net(X)


def test_every_thread_computes_by_the_rules(net):
    found = []
    with apply_policy(PrecisionPolicy(module_rules={"blocks.0": "float32"}), net):
        expected = net(X)
        threads = [threading.Thread(target=lambda: found.append(net(X))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(each, expected) for each in found)
    assert len(found) == 2


def test_a_ruled_module_called_outside_the_model_comes_back_to_float32(net):
    with apply_policy(PrecisionPolicy(module_rules={"*.mlp": "bfloat16"}), net):
        assert net.blocks[0].mlp(X).dtype is torch.float32
        with CastingEngine(PrecisionPolicy(compute_dtype="bfloat16")).active():
            assert net.blocks[0].mlp(X).dtype is torch.bfloat16


def test_disabled_casts_disable_the_rules(net):
    with apply_policy(PrecisionPolicy(module_rules={"*.mlp": "bfloat16"}), net), disable_casts():
        found = net(X)
    assert torch.equal(found, net(X))


def test_recomputation_in_backward_follows_the_rules(net):
    losses, gradients = [], []
    with apply_policy(PrecisionPolicy(module_rules={"mlp": "bfloat16"}), net.blocks[0]):
        for run in (net.blocks[0], lambda x: checkpoint(net.blocks[0], x, use_reentrant=False)):
            net.zero_grad()
            loss = run(X).float().square().sum()
            loss.backward()
            losses.append(loss)
            gradients.append([parameter.grad for parameter in net.blocks[0].parameters()])
    assert torch.equal(*losses)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recurrent_modules_and_packed_sequences(precision):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8)

        def forward(self, packed):
            return self.lstm(packed._replace(data=self.embed(packed.data)))[0]

    tagger, packed = Tagger(), pack_sequence([torch.ones(3, 8), torch.ones(2, 8)])
    with apply_policy(PrecisionPolicy(), tagger):
        expected = tagger(packed)
    with apply_policy(PrecisionPolicy(module_rules={"lstm": precision}), tagger):
        found = tagger(packed)
    assert expected.data.dtype is torch.float16
    assert found.data.dtype is getattr(torch, precision)
    assert not torch.equal(found.data, expected.data)


def test_structures_keep_their_kind():
    class Pair(nn.Module):
        def forward(self, *, batch):
            return {"sum": [batch["x"] @ batch["x"]], "n": batch["n"]}

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            return self.pair(batch={"x": x, "n": 3})

    outer = Outer()
    with apply_policy(PrecisionPolicy(module_rules={"pair": "float32"}), outer):
        found = outer(torch.ones(2, 2, dtype=torch.float16))
    assert found["n"] == 3
    assert found["sum"][0].dtype is torch.float32


def test_the_rule_at_work_is_told_inside(net):
    told = []
    net.blocks[0].mlp[1].register_forward_hook(lambda *_: told.append(module_rule_at_work()))
    net.blocks[1].mlp[1].register_forward_hook(lambda *_: told.append(module_rule_at_work()))
    with apply_policy(PrecisionPolicy(module_rules={"*.0.mlp": "tf32"}), net):
        net(X)
    assert told == ["*.0.mlp=tf32 in blocks.0.mlp", ""]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_borders_on_a_gpu_are_those_of_the_cpu(net, rules):
    policy = PrecisionPolicy(module_rules=rules)
    expected = {name: output.dtype for name, output in outputs(net, policy).items()}
    with apply_policy(policy, net.cuda()):
        assert net(X.cuda()).dtype is expected[""]
