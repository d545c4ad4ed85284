"""A remedy for one API runs in a loop that uses that API, and uses no name of another."""

import pytest
import torch
from torch import nn

import amplab
from amplab.diagnose.catalogue import CATALOGUE
from amplab.diagnose.remedies.api_styles import Api, ApiStyle, PerApi, api_style_of

STYLES = ("apex", "amplab", "torch", "none")
WORDS = {
    "apex": ("scaler", "GradScaler"),
    "amplab": ("amp.", "scale_loss", "torch.amp", "get_scale"),
    "torch": ("amp.last_step", "amp.initialize", "scale_loss", "last_step", "amp.master_params"),
    "none": ("scaler", "amp.last_step", "amp.initialize", "amp.master_params"),
}
"""Names that a loop of this style does not have."""


class Loop:
    """A training loop of one style up to its step, and the names that its code may use."""

    def __init__(self, style):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = None
        if style == "apex":
            amplab.amp.initialize(self.model, self.optimizer, opt_level="O1", verbosity=0, dynamic_init_scale=16.0)
        if style == "amplab":
            self.scaler = amplab.GradScaler("cpu")
        if style == "torch":
            self.scaler = torch.amp.GradScaler("cpu")
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.x, self.style = torch.ones(2, 4), style

    def names(self):
        return {
            "amp": amplab.amp, "amplab": amplab, "torch": torch, "model": self.model, "optimizer": self.optimizer,
            "scaler": self.scaler, "scheduler": self.scheduler, "x": self.x, "max_norm": 0.5, "loss_of": self.loss,
        }  # fmt: skip

    def loss(self):
        return self.model(self.x).float().square().mean() * 1e3

    def backward(self):
        self.optimizer.zero_grad()
        if self.style == "apex":
            with amplab.amp.scale_loss(self.loss(), self.optimizer) as scaled:
                scaled.backward()
        else:
            (self.loss() if self.scaler is None else self.scaler.scale(self.loss())).backward()

    def step(self):
        (self.optimizer.step if self.scaler is None else lambda: self.scaler.step(self.optimizer))()


@pytest.fixture(params=STYLES)
def loop(request):
    yield Loop(request.param)
    amplab.amp.reset()


def text(name, part, style, case="", **fields):
    """A sentence or remedy of the catalogue for a loop of one API."""
    said = dict(zip(("symptom", "cause", "remedy"), CATALOGUE[name].texts(case), strict=True))[part]
    assert isinstance(said, PerApi)
    return said.text(Api(ApiStyle(style), opt_level="O1" if style == "apex" else ""), fields)


def remedy(name, style, **fields):
    return text(name, "remedy", style, **fields)


def speaks(style, code):
    return not any(word in code for word in WORDS[style])


def test_clipping_runs_between_backward_and_step(loop):
    for code in remedy("diverging", loop.style, rate="0.01"), remedy("clips-scaled-gradients", loop.style):
        assert speaks(loop.style, code)
    loop.backward()
    exec(remedy("diverging", loop.style, rate="0.01"), loop.names())
    assert loop.optimizer.param_groups[0]["lr"] == 0.01
    params = list(amplab.amp.master_params(loop.optimizer)) if loop.style == "apex" else loop.model.parameters()
    norm = torch.nn.utils.get_total_norm([each.grad for each in params])
    torch.testing.assert_close(norm, torch.tensor(1.0), rtol=1e-3, atol=0)


def test_a_face_that_is_not_known_has_model_parameters():
    for code in remedy("diverging", "", rate="0.01"), remedy("clips-scaled-gradients", ""):
        assert "clip_grad_norm_(model.parameters()" in code
        compile(code, "remedy", "exec")


def test_a_schedule_moves_where_the_optimizer_has_stepped(loop):
    code = remedy("scheduler-counts-skips", loop.style)
    assert speaks(loop.style, code)
    for overflows in (False, True):
        before, rate = loop.model.weight.detach().clone(), loop.optimizer.param_groups[0]["lr"]
        loop.x = torch.full((2, 4), float("inf") if overflows and loop.style != "none" else 1.0)
        loop.backward()
        if loop.style != "none":
            loop.step()
        if loop.style == "amplab":
            loop.scaler.update()
        exec(code, loop.names())
        moved = loop.optimizer.param_groups[0]["lr"] < rate
        assert moved == (not torch.equal(before, loop.model.weight))
        assert moved == (not overflows or loop.style == "none")


def test_a_step_before_its_schedule(loop):
    loop.backward()
    before = loop.model.weight.detach().clone()
    exec(remedy("scheduler-before-step", loop.style), loop.names())
    assert loop.optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(before, loop.model.weight)


@pytest.mark.parametrize("style", STYLES[:3])
def test_settings_of_a_scale(style):
    for code in (
        remedy("window-too-short", style, new_window=1000),
        remedy("slow-start", style, first_scale_without_overflow=512.0),
    ):
        assert speaks(style, code)
        names = Loop("none").names()
        try:
            exec(code, names)
            if style == "apex":
                (scaler,) = amplab.amp.default_session().scalers
                assert "1000" in code or scaler.scale == 512
            else:
                assert type(names["scaler"]).__module__.startswith(style)
                assert (names["scaler"].get_growth_interval() == 1000) or names["scaler"].get_scale() == 512
        finally:
            amplab.amp.reset()


def test_a_look_at_a_step(loop, capsys):
    names = {**loop.names(), "batch": loop.x, "loss_of": lambda model, batch: model(batch).sum()}
    exec(remedy("scale-collapse", loop.style), names)
    assert capsys.readouterr().out == "None\n"


@pytest.mark.parametrize("style", ["amplab", "torch"])
def test_a_step_that_is_unscaled(style):
    loop = Loop(style)
    loop.backward()
    before, gradient = loop.model.weight.detach().clone(), loop.model.weight.grad / loop.scaler.get_scale()
    cause, code = (text("stepped-with-scaled-gradients", part, style) for part in ("cause", "remedy"))
    assert "scale_loss" not in cause + code
    exec(code, loop.names())
    torch.testing.assert_close(loop.model.weight.detach(), before - 0.1 * gradient)


def test_each_api_is_recognized_by_its_scaler():
    assert [api_style_of(Loop(style).scaler) for style in STYLES[1:]] == list(STYLES[1:])
    assert api_style_of(amplab.amp.Session()) == "apex"
    assert api_style_of(torch.amp.GradScaler("cpu", enabled=False)) == "none"
