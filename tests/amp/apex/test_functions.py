"""The module functions, as old scripts call them."""

import contextlib
import inspect
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_lines_of_the_readme(problem, level, capsys):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    losses = []
    for step in range(40):
        loss = problem.loss(model, step)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    assert losses[-1] < 0.3 * losses[0]
    assert amp.last_step(optimizer).stepped
    assert amp.loss_scale() == (65536.0 if level in ("O1", "O2") else 1.0)
    assert amp.memory().total > 0
    assert capsys.readouterr().out.startswith(f"Selected optimization level {level}")


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_o1_casts_everywhere_in_the_thread_until_reset(problem):
    amp.initialize(problem.model(), opt_level="O1", verbosity=0)
    amp.initialize(problem.model(), opt_level="O1", verbosity=0)
    assert product() == torch.float16
    with amp.disable_casts():
        assert product() == torch.float32
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(product()))
    thread.start()
    thread.join()
    assert elsewhere == [torch.float32]
    amp.reset()
    assert product() == torch.float32


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_another_level_ends_the_casts_of_o1(problem, level):
    amp.initialize(problem.model(), opt_level="O1", verbosity=0)
    amp.initialize(problem.model(), opt_level=level, verbosity=0)
    assert product() == torch.float32


def test_disabling_ends_the_casts_of_o1(problem):
    amp.initialize(problem.model(), opt_level="O1", verbosity=0)
    amp.initialize(problem.model(), enabled=False)
    assert product() == torch.float32


def test_other_threads_cast_inside_the_forward_of_an_initialized_model(problem):
    model = amp.initialize(problem.model(), opt_level="O1", verbosity=0)
    seen = []

    def work():
        seen.extend((model(problem.inputs).dtype, product()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [torch.float16, torch.float32]


def test_o1_outlives_the_block_it_was_begun_in(problem):
    with torch.device("cpu"):
        amp.initialize(problem.model(), opt_level="O1", verbosity=0)
        assert product() == torch.float16
    assert product() == torch.float16


def test_gradient_penalty(problem):
    """Input gradients through a scaled loss, with no parameter's gradient touched."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    inputs = problem.inputs.clone().requires_grad_()
    loss = F.cross_entropy(model(inputs), problem.labels)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        (grad,) = torch.autograd.grad(scaled_loss, inputs)
    grad = grad / (scaled_loss / loss)
    assert grad.isfinite().all()
    assert all(param.grad is None for param in model.parameters())
    optimizer.step()


def test_inference(problem):
    expected = problem.model().eval()(problem.inputs)
    model, optimizers = amp.initialize(problem.model().eval(), [], opt_level="O3", verbosity=0)
    assert optimizers == []
    with torch.no_grad():
        torch.testing.assert_close(model(problem.inputs), expected, rtol=0.01, atol=0.01)


def test_signature_is_that_of_apex():
    parameters = inspect.signature(amp.initialize).parameters
    assert list(parameters)[:14] == [
        "models",
        "optimizers",
        "enabled",
        "opt_level",
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
        "cast_model_outputs",
        "num_losses",
        "verbosity",
        "min_loss_scale",
        "max_loss_scale",
    ]
    assert parameters["max_loss_scale"].default == 2.0**24
    assert parameters["verbosity"].default == 1
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in list(parameters.values())[14:])
    names = list(inspect.signature(amp.scale_loss).parameters)
    assert names == ["loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check"]


def test_model_wrapped_after_initialize(problem):
    """DataParallel on the CPU runs the module itself; DistributedDataParallel is run over one process."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    wrapped = nn.DataParallel(model)
    losses = []
    for step in range(20):
        loss = problem.loss(wrapped, step)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert wrapped.state_dict()["module.0.weight"].dtype == torch.float32


@contextlib.contextmanager
def process_group(path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_distributed_data_parallel(problem, level, tmp_path):
    def run(wrap):
        model = problem.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        wrapped = wrap(model)
        for step in range(6):
            with amp.scale_loss(problem.loss(wrapped, step), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    alone = run(lambda model: model)
    with process_group(tmp_path):
        wrapped = run(nn.parallel.DistributedDataParallel)
    assert all(torch.equal(alone[name], wrapped[name]) for name in alone)
