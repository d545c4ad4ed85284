"""Checkpoints: float32 masters saved and loaded, and runs that resume bit for bit."""

import contextlib
import copy
import io
import threading

import pytest
import torch
from torch import nn

from amplab import amp

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
}


def start(problem, level, name, seed=0):
    session, model = amp.Session(), problem.model(seed)
    optimizer = OPTIMIZERS[name](model.parameters())
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    return session, model, optimizer


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(problem, level, name):
    session, model, optimizer = start(problem, level, name)
    problem.train(session, model, optimizer, range(5))
    file = io.BytesIO()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": session.state_dict()}
    torch.save(checkpoint, file)
    losses = problem.train(session, model, optimizer, range(5, 12))
    assert all(param.isfinite().all() for param in model.parameters())

    file.seek(0)
    checkpoint = torch.load(file)
    session, twin, optimizer = start(problem, level, name, seed=1)
    twin.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    session.load_state_dict(checkpoint["amp"])
    assert problem.train(session, twin, optimizer, range(5, 12)) == losses
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


def test_a_half_model_saves_the_values_of_its_masters(problem):
    session, model, optimizer = start(problem, "O2", "sgd")
    problem.train(session, model, optimizer, range(3))
    saved = copy.deepcopy(model.state_dict())
    masters = list(session.master_params(optimizer))
    for (name, param), master in zip(model.named_parameters(), masters, strict=True):
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name], master)
        assert torch.equal(saved[name].to(param.dtype), param)
    assert not torch.equal(saved["0.weight"], model[0].weight.float())
    assert torch.equal(model[0].state_dict()["weight"], masters[0])
    assert torch.equal(model.state_dict(prefix="net.")["net.0.weight"], masters[0])
    assert not saved["0.weight"].requires_grad
    assert model.state_dict(keep_vars=True)["0.weight"] is masters[0]


def test_a_half_model_without_masters_saves_float32(problem):
    _, model, _ = start(problem, "O3", "sgd")
    dtypes = {value.dtype for value in model.state_dict().values()}
    assert dtypes == {torch.float32, torch.int64}
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight.float())


def test_extra_state_passes(problem):
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    model = Counting(2, 2)
    amp.Session().initialize(model, opt_level="O2", verbosity=0)
    model.load_state_dict(model.state_dict())
    assert model.calls == 3


def test_weights_loaded_in_mid_training_stay_loaded(problem):
    session, model, optimizer = start(problem, "O2", "sgd")
    problem.train(session, model, optimizer, range(3))
    loaded = {name: value.clone() for name, value in problem.model(seed=1).state_dict().items()}
    model.load_state_dict(loaded)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    problem.train(session, model, optimizer, [3])
    masters = dict(zip((name for name, _ in model.named_parameters()), session.master_params(optimizer), strict=True))
    for name, master in masters.items():
        assert torch.equal(master, loaded[name])


def test_an_edit_after_loading_reaches_the_masters(problem):
    session, model, optimizer = start(problem, "O2", "sgd")
    problem.train(session, model, optimizer, range(3))
    model.load_state_dict(loaded := problem.model(seed=1).state_dict())
    model[3].bias.data.zero_()
    model[3].weight.data[0].zero_()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    problem.train(session, model, optimizer, [3])
    *_, weight, bias = session.master_params(optimizer)
    assert torch.equal(bias, torch.zeros(4))
    assert torch.equal(weight, torch.cat([torch.zeros(1, 32), loaded["3.weight"][1:]]))


def test_half_weights_and_parts_of_a_model_can_be_loaded(problem):
    session, model, optimizer = start(problem, "O2", "sgd")
    before = model.state_dict()["3.weight"].clone()
    part = problem.model(seed=1)[0].half().state_dict()
    model[0].load_state_dict(part)
    model.load_state_dict({"3.bias": torch.ones(4)}, strict=False)
    masters = list(session.master_params(optimizer))
    assert torch.equal(masters[0], part["weight"].float())
    assert torch.equal(masters[4], before)
    assert torch.equal(masters[5], torch.ones(4))


def test_masters_follow_what_other_hooks_make_of_the_values(problem):
    session, model, optimizer = start(problem, "O2", "sgd")

    def double(module, saved, prefix, *_):
        saved[prefix + "weight"] = saved.pop(prefix + "half_of_it") * 2

    model[0].register_load_state_dict_pre_hook(double)
    values = torch.full((32, 16), 0.1)
    model[0].load_state_dict({"half_of_it": values, "bias": torch.zeros(32)})
    master = next(session.master_params(optimizer))
    assert torch.equal(master, (values * 2).half().float())
    assert torch.equal(model[0].weight, master.half())


