"""Recurrent modules with float32 weights take half inputs where casts are disabled, once the hook is on."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from amplab.policies import CastingEngine, accept_half_input, cpu_half, disable_casts

KINDS = pytest.mark.parametrize("make", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])


@KINDS
@pytest.mark.parametrize("mode", ["native", "fp32_accumulate"])
def test_half_input_float_weights_train(make, mode):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"rnn": make(4, 8, num_layers=2), "head": torch.nn.Linear(8, 2)})
    handles = accept_half_input(model)
    assert len(handles) == 1
    x = torch.randn(3, 2, 4).half().requires_grad_()
    with cpu_half(mode), CastingEngine().active():
        output, _ = model["rnn"](x)
        assert output.dtype is torch.float16
        model["head"](output).float().sum().backward()
    assert x.grad.dtype is torch.float16
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
    with CastingEngine().active(), disable_casts():
        assert model["rnn"](x)[0].dtype is torch.float32
    for handle in handles:
        handle.remove()
    with CastingEngine().active(), disable_casts(), pytest.raises(ValueError, match="RNN input dtype"):
        model["rnn"](x)


@KINDS
def test_packed_sequences_and_hidden_states(make):
    module = make(4, 8)
    accept_half_input(module)
    packed = pack_sequence([torch.randn(3, 4).half(), torch.randn(2, 4).half()])
    hidden = torch.zeros(1, 2, 8).half()
    with CastingEngine().active():
        output, _ = module(packed, (hidden, hidden) if make is torch.nn.LSTM else hidden)
    assert output.data.dtype is torch.float16


@KINDS
def test_values_are_those_of_casts_by_hand(make):
    torch.manual_seed(0)
    module = make(4, 8)
    x = torch.randn(3, 2, 4)
    with cpu_half("native"), CastingEngine().active():
        ours, _ = module(x)
    theirs, _ = module.half()(x.half())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_cells_need_no_hook(make):
    with CastingEngine().active():
        result = make(4, 8)(torch.ones(2, 4).half())
    assert (result[0] if isinstance(result, tuple) else result).dtype is torch.float16
