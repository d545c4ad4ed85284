"""An interrupt at any point of a tool: no hook and no mode stays on, and the model is as it was."""

import pytest
import torch
from interrupts import interrupted
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers
from torch.overrides import _get_current_function_mode_stack

import amplab
from amplab.policies import casts_enabled, cpu_half_mode, thread_engines

X, TARGET = torch.ones(4, 8), torch.tensor([0, 1, 2, 0])


class Subject:
    """A model and its optimizer, and what must not change."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.half_mode = cpu_half_mode()
        self.before = self.state()

    def loss(self, output):
        return F.cross_entropy(output.float(), TARGET)

    def xray(self):
        amplab.xray(self.model, X, loss=self.loss, opt_level="O1")

    def first_nonfinite(self):
        amplab.first_nonfinite(self.model, X * 1e20, loss=self.loss, opt_level="O1")

    def doctor(self):
        amplab.doctor(self.model, X, loss=self.loss, opt_level="O1")

    def watched(self):
        with amplab.watch(self.model, self.optimizer, loss=self.loss) as watch:
            for batch in watch.batches([X]):
                watch.loss(self.loss(self.model(batch))).backward()
                self.optimizer.step()

    def state(self):
        return {name: value.tolist() for name, value in self.model.state_dict().items()}

    def hooks(self):
        owners = [*self.model.modules(), self.optimizer]
        names = ("_forward_hooks", "_forward_pre_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        found = [getattr(owner, name, {}) for owner in owners for name in names]
        found += [param._backward_hooks or {} for param in self.model.parameters()]
        return sum(map(len, found)) + len(optimizers._global_optimizer_pre_hooks)

    def assert_untouched(self, interrupt):
        assert torch._C._len_torch_dispatch_stack() == 0, interrupt
        assert thread_engines() == (), interrupt
        assert casts_enabled(), interrupt
        assert _get_current_function_mode_stack() == [], interrupt
        assert cpu_half_mode() == self.half_mode, interrupt
        assert torch.is_grad_enabled(), interrupt
        assert self.model.training, interrupt
        assert self.hooks() == 0, interrupt

    def assert_as_before(self, interrupt):
        self.assert_untouched(interrupt)
        assert self.state() == self.before, interrupt
        assert all(param.grad is None for param in self.model.parameters()), interrupt


SETS_UP_OR_ENDS = (
    "__enter__",
    "__exit__",
    "_begin",
    "_end",
    "_leave",
    "_stop_following",
    "enter",
    "following",
    "leave",
)
SETS_UP_OR_ENDS += ("recording", "remove", "restored")
"""Functions that set something up or end it: that is where an interrupt can leave something on."""


def check(tool, every, first, functions):
    subject = Subject()
    getattr(subject, tool)()  # imports, and builds what is kept
    for at in range(first, 2_000_000, every):
        subject = Subject()
        interrupt = interrupted(getattr(subject, tool), at, functions=functions)
        torch.set_grad_enabled(True)  # torch's own blocks leave it off when they are interrupted as they end
        if interrupt is None:
            return
        if tool == "watched":
            subject.assert_untouched(interrupt)
        else:
            subject.assert_as_before(interrupt)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tool", "every"), [("xray", 121), ("first_nonfinite", 401)])
def test_an_interrupted_tool_leaves_nothing_on(tool, every):
    check(tool, every, every // 2, SETS_UP_OR_ENDS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", ["xray", "first_nonfinite", "doctor", "watched"])
def test_a_tool_that_is_interrupted_anywhere_leaves_nothing_on(tool):
    check(tool, 1, 1, SETS_UP_OR_ENDS)
    check(tool, 401, 200, ())