def test_a_load_that_fails_keeps_masters_and_model_together(problem):
    session, model, optimizer = start(problem, "O2", "sgd")
    wrong = problem.model(seed=1).state_dict()
    wrong["3.weight"] = torch.zeros(5, 5)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(wrong)
    for master, param in zip(session.master_params(optimizer), model.parameters(), strict=True):
        assert torch.equal(master.to(param.dtype), param)


def test_assigning_new_parameters_is_refused(problem):
    _, model, _ = start(problem, "O2", "sgd")
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\) on a model that amp.initialize has cast"):
        model.load_state_dict(model.state_dict(), assign=True)


def test_tied_weights_share_a_master():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    session, optimizer = amp.Session(), torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    saved = copy.deepcopy(model.state_dict())
    assert len(list(session.master_params(optimizer))) == 3
    assert torch.equal(saved["0.weight"], saved["1.weight"])
    saved["0.weight"] = saved["1.weight"] = torch.full((4, 4), 1 / 3)
    model.load_state_dict(saved)
    assert torch.equal(next(session.master_params(optimizer)), saved["0.weight"])


def test_float32_optimizer_state_survives_the_checkpoint(problem):
    session, model, optimizer = start(problem, "O2", "adam")
    problem.train(session, model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    session, model, optimizer = start(problem, "O2", "adam")
    optimizer.load_state_dict(saved)
    for index, param in enumerate(session.master_params(optimizer)):
        assert torch.equal(optimizer.state[param]["exp_avg_sq"], saved["state"][index]["exp_avg_sq"])


@pytest.mark.parametrize("swap", ["values", "storage"])
def test_averages_that_are_swapped_into_the_model_are_saved(problem, swap):
    """As `with ema.average_parameters(): torch.save(model.state_dict())` does."""
    session, model, optimizer = start(problem, "O2", "sgd")
    problem.train(session, model, optimizer, range(3))
    trained = copy.deepcopy(model.state_dict())
    averages = {name: param.detach() * 0.5 for name, param in model.named_parameters()}
    own = {name: param.data for name, param in model.named_parameters()}
    values = {name: param.data.clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if swap == "values":
            param.data.copy_(averages[name])
        else:
            param.data = averages[name]
    saved = copy.deepcopy(model.state_dict())
    for name, param in model.named_parameters():
        param.data = own[name]
        param.data.copy_(values[name])
    assert all(torch.equal(saved[name], average.float()) for name, average in averages.items())
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_a_model_that_serves_in_another_thread_takes_no_step_from_the_one_that_trains(problem):
    """Its forward begins within a step of the optimizer."""
    begun, served = threading.Event(), threading.Event()

    class Waiting(torch.optim.SGD):
        def step(self, closure=None):
            begun.set()
            served.wait(10)
            return super().step(closure)

    session, model, x = amp.Session(), problem.model(), problem.batch(0)[0]
    optimizer = Waiting(model.parameters(), lr=0.05)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)

    def serve():
        begun.wait()
        with torch.no_grad():
            model(x)
        served.set()

    serving = threading.Thread(target=serve)
    serving.start()
    problem.train(session, model, optimizer, range(1))
    serving.join()
    pairs = list(zip(model.parameters(), session.master_params(optimizer), strict=True))
    assert served.is_set()
    assert all(torch.equal(param, master.to(param.dtype)) for param, master in pairs)


@pytest.mark.parametrize("at", ["in a hook", "after an interrupt"])
def test_a_model_that_is_saved_before_it_has_the_copy_of_its_step_has_the_masters(problem, at):
    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if at == "after an interrupt":
                raise KeyboardInterrupt

    model, session, saved = problem.model(), amp.Session(), []
    optimizer = Interrupted(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: saved.append(copy.deepcopy(model.state_dict())))
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with contextlib.suppress(KeyboardInterrupt):
        problem.train(session, model, optimizer, range(1))
    if at == "after an interrupt":
        saved.append(copy.deepcopy(model.state_dict()))
    masters = dict(zip(dict(model.named_parameters()), session.master_params(optimizer), strict=True))
    assert all(torch.equal(saved[-1][name], master) for name, master in masters.items())
