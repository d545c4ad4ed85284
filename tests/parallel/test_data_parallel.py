"""Models in the threads of torch.nn.DataParallel compute with the policy of the thread that made them.

DataParallel itself needs several GPUs. The replicas here are made as `torch.nn.parallel.replicate` makes them, and each
runs in a new thread, in the state that `torch.nn.parallel.parallel_apply` gives it: that of torch's autocast, which
amplab leaves disabled, and whether gradients are computed.
"""

import threading

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.policies import PrecisionPolicy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.seen = []

    def forward(self, inputs):
        hidden = self.first(inputs)
        output = self.last(hidden.relu())
        self.seen += [hidden.dtype, output.dtype, output.softmax(1).dtype]
        return output


class Decorated(Net):
    @amplab.autocast("cpu", dtype=torch.float16)
    def forward(self, inputs):
        return super().forward(inputs)


def replica(module):
    """A shallow copy whose parameters are no leaves: their gradients flow to the module's."""
    copied = module._replicate_for_data_parallel()
    copied._former_parameters = {}
    for name, child in module._modules.items():
        setattr(copied, name, replica(child))
    for name, param in module._parameters.items():
        setattr(copied, name, param.clone())
        copied._former_parameters[name] = getattr(copied, name)
    return copied


def in_threads(model, inputs):
    outputs, state = {}, (torch.is_grad_enabled(), torch.is_autocast_enabled())

    def run(index, own, batch):
        torch.set_grad_enabled(state[0])
        with torch.amp.autocast("cpu", enabled=state[1]):
            outputs[index] = own(batch)

    threads = [
        threading.Thread(target=run, args=(index, replica(model), batch)) for index, batch in enumerate(inputs.chunk(2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([outputs[index] for index in range(len(threads))])


LEVELS = {level: {"opt_level": level} for level in ("O0", "O1", "O2", "O3")}
LEVELS["a rule"] = {"opt_level": "O1", "policy": PrecisionPolicy(module_rules={"last": "float32"})}


def check(model, inputs):
    """Outputs and dtypes of the replicas are those of the model, and their gradients reach its parameters."""
    expected = torch.cat([model(batch) for batch in inputs.chunk(2)])
    dtypes = set(model.seen)
    model.seen.clear()
    output = in_threads(model, inputs)
    assert torch.equal(output, expected)
    assert set(model.seen) == dtypes  # replicas share the list
    gradients = torch.autograd.grad(output.float().square().sum(), list(model.parameters()))
    for found, wanted in zip(
        gradients, torch.autograd.grad(expected.float().square().sum(), list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    return dtypes


@pytest.mark.parametrize("level", LEVELS)
def test_initialized_models(level):
    torch.manual_seed(0)
    model, inputs = Net(), torch.randn(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, verbosity=0, **LEVELS[level])
    dtypes = check(model, inputs)
    assert (torch.float16 in dtypes) is (level != "O0")
    amp.reset()


def test_a_decorated_forward():
    torch.manual_seed(0)
    assert torch.float16 in check(Decorated(), torch.randn(6, 8))


def test_no_gradients_in_the_threads_of_an_evaluation():
    model = Net()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    with torch.no_grad():
        assert not in_threads(model, torch.randn(6, 8)).requires_grad
    amp.reset()


def test_a_region_applies_to_the_thread_that_enters_it():
    model, inputs = Net(), torch.randn(6, 8)
    with amplab.autocast("cpu", dtype=torch.float16):
        model(inputs)
        assert torch.float16 in model.seen
        model.seen.clear()
        in_threads(model, inputs)
    assert set(model.seen) == {torch.float32}  # so decorate forward, as above
