"""A step that fails after its forward has moved a teacher is taken back with the teacher."""

import copy

import pytest
import torch
import torch.nn.functional as F
from own_models import is_taken_back, registered
from torch import nn

from amplab.lab import Experiment

pytestmark = pytest.mark.usefixtures("nothing_own")

torch.manual_seed(0)
BATCHES = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(4)]


def in_place(theirs, own):
    theirs.mul_(0.5).add_(own, alpha=0.5)


def of_data(theirs, own):
    theirs.data.mul_(0.5).add_(own.data, alpha=0.5)


def another(theirs, own):
    theirs.data = 0.5 * theirs.data + 0.5 * own.data


class WithTeacher(nn.Module):
    """As in MoCo: each forward in training moves the teacher first."""

    def __init__(self, move):
        super().__init__()
        self.student, self.move = nn.Linear(8, 4), move
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for theirs, own in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    self.move(theirs, own)
        return self.student(x) - 0.5 * self.teacher(x)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("move", [in_place, of_data, another])
def test_a_failed_step_leaves_a_teacher_as_before_it(move, level, tmp_path):
    fails = []

    def loss(output, labels):
        if fails:
            raise RuntimeError("out of memory")
        return F.cross_entropy(output.float(), labels)

    config = registered(WithTeacher(move), BATCHES, loss=loss).changed(opt_level=level)
    whole, experiment = Experiment(config), Experiment(config)
    losses = [whole.step().loss for _ in range(8)]
    assert [experiment.step().loss for _ in range(3)] == losses[:3]
    assert is_taken_back(experiment, fails, RuntimeError)
    fails.clear()
    experiment.save(tmp_path / "run.checkpoint", {})
    again, _ = Experiment.load(tmp_path / "run.checkpoint")
    for one in (experiment, again):
        assert [one.step().loss for _ in range(5)] == losses[3:]


def test_a_failed_step_that_has_written_to_trained_weights_is_not_taken_back():
    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    fails = []
    loss = lambda output, labels: 1 / 0 if fails else F.cross_entropy(output, labels)  # noqa: E731
    config = registered(Clamped(8, 4), BATCHES, loss=loss)
    experiment = Experiment(config)
    experiment.step()
    assert not is_taken_back(experiment, fails)


def test_frozen_weights_that_no_forward_writes_to_are_copied_in_the_first_steps_alone():
    """As those of a large model that an adapter is trained on."""
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(requires_grad=False), nn.Linear(8, 4))
    experiment = Experiment(registered(model, BATCHES, loss=F.cross_entropy))
    copied = []
    for _ in range(5):
        experiment.step()
        copied.append(len(experiment._weights_before._copies))
    assert copied == [2, 2, 2, 0, 0]
