"""What goes in and out of a model, in containers of every kind; copies, pickles and failures of hooked models."""

import collections
import copy
import dataclasses
import pickle

import numpy
import pytest
import torch
from torch import nn

from amplab import amp
from amplab.policies import cpu_half

HALF = torch.float16


class Echo(nn.Module):
    """Keeps what it gets, gives it back."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.got = args, kwargs
        return kwargs["answer"] if "answer" in kwargs else args[0]


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    length: int


class Custom:
    def __init__(self, dtype=torch.float32):
        self.dtype = dtype

    def to(self, dtype):
        return Custom(dtype)


class Output(collections.OrderedDict):
    """A dict with attributes, as models of some libraries return."""

    @property
    def logits(self):
        return self["logits"]


def floats():
    return torch.ones(2)


@pytest.fixture
def echo():
    session, model = amp.Session(), Echo()
    session.initialize(model, opt_level="O2", verbosity=0)
    return model


CONTAINERS = [
    (lambda: [floats(), (floats(), 3)], lambda seen: (seen[0].dtype, seen[1][0].dtype, seen[1][1])),
    (lambda: Pair(floats(), "text"), lambda seen: (seen.left.dtype, seen.right)),
    (lambda: {"a": floats(), 1: floats()}, lambda seen: (seen["a"].dtype, seen[1].dtype)),
    (lambda: collections.OrderedDict(a=floats()), lambda seen: (seen["a"].dtype,)),
    (lambda: Output(logits=floats()), lambda seen: (seen.logits.dtype,)),
    (lambda: collections.defaultdict(list, a=floats()), lambda seen: (seen["a"].dtype, seen["b"])),
    (lambda: Batch(floats(), 7), lambda seen: (seen.inputs.dtype, seen.length)),
    (Custom, lambda seen: (seen.dtype,)),
]


@pytest.mark.parametrize(("make", "look"), CONTAINERS)
def test_containers_keep_their_type_in_and_out(echo, make, look):
    given = make()
    came_out = echo(given)
    ((got,), _) = echo.got
    assert type(got) is type(came_out) is type(given)
    assert look(given) != look(got)
    assert HALF in look(got)
    assert look(came_out) == look(given)


@pytest.mark.parametrize("given", [torch.arange(3), "text", 5, None, range(2), numpy.ones(2), {1, 2}, nn.Linear(1, 1)])
def test_the_rest_passes_untouched(echo, given):
    assert echo(given) is given
    assert echo.got[0][0] is given


def test_keyword_arguments_are_cast_too(echo):
    assert echo(answer=floats()).dtype == torch.float32
    assert echo.got[1]["answer"].dtype == HALF


def test_gradients_flow_through_both_casts(echo):
    inputs = floats().requires_grad_()
    (echo(inputs) * 3).sum().backward()
    assert inputs.grad.tolist() == [3.0, 3.0]


def test_hooks_of_the_user_see_the_model_from_outside():
    model, seen = Echo(), []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    amp.Session().initialize(model, opt_level="O2", verbosity=0)
    model(floats())
    assert seen == [torch.float32, torch.float32]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_runs_on_weights_of_its_own(problem, level, duplicate):
    session, model = amp.Session(), problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    problem.train(session, model, optimizer, range(2))
    model.eval()
    twin = duplicate(model)
    expected = model(problem.inputs)
    assert torch.equal(twin(problem.inputs), expected)
    assert twin(problem.inputs).dtype == expected.dtype
    with torch.no_grad():
        twin[3].weight.zero_()
        twin[3].bias.zero_()
    assert not twin(problem.inputs).any()
    assert not twin.state_dict()["3.weight"].any()
    assert {value.dtype for value in twin.state_dict().values()} <= {torch.float32, torch.int64}
    assert torch.equal(model(problem.inputs), expected)


def test_a_pickle_holds_no_masters():
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.Session().initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert 2 * 256 * 256 < len(pickle.dumps(model)) < 3 * 256 * 256


def test_a_copy_of_o2_can_be_initialized_by_another_session_after_float(problem):
    session, model = amp.Session(), problem.model()
    session.initialize(model, opt_level="O2", verbosity=0)
    twin = copy.deepcopy(model)
    session.reset()
    assert twin[0].weight.dtype == HALF
    with pytest.raises(RuntimeError, match=r"Found param 0.weight with type torch.HalfTensor"):
        amp.Session().initialize(twin, opt_level="O2", verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_forward_ends_the_engine(level, error):
    class Failing(nn.Linear):
        def forward(self, inputs):
            raise error

    session, model, beside = amp.Session(), Failing(2, 2), nn.Linear(2, 2)
    session.initialize([model, beside], opt_level=level, verbosity=0)
    weight = torch.ones(2, 2)
    with pytest.raises(error):
        model(torch.ones(1, 2))
    if error is ValueError:
        assert (weight @ weight).dtype == torch.float32
    session.initialize(model, opt_level="O0", verbosity=0)  # an interrupt lets no hook run: its scope ends here
    assert (weight @ weight).dtype == torch.float32
    other = amp.Session()
    other.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    with other.casting():
        assert (weight @ weight).dtype == HALF
    assert (weight @ weight).dtype == torch.float32


def test_one_model_inside_another(problem):
    inner = problem.model()
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    session = amp.Session()
    session.initialize([inner, outer], opt_level="O1", verbosity=0)
    assert outer(problem.inputs).dtype == HALF
    weight = torch.ones(2, 2)
    assert (weight @ weight).dtype == torch.float32


def test_float32_accumulation_is_on_around_the_forward_alone():
    torch.manual_seed(0)
    model = nn.Linear(2048, 64, bias=False)
    amp.Session().initialize(model, opt_level="O3", verbosity=0)
    inputs = torch.randn(64, 2048).half()
    rounded_once = (inputs.float() @ model.weight.float().T).half().float()
    with cpu_half("fp32_accumulate"):
        assert torch.equal(model(inputs), rounded_once)
    with cpu_half("native"):
        assert torch.equal(model(inputs), (inputs @ model.weight.T).float())
