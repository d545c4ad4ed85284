"""The private names of apex on an optimizer, in the lines of scripts that read them."""

import copy
import pickle

import pytest
import torch
from torch import nn

from amplab import amp

LEVELS = ("O0", "O1", "O2", "O3")


def initialized(problem, level, make=torch.optim.SGD, **options):
    model = problem.model()
    session, optimizer = amp.Session(), make(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return session, model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_hasattr_tells_whether_amp_is_on(problem, level):
    session, _, optimizer = initialized(problem, level)
    assert hasattr(optimizer, "_amp_stash")
    before = set(vars(optimizer))
    session.initialize(nn.Linear(1, 1), optimizer, opt_level=level, verbosity=0)
    assert set(vars(optimizer)) == before
    session.reset()
    assert not hasattr(optimizer, "_amp_stash")
    assert set(vars(optimizer)) == set(vars(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)))


@pytest.mark.parametrize(("level", "halves", "singles"), [("O0", 0, 6), ("O1", 0, 6), ("O2", 4, 2), ("O3", 6, 0)])
def test_parameters_by_dtype(problem, level, halves, singles):
    session, model, optimizer = initialized(problem, level)
    stash = optimizer._amp_stash
    assert (len(stash.all_fp16_params), len(stash.all_fp32_params)) == (halves, singles)
    assert {*stash.all_fp16_params, *stash.all_fp32_params} == {*model.parameters()}
    masters = [master for master in session.master_params(optimizer) if master not in {*model.parameters()}]
    assert stash.all_fp32_from_fp16_params == masters
    assert (stash.fp16_groups, stash.fp32_from_fp32_groups) == ([stash.all_fp16_params], [stash.all_fp32_params])
    assert level != "O2" or stash.fp32_from_fp16_groups == [masters]


def test_flags(problem):
    session, model, optimizer = initialized(problem, "O1")
    stash = optimizer._amp_stash
    assert (stash.already_patched, stash.params_have_scaled_gradients, stash.lazy_init_called) == (False, False, True)
    with session.scale_loss(problem.loss(model, 0), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    assert stash.params_have_scaled_gradients
    with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    assert (stash.already_patched, stash.params_have_scaled_gradients) == (True, False)
    optimizer.step()
    assert not stash.already_patched


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_do_not_carry_them(problem, duplicate):
    _, _, optimizer = initialized(problem, "O2")
    assert not hasattr(duplicate(optimizer), "_amp_stash")


def test_the_resume_protocol_of_bert(problem):
    """Load, make masters, load again, and copy the saved masters: bit for bit the run that was not interrupted."""

    def start():
        return initialized(problem, "O2", make=lambda params, lr: torch.optim.Adam(params, lr=lr))

    session, model, optimizer = start()
    problem.train(session, model, optimizer, range(4))
    checkpoint = copy.deepcopy(
        {
            "model": {name: value.half() if "weight" in name else value for name, value in model.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "master params": list(session.master_params(optimizer)),
        }
    )
    resumed_session, resumed, resumed_optimizer = start()
    resumed.load_state_dict(checkpoint["model"])
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    resumed_optimizer._lazy_init_maybe_master_weights()
    resumed_optimizer._amp_stash.lazy_init_called = True
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved in zip(session.master_params(resumed_optimizer), checkpoint["master params"], strict=True):
        param.data.copy_(saved.data)
    resumed_optimizer._master_params_to_model_params()
    went_on = problem.train(session, model, optimizer, range(4, 8))
    assert problem.train(resumed_session, resumed, resumed_optimizer, range(4, 8)) == went_on


@pytest.mark.parametrize("name", ["_prepare_amp_backward", "_post_amp_backward"])
def test_parts_of_scale_loss_are_not_called_alone(problem, name):
    _, _, optimizer = initialized(problem, "O2")
    with pytest.raises(RuntimeError, match=rf"^optimizer.{name}\(\) is a part of apex's scale_loss that cannot"):
        getattr(optimizer, name)(None)


def test_unknown_names_say_what_there_is(problem):
    _, _, optimizer = initialized(problem, "O2")
    with pytest.raises(AttributeError, match=r"^optimizer._amp_stash.all_fp32_from_fp32_grad_stash does not exist"):
        optimizer._amp_stash.all_fp32_from_fp32_grad_stash  # noqa: B018


class Lookahead(torch.optim.Optimizer):
    """As copied from project to project: ``super().__init__()`` is never called."""

    def __init__(self, base, alpha=0.5, k=2):
        self.optimizer, self.param_groups, self.state = base, base.param_groups, base.state
        self.alpha, self.k, self.count, self.slow = alpha, k, 0, {}

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        for param in self.param_groups[0]["params"] if self.count % self.k == 0 else ():
            slow = self.slow.setdefault(param, param.detach().clone())
            slow.add_(param.detach() - slow, alpha=self.alpha)
            param.data.copy_(slow)
        return loss

    def zero_grad(self):
        self.optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_uninitialized_optimizer_is_accepted(problem, level):
    def trained(amp_level):
        model = problem.model(batch_norm=False)
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        session = amp.Session()
        session.initialize(
            model, optimizer, opt_level=amp_level, loss_scale="dynamic", dynamic_init_scale=64.0, verbosity=0
        )
        scale = session.loss_scale()
        for step in range(6):
            loss = problem.loss(model, step).float()
            if step == 2:
                loss = loss * float("inf")
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            assert session.last_step(optimizer).stepped == (step != 2)
            optimizer.zero_grad()
        assert session.loss_scale() < scale
        return torch.cat([value.float().flatten() for value in model.state_dict().values()]), optimizer.count

    trained_weights, steps = trained(level)
    reference, _ = trained("O0")
    assert steps == 5  # the skipped one changes nothing of it
    torch.testing.assert_close(trained_weights, reference, atol=0.02, rtol=0.02)
