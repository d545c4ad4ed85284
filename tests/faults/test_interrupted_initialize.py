"""An interrupt at any point of `initialize`: what it has done is taken back. One in `reset` waits for its end."""

import functools
import inspect
import types
import weakref
from collections import OrderedDict

import pytest
import torch
from interrupts import PACKAGE, interrupted, interrupted_everywhere
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from amplab import amp
from amplab.policies import PrecisionPolicy, thread_engines
from amplab.policies.casting.thread_scopes import AUTOCAST_FLAG

# Python swallows what a finalizer raises.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([0, 1, 2, 0])
RULES = PrecisionPolicy(module_rules={"3": "float32"})
LEVELS = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3"},
    "O1 rules": {"opt_level": "O1", "policy": RULES},
    "O2 rules, combined": {"opt_level": "O2", "policy": RULES, "combine_grad": True},
}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
}
OWN = types.ModuleType("own")
OWN.double = double = lambda tensor: tensor * 2
_CASTING = [f"policies/casting/{name}.py" for name in ("engine", "function_modes", "hook_scopes", "thread_scopes")]
AMPLABS = [f"{PACKAGE}/{part}" for part in ("amp", "scalers", "parallel", "policies/modules", *_CASTING)]
"""Where things are changed; the rest builds tables and plans."""
LAST = ("initialize", "_change_settings", "hook", "install")
"""Functions in which a change begins or ends."""
TORCHS = [inspect.getfile(each) for each in (torch.utils.hooks, nn.Module, torch.optim.Optimizer, weakref)]


