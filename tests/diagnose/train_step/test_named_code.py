"""A clipping that does nothing is found by its name, in functions and methods; one of the masters is left alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from amplab.amp import Session
from amplab.diagnose import doctor
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.gradients import gradient_findings
from amplab.diagnose.train_step.named_code import clips_of_model_parameters
from amplab.diagnose.train_step.rehearse_loop import rehearse_loop


class Training:
    """A loop whose clipping is one of its methods; at O2 all of the model's gradients have moved to the masters."""

    def __init__(self, level, limit):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.session, self.limit, self.x = Session(), limit, torch.randn(32, 8)
        self.session.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, dynamic_init_scale=16.0)
        self.masters = list(self.session.master_params(self.optimizer))

    def step(self, clip):
        self.optimizer.zero_grad()
        with self.session.casting():
            loss = F.mse_loss(self.model(self.x).float(), torch.full((32, 1), 5.0))
        with self.session.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        clip()
        self.optimizer.step()

    def of_model(self):
        self.step(self.clip_model)

    def clip_model(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)

    def of_masters(self):
        self.step(lambda: clip_grad_norm_(self.session.master_params(self.optimizer), self.limit))

    def of_masters_made_before(self):
        self.step(lambda: clip_grad_norm_(self.masters, self.limit))

    def of_masters_counted(self):
        assert len(self.masters) == len(list(self.model.parameters()))
        self.step(lambda: clip_grad_norm_(self.masters, self.limit))

    def of_nothing(self):
        assert list(self.model.parameters())
        self.step(lambda: None)

    def mended(self, remedy):
        exec(remedy, {"amp": self.session, "optimizer": self.optimizer, "max_norm": 1e-3, "torch": torch})
        norm = torch.nn.utils.get_total_norm([each.grad for each in self.masters])
        torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=1e-3, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("limit", [1e-3, 1e9])
@pytest.mark.parametrize(
    "name", ["of_model", "of_masters", "of_masters_made_before", "of_masters_counted", "of_nothing"]
)
def test_clipping_gradients_that_are_none(level, limit, name):
    training = Training(level, limit)
    try:
        seen = rehearse_loop(training.model, getattr(training, name), [training.optimizer], scaler=training.session)
        found = gradient_findings(seen, Api(ApiStyle.APEX))
        expected = [("clips-model-gradients", "warning", "certain")] * (name == "of_model" and level == "O2")
        assert [(each.name, each.severity, each.certainty) for each in found] == expected
        for each in found:
            training.step(lambda remedy=each.remedy: training.mended(remedy))
    finally:
        training.session.reset()


def test_the_doctor_finds_it():
    training = Training("O2", 1.0)
    try:
        for clip, expected in ((training.of_model, ["clips-model-gradients"]), (training.of_masters, [])):
            options = {"train_step": clip, "optimizer": training.optimizer, "scaler": training.session}
            assert [each.name for each in doctor(training.model, **options)] == expected
    finally:
        training.session.reset()


def test_the_librarys_own_functions_are_not_read():
    assert clips_of_model_parameters(nn.utils.clip_grad_norm_) == ""
