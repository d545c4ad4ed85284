"""What an optimizer keeps in another dtype than its parameters is loaded as it was saved, and taken back so, too."""

import pytest
import torch
from torch import nn

from amplab import amp
from amplab.amp.run_state.optimizer_checks import optimizer_entry
from amplab.amp.run_state.optimizer_state import load_optimizer


class InFloat32(torch.optim.Optimizer):
    """SGD of a class of one's own: momentum in float32 for every parameter, a count as an integer, a history."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state.update(momentum=torch.zeros_like(param, dtype=torch.float32), count=torch.tensor(0), norms=[])
            state["momentum"].mul_(0.9).add_(param.grad.float())
            state["count"] += 1
            state["norms"].append(state["momentum"].norm())
            param.sub_(self.param_groups[0]["lr"] * state["momentum"].to(param.dtype))


OPTIMIZERS = {
    "nadam": lambda params: torch.optim.NAdam(params, 1e-2, eps=1e-4),
    "asgd": lambda params: torch.optim.ASGD(params, 1e-2, t0=2),
    "adam": lambda params: torch.optim.Adam(params, 1e-2, eps=1e-4),
    "own": InFloat32,
}


class Run:
    """A model at an opt_level, or with parameters of a dtype."""

    def __init__(self, name, level):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.session = amp.Session() if isinstance(level, str) else None
        if self.session is None:
            self.model.to(level)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        if self.session is not None:
            self.session.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)

    def train(self, steps):
        for number in steps:
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            self.optimizer.zero_grad()
            if self.session is None:
                self.model(inputs.to(self.model[0].weight.dtype)).float().square().mean().backward()
            else:
                with self.session.casting():
                    loss = self.model(inputs).float().square().mean()
                    with self.session.scale_loss(loss, self.optimizer) as scaled:
                        scaled.backward()
            self.optimizer.step()
        return self

    @property
    def parts(self):
        given = {} if self.session is None else {"amp": self.session}
        return {"model": self.model, "optimizer": self.optimizer, **given}

    def weights(self):
        return [each.detach() for each in self.model.parameters()]


def flat(state):
    """The tensors of the state of an optimizer, with their places."""
    if isinstance(state, torch.Tensor):
        return {"": state.clone()}
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {f"{key}/{place}": value for key, each in pairs for place, value in flat(each).items()}


def state_of(optimizer):
    return flat(optimizer.state_dict()["state"])


def assert_same(found, expected):
    assert {place: each.dtype for place, each in found.items()} == {
        place: each.dtype for place, each in expected.items()
    }
    assert all(torch.equal(found[place], each) for place, each in expected.items())


@pytest.mark.parametrize("level", ["O2", "O3", torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_has_the_bits_of_the_saved_one(tmp_path, name, level):
    saved = Run(name, level).train(range(3))
    amp.save_run_state(tmp_path / "run.pt", **saved.parts)
    loaded = Run(name, level).train([9])
    amp.load_run_state(tmp_path / "run.pt", **loaded.parts)
    assert_same(state_of(loaded.optimizer), state_of(saved.optimizer))
    saved.train(range(3, 20))
    loaded.train(range(3, 20))
    assert all(map(torch.equal, loaded.weights(), saved.weights()))


@pytest.mark.parametrize("levels", [("O2", "O3"), ("O3", "O2"), ("O0", "O3"), ("O3", "O0")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_at_another_level_state_has_the_dtypes_that_the_optimizer_makes(tmp_path, name, levels):
    saved, loaded = (Run(name, level).train(range(3)) for level in levels)
    makes = {place: each.dtype for place, each in state_of(loaded.optimizer).items()}
    amp.save_run_state(tmp_path / "run.pt", **saved.parts)
    amp.load_run_state(tmp_path / "run.pt", **loaded.parts)
    before, after = state_of(saved.optimizer), state_of(loaded.optimizer)
    if name != "own":  # what a class of one's own makes is not known
        assert {place: each.dtype for place, each in after.items()} == makes
    assert all(torch.equal(after[place].double(), before[place].to(makes[place]).double()) for place in before
               if after[place].dtype == makes[place] != torch.half)  # fmt: skip
    loaded.train(range(3, 6))
    assert all(each.isfinite().all() for each in loaded.weights())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_cannot_be_loaded_leaves_the_bits_of_the_optimizer(tmp_path, name):
    saved, loaded = Run(name, torch.half).train(range(3)), Run(name, torch.half).train(range(4, 9))
    amp.save_run_state(tmp_path / "run.pt", **saved.parts)
    before = state_of(loaded.optimizer)

    def refuse(*_):
        hook.remove()
        raise RuntimeError("refused")

    hook = loaded.model.register_load_state_dict_post_hook(refuse)
    with pytest.raises(amp.RunStateError, match="nothing was loaded"):
        amp.load_run_state(tmp_path / "run.pt", model=loaded.model, optimizer=loaded.optimizer)
    assert_same(state_of(loaded.optimizer), before)


@pytest.mark.parametrize("name", ["nadam", "asgd"])
def test_a_file_that_does_not_say_the_dtypes_of_parameters(name):
    saved, loaded = Run(name, torch.half).train(range(3)), Run(name, torch.half)
    entry = optimizer_entry(saved.optimizer)
    del entry["dtypes"]  # as files of earlier versions
    load_optimizer(loaded.optimizer, entry)
    assert_same(state_of(loaded.optimizer), state_of(saved.optimizer))


def test_what_a_hook_has_loaded_instead_stays():
    saved, loaded = Run("nadam", torch.half).train(range(3)), Run("nadam", torch.half)

    def halved(optimizer):
        for state in optimizer.state.values():
            state["mu_product"].mul_(0.5)

    loaded.optimizer.register_load_state_dict_post_hook(halved)
    load_optimizer(loaded.optimizer, optimizer_entry(saved.optimizer))
    products = [float(each["mu_product"]) for each in saved.optimizer.state.values()]
    assert [float(each["mu_product"]) for each in loaded.optimizer.state.values()] == pytest.approx(
        [each / 2 for each in products], rel=1e-3
    )
