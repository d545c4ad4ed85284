"""LossScaleCollapse: when it is raised, what it knows, and what goes on after it."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

from amplab import amp
from amplab.amp.apex.loss_scaling import SKIPS_BEFORE_COLLAPSE

INF, NAN = float("inf"), float("nan")


def prepared(**options):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O1", verbosity=0, **options)
    return session, model, optimizer


def backward(session, model, optimizer, *, loss_factor=1.0, grad_factor=1.0, **options):
    """One backward: ``loss_factor`` spoils the loss itself, ``grad_factor`` the gradients alone."""
    optimizer.zero_grad()
    with session.scale_loss(model.weight.sum() * loss_factor, optimizer, **options) as scaled_loss:
        (scaled_loss * grad_factor).backward()
    optimizer.step()


def skips_until_collapse(run, limit=200):
    for count in range(1, limit):
        try:
            run()
        except amp.LossScaleCollapse as collapse:
            return count, collapse
    return None


def test_a_loss_that_is_nan_collapses_after_twenty_skips():
    run = prepared()
    count, collapse = skips_until_collapse(lambda: backward(*run, loss_factor=NAN))
    assert count == collapse.skips == SKIPS_BEFORE_COLLAPSE == 20
    assert not collapse.loss_was_finite
    assert collapse.record == amp.ScaleRecord(0, 2.0**-3, 2.0**-4, True, True, "weight")
    for said in (
        "Loss scaler 0",
        "20 steps",
        "loss is not finite",
        "gradient of weight",
        "0.0625",
        'on_collapse="warn"',
    ):
        assert said in str(collapse)


@pytest.mark.parametrize(("init_scale", "first_hopeless"), [(1.0, 1), (2.0**16, 17)])
def test_gradients_that_overflow_at_scale_1_collapse(init_scale, first_hopeless):
    """From 2^16 sixteen skips bring the scale to 1: those may have been the scale's fault, the twenty after are not."""
    run = prepared(dynamic_init_scale=init_scale)
    count, collapse = skips_until_collapse(lambda: backward(*run, grad_factor=INF))
    assert count == first_hopeless + 19
    assert collapse.loss_was_finite
    assert "gradients are not finite at a loss scale of " in str(collapse)


def test_a_scale_that_a_floor_keeps_above_1_does_not_collapse():
    run = prepared(min_loss_scale=4.0)
    assert skips_until_collapse(lambda: backward(*run, grad_factor=INF)) is None
    assert run[0].loss_scale() == 4.0


@pytest.mark.parametrize("between", [{}, {"grad_factor": INF}])
def test_the_count_starts_anew_after_a_clean_step_or_an_ordinary_overflow(between):
    run = prepared(min_loss_scale=4.0)
    for _ in range(3):
        for _ in range(19):
            backward(*run, loss_factor=INF)
        backward(*run, **between)
    assert run[0].loss_scale() == 4.0


def test_loss_ids_count_for_themselves():
    run = prepared(num_losses=2)
    for _ in range(19):
        backward(*run, loss_factor=NAN, loss_id=0)
        backward(*run, loss_factor=NAN, loss_id=1)
    with pytest.raises(amp.LossScaleCollapse, match=r"^Loss scaler 1 has skipped 20 steps"):
        backward(*run, loss_factor=NAN, loss_id=1)


def test_a_static_scale_never_collapses():
    run = prepared(loss_scale=128.0)
    assert skips_until_collapse(lambda: backward(*run, loss_factor=NAN), limit=25) is None


def test_everything_is_in_order_after_the_exception():
    session, model, optimizer = run = prepared()
    weights = copy.deepcopy(model.state_dict())
    skips_until_collapse(lambda: backward(*run, loss_factor=NAN))
    optimizer.step()  # the one that the exception kept from running: skipped too
    assert not session.last_step(optimizer).stepped
    assert all(map(torch.equal, weights.values(), model.state_dict().values()))
    backward(*run)
    assert session.last_step(optimizer).stepped
    count, _ = skips_until_collapse(lambda: backward(*run, loss_factor=NAN))
    assert count == 20


def test_a_warning_instead_once_until_a_clean_step():
    run = prepared(on_collapse="warn")
    for _ in range(2):
        for skip in range(1, 41):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                backward(*run, loss_factor=NAN)
            assert len(caught) == (skip == 20)
        backward(*run)
    assert run[0].loss_scale() == 2.0**16 * 2.0**-80


def test_the_warning_points_at_the_users_line():
    run = prepared(on_collapse="warn")
    for _ in range(19):
        backward(*run, loss_factor=NAN)
    with pytest.warns(UserWarning, match=r"^Loss scaler 0 has skipped 20") as caught:
        backward(*run, loss_factor=NAN)
    assert caught[0].filename == __file__


def test_it_pickles():
    run = prepared()
    _, collapse = skips_until_collapse(lambda: backward(*run, loss_factor=NAN))
    again = pickle.loads(pickle.dumps(collapse))
    assert (str(again), again.record, again.skips) == (str(collapse), collapse.record, 20)


def test_the_scale_stays_above_zero_where_apex_divides_by_it():
    """apex: 1091 overflows bring it to exactly 0.0, and the next unscale raises ZeroDivisionError."""
    session, model, optimizer = prepared(on_collapse="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1200):
            with session.scale_loss(model.weight.sum(), optimizer):
                model.weight.grad = torch.full((1, 1), INF)
            optimizer.step()
    assert session.loss_scale() == torch.finfo(torch.float32).tiny
    backward(session, model, optimizer)
    assert model.weight.grad.item() == 1.0


@pytest.mark.parametrize("word", ["ignore", None, True])
def test_other_words_are_refused(word):
    with pytest.raises(ValueError, match=rf'^on_collapse={re.escape(repr(word))}: expected "raise"'):
        prepared(on_collapse=word)