class Training:
    """A float32 model with BatchNorm and an optimizer with state; its gradients are there."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = make(self.model.parameters())
        self.step()
        self.loss().backward()

    def loss(self):
        return F.cross_entropy(OWN.double(self.model(X)), TARGET)

    def step(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def initialize(self, options):
        amp.register_half_function(OWN, "double")
        amp.initialize(self.model, self.optimizer, verbosity=0, **options)

    def state(self):
        """Values and dtypes of everything, also after a float32 step; and whose parameters the optimizer steps."""
        now = self.tensors()
        stepped = [param for group in self.optimizer.param_groups for param in group["params"]]
        same = [a is b for a, b in zip(stepped, self.model.parameters(), strict=True)]
        self.step()
        return now, same, self.tensors()

    def tensors(self):
        grads = [param.grad for param in self.model.parameters()]
        return values((self.model.state_dict(), grads, self.optimizer.state_dict()))

    def hooks(self):
        params = list(self.model.parameters())
        kept = [value for each in (*self.model.modules(), self.optimizer) for value in vars(each).values()]
        kept += [hooks for param in params for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks)]
        return [number for hooks in kept if isinstance(hooks, OrderedDict) for number in hooks if type(number) is int]


def values(state):
    if isinstance(state, dict):
        return [value for key in sorted(state, key=str) for value in values(state[key])]
    if isinstance(state, list | tuple):
        return [value for each in state for value in values(each)]
    return [(state.dtype, state.tolist()) if isinstance(state, Tensor) else state]


def allowed_states(options, make):
    """The state that was never initialized, and the one after `initialize` and `reset`; they differ only at O3."""
    untouched, undone = Training(make), Training(make)
    undone.initialize(options)
    amp.reset()
    return [untouched.state(), undone.state()]


def check_undone(training, allowed, interrupt):
    assert OWN.double is double, interrupt
    assert (thread_engines(), _get_current_function_mode_stack()) == ((), []), interrupt
    assert (torch.is_autocast_enabled(AUTOCAST_FLAG), torch.is_grad_enabled()) == (False, True), interrupt
    assert (training.hooks(), hasattr(training.optimizer, "_amp_stash")) == ([], False), interrupt
    assert training.state() in allowed, interrupt


def check_initialize(options, make, every, folders, functions=(), resets=True):
    allowed = allowed_states(options, make)
    for at in range(1, 20_000, every):
        training = Training(make)
        interrupt = interrupted(
            functools.partial(training.initialize, options), at, folders=folders, functions=functions
        )
        assert amp.default_session().initialized == (interrupt is None), interrupt
        if resets or interrupt is None:
            amp.reset()
        check_undone(training, allowed, interrupt)
        if interrupt is None:
            return at
    pytest.fail("initialize has no end")


def check_reset(options, make, every, folders):
    """`reset` has done everything or, before it lets signals wait, nothing."""
    allowed = allowed_states(options, make)[1:]
    for at in range(1, 20_000, every):
        training = Training(make)
        training.initialize(options)
        before = training.hooks(), thread_engines(), training.tensors()
        interrupt = interrupted(amp.reset, at, folders=folders)
        if interrupt is None or (training.hooks(), thread_engines(), training.tensors()) != before:
            check_undone(training, allowed, interrupt)
        if interrupt is None:
            return at
        amp.reset()
    pytest.fail("reset has no end")


@pytest.fixture(autouse=True)
def _ends_clean():
    yield
    amp.reset()


every_kind = pytest.mark.parametrize(
    ("options", "make"),
    [pytest.param(LEVELS[level], OPTIMIZERS[name], id=f"{level} {name}") for level in LEVELS for name in OPTIMIZERS],
)
in_which_files = pytest.mark.parametrize("folders", [AMPLABS, TORCHS], ids=["amplab", "torch"])


@every_kind
def test_reset_undoes_an_interrupted_initialize(options, make):
    check_initialize(options, make, every=197, folders=AMPLABS)


@pytest.mark.parametrize("options", [{"opt_level": "O0"}, *LEVELS.values()], ids=["O0", *LEVELS])
def test_an_interrupted_initialize_leaves_nothing(options):
    assert check_initialize(options, OPTIMIZERS["SGD"], every=1, folders=AMPLABS, functions=LAST, resets=False) > 20


@every_kind
def test_an_interrupt_waits_for_the_end_of_reset(options, make):
    check_reset(options, make, every=107, folders=AMPLABS)


FROM_LEVEL_TO_LEVEL = [(first, second) for first in ("O1", "O2", "O3") for second in ("O1", "O2") if first != second]


@pytest.mark.parametrize(("first", "second"), FROM_LEVEL_TO_LEVEL)
def test_an_interrupted_change_of_level_is_done_by_the_next_call(first, second):
    def initialized(interrupt_at=0):
        training = Training(OPTIMIZERS["SGD"])
        training.initialize(LEVELS[first])
        change = functools.partial(training.initialize, LEVELS[second])
        interrupt = interrupted(change, interrupt_at, folders=AMPLABS)
        change()
        half = training.model(X).dtype
        with amp.scale_loss(training.loss(), training.optimizer) as scaled:
            scaled.backward()
        training.optimizer.step()
        reached = half, training.tensors()
        amp.reset()
        return reached, interrupt

    expected, _ = initialized()
    for at in range(1, 20_000, 197):
        reached, interrupt = initialized(at)
        assert reached == expected, interrupt
        if interrupt is None:
            return


def in_force(*trainings):
    return thread_engines(), amp.default_session().opt_level, [training.hooks() for training in trainings]


@pytest.mark.parametrize(("first", "second"), [*FROM_LEVEL_TO_LEVEL, ("O1", "O1 rules")])
def test_an_interrupted_change_of_level_changes_nothing_or_is_a_reset(first, second):
    for at in range(1, 20_000):
        training = Training(OPTIMIZERS["SGD"])
        training.initialize(LEVELS[first])
        before = in_force(training)
        interrupt = interrupted(
            functools.partial(training.initialize, LEVELS[second]), at, folders=AMPLABS, functions=LAST
        )
        if interrupt is None:
            break
        assert in_force(training) in (before, ((), None, [[]])), interrupt
        amp.reset()


@pytest.mark.parametrize(("first", "second"), FROM_LEVEL_TO_LEVEL)
def test_an_interrupted_initialize_of_another_model_leaves_the_first_one_as_it_is(first, second):
    for at in range(1, 20_000):
        training, other = Training(OPTIMIZERS["SGD"]), Training(OPTIMIZERS["Adam"])
        training.initialize(LEVELS[first])
        before = in_force(training, other)
        interrupt = interrupted(
            functools.partial(other.initialize, LEVELS[second]), at, folders=AMPLABS, functions=LAST
        )
        if interrupt is None:
            break
        assert in_force(training, other) == before, interrupt
        amp.reset()


def test_an_interrupted_init_leaves_nothing():
    functions = ("init", "start_casting", "_change_settings", "install")
    for interrupt in interrupted_everywhere(amp.init, folders=AMPLABS, functions=functions):
        assert in_force() == ((), None, []), interrupt


@pytest.mark.long
@in_which_files
@every_kind
def test_an_initialize_that_is_interrupted_at_any_point_leaves_nothing(options, make, folders):
    assert check_initialize(options, make, every=1, folders=folders, resets=False) > 100


@pytest.mark.long
@in_which_files
@every_kind
def test_reset_undoes_an_initialize_that_is_interrupted_at_any_point(options, make, folders):
    assert check_initialize(options, make, every=1, folders=folders) > 100


@pytest.mark.long
@in_which_files
@every_kind
def test_an_interrupt_at_any_point_waits_for_the_end_of_reset(options, make, folders):
    assert check_reset(options, make, every=1, folders=folders) > 50


class Keeping(torch.optim.SGD):
    """Has its parameters in containers of its own, too."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        own = [param for group in self.param_groups for param in group["params"]]
        self.kept = {"list": own, "tuple": tuple(own), "names": dict.fromkeys(own, "name"), "set": set(own)}

    def stepped(self):
        return [each for container in (self.param_groups[0]["params"], *self.kept.values()) for each in container]


def counted(optimizer, params):
    """How often the optimizer has each of ``params``, in its groups and its containers, and in its state."""
    stepped = [id(each) for each in optimizer.stepped()]
    return [(stepped.count(id(param)), param in optimizer.state) for param in params], len(stepped)


@pytest.mark.parametrize("undoes", [False, True])
def test_an_interrupt_while_parameters_are_replaced_leaves_all_of_them_or_none(undoes):
    functions = ("replace_params", "replace_in", "_replaced")
    for at in range(1, 20_000, 7):
        training = Training(Keeping)
        params = list(training.model.parameters())
        everywhere = [(5, True)] * 6, 5 * 6
        call = functools.partial(training.initialize, LEVELS["O2"])
        if undoes:
            call()
            assert counted(training.optimizer, params)[0][0] == (0, False)
            call = amp.reset
        interrupt = interrupted(call, at, folders=AMPLABS, functions=functions)
        if interrupt is not None or undoes:
            assert counted(training.optimizer, params) == everywhere, interrupt
        if interrupt is None:
            assert at > 20
            return
        amp.reset()
        assert counted(training.optimizer, params) == everywhere, interrupt
