"""The session behind the module functions, seen from several threads."""

import concurrent.futures
import threading

import pytest
import torch
from torch import nn

from amplab import amp


def in_a_thread(work):
    """Run ``work`` in a thread of its own; its result, or its exception."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def train(problem, model, level, steps=range(8), meet=lambda: None, **options):
    """As an old script does, with the module functions; the losses and the last scale."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    losses = []
    for step in steps:
        meet()
        loss = problem.loss(model, step)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            (scaled_loss * (float("inf") if level == "O1" and step == 3 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    scale = amp.loss_scale()
    amp.reset()
    return losses, scale


def test_threads_that_each_initialize_and_train_do_not_meet(problem):
    """Bit for bit the runs that they are alone, one of them with an overflow."""
    levels = ("O0", "O1", "O2", "O3")
    scales = {"O0": 1.0, "O1": 2.0**15, "O2": 2.0**16, "O3": 1.0}
    alone = {level: train(problem, problem.model(), level) for level in levels}
    models = [problem.model() for _ in levels]  # here: threads share the generator that seeds them
    barrier = threading.Barrier(len(levels))
    with concurrent.futures.ThreadPoolExecutor(len(levels)) as pool:
        runs = [
            pool.submit(train, problem, model, level, meet=barrier.wait)
            for level, model in zip(levels, models, strict=True)
        ]
        together = {level: run.result() for level, run in zip(levels, runs, strict=True)}
    assert together == alone
    assert {level: scale for level, (_, scale) in alone.items()} == scales


def test_a_thread_that_does_not_initialize_uses_the_programs_session(problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

    def work():
        with amp.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return amp.default_session()

    assert in_a_thread(work) is amp.default_session()
    assert amp.last_step(optimizer).stepped


def test_another_threads_reset_leaves_this_ones_session_alone(problem):
    model = amp.initialize(problem.model(), opt_level="O2", verbosity=0)
    in_a_thread(lambda: train(problem, problem.model(), "O1"))
    assert amp.default_session().opt_level == "O2"
    assert model[0].weight.dtype == torch.float16


def test_what_a_thread_that_is_gone_has_initialized_can_be_used_and_replaced(problem):
    model = problem.model()
    in_a_thread(lambda: amp.initialize(model, opt_level="O2", verbosity=0))
    assert amp.default_session().opt_level == "O2"
    amp.initialize(model, opt_level="O0", verbosity=0)
    assert model[0].weight.dtype == torch.float32


def test_a_failed_initialize_leaves_a_thread_with_the_programs_session():
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)

    def work():
        with pytest.raises(RuntimeError):
            amp.initialize(nn.Linear(1, 1), opt_level="O7", verbosity=0)
        return amp.default_session().opt_level

    assert in_a_thread(work) == "O2"


def test_threads_share_the_registered_functions():
    amp.register_float_function(torch, "sigmoid")

    def work():
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        return torch.sigmoid(torch.ones(1).half()).dtype

    assert in_a_thread(work) == torch.float32
