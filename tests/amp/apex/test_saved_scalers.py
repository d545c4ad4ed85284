"""Loss scalers in apex's file format."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def prepared(session):
    def prepare(**options):
        model = nn.Linear(1, 1)
        session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0, **options)
        return session

    return prepare


def entry(scale, unskipped=0):
    return {"loss_scale": scale, "unskipped": unskipped}


def test_format(prepared):
    saved = prepared(num_losses=2).state_dict()
    assert type(saved) is OrderedDict
    assert saved == {"loss_scaler0": entry(65536.0), "loss_scaler1": entry(65536.0)}
    destination = {"epoch": 3}
    assert prepared().state_dict(destination) is destination
    assert destination == {"epoch": 3, "loss_scaler0": entry(65536.0)}


def test_round_trip_by_number(prepared, capsys):
    session = prepared(num_losses=2)
    session.load_state_dict({"loss_scaler1": entry(8.0, 3), "loss_scaler0": entry(4.0, 1)})
    assert session.state_dict() == {"loss_scaler0": entry(4.0, 1), "loss_scaler1": entry(8.0, 3)}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("settings", [{}, {"combine_grad": True}], ids=str)
@pytest.mark.parametrize("is_observed", [False, True])
@pytest.mark.parametrize("trained", [slice(None), slice(1, None)], ids=["all", "float32 at O2"])
@pytest.mark.parametrize(
    ("level", "scale", "counted"), [("O0", 1.0, 0), ("O1", 1.0, 0), ("O3", 1.0, 0), ("O2", 1.0, 3), ("O1", 2.0, 3)]
)
def test_static_scale_of_one_is_counted_with_masters_only(
    session, settings, is_observed, trained, level, scale, counted
):
    """As in apex, where `scale_loss` then leaves the gradients as they are."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model[trained].parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0, **settings)
    if is_observed:
        session.subscribe(lambda _record: None)
    for _ in range(3):
        with session.casting(), session.scale_loss(model(torch.rand(4, 2)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert session.state_dict() == {"loss_scaler0": entry(scale, counted)}


def test_other_counts_are_told(prepared, capsys):
    session = prepared()
    session.load_state_dict({"loss_scaler5": entry(4.0), "loss_scaler0": entry(2.0)})
    assert session.loss_scale() == 2.0
    assert capsys.readouterr().out == (
        "Warning: state_dict contains 2 entries, while 1 loss_scalers are used\n"
        "Skipping loss_scaler[5], since num_losses was set to 1\n"
    )


def test_unknown_keys_are_refused_after_the_rest_is_loaded(prepared):
    session = prepared(num_losses=2)
    with pytest.raises(RuntimeError) as refusal:
        session.load_state_dict({"foo": 1, "loss_scaler0": entry(2.0)})
    assert str(refusal.value) == 'Error(s) in loading state_dict. Unexpected key(s) in state_dict: "foo". '
    assert session.loss_scale() == 2.0


@pytest.mark.parametrize("bad", [3, {}, {"loss_scale": "x", "unskipped": 0}, {"loss_scale": 1.0}])
def test_other_entries_are_refused(prepared, bad):
    with pytest.raises(ValueError, match=r"expected \{'loss_scale': float, 'unskipped': int\}, as amp.state_dict\(\)"):
        prepared().load_state_dict({"loss_scaler0": bad})


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -5.0])
def test_scales_that_cannot_be_are_refused(prepared, scale):
    with pytest.raises(ValueError, match=r"^loss_scale=(nan|inf|-5.0): expected a finite number > 0"):
        prepared().load_state_dict({"loss_scaler0": entry(scale)})


def test_a_collapsed_scale_is_lifted_to_the_floor(prepared, capsys):
    session = prepared(min_loss_scale=4.0)
    session.load_state_dict({"loss_scaler0": entry(0.0)})
    assert session.loss_scale() == 4.0
    assert capsys.readouterr().out == ("Warning: loss_scaler0 was saved at 0.0; its loss scale stays 4.0 (its floor)\n")


def test_a_static_scale_stays_what_it_was_set_to(prepared, capsys):
    session = prepared(loss_scale=128.0)
    session.load_state_dict({"loss_scaler0": entry(65536.0)})
    assert session.loss_scale() == 128.0
    assert "stays 128.0 (static)" in capsys.readouterr().out


def test_a_static_scale_takes_the_count(prepared):
    session = prepared(loss_scale=128.0)
    session.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 16}})
    assert session.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 16}}


def test_nothing_to_load_when_disabled(session):
    session.initialize(nn.Linear(1, 1), enabled=False)
    assert session.state_dict() == {}
    session.load_state_dict({})


@pytest.mark.parametrize("given", [None, 3, [], "checkpoint.pt"])
def test_other_things_are_refused(prepared, given):
    with pytest.raises(TypeError, match=rf"^amp.load_state_dict got an object of type {type(given).__name__}:"):
        prepared().load_state_dict(given)


def test_strict_is_not_an_argument(prepared):
    """Scripts try it first, and rely on the TypeError."""
    with pytest.raises(TypeError, match="strict"):
        prepared().load_state_dict({}, strict=False)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (entry(2.0, -3), "unskipped=-3: expected a whole number >= 0"),
        (entry(2.0, 1.5), "unskipped=1.5: expected a whole number >= 0"),
        (entry(2.0, NAN), "expected {'loss_scale': float, 'unskipped': int}"),
        (entry(2.0, INF), "expected {'loss_scale': float, 'unskipped': int}"),
        (entry(NAN), "loss_scale=nan: expected a finite number > 0"),
        (entry(INF), "loss_scale=inf: expected a finite number > 0"),
        (entry(1e39), "loss_scale=1e+39: expected a number in the range of float32"),
    ],
)
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_numbers_that_no_scaler_can_have_are_refused(prepared, saved, said, loss_scale):
    session = prepared(opt_level="O2", loss_scale=loss_scale)
    before = session.state_dict()
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  the message is looked at below
        session.load_state_dict({"loss_scaler0": saved})
    assert said in str(refusal.value)
    assert session.state_dict() == before


def test_a_count_of_a_longer_window_still_lets_the_scale_grow(prepared):
    """The count is compared for equality, here as in apex: beyond the window the scale would never grow again."""
    session = prepared(opt_level="O2", scale_window=5)
    session.load_state_dict({"loss_scaler0": entry(8.0, 1500)})
    session.scalers[0].update(False)
    assert session.state_dict()["loss_scaler0"] == entry(16.0, 0)
