"""What initialize refuses, and what it warns of."""

import re

import pytest
import torch
from torch import nn

from amplab import amp
from amplab.amp import Session

REFUSALS = [
    (lambda s: s.initialize(nn.Linear(1, 1), num_losses=0), ValueError, "num_losses=0: expected a whole number >= 1"),
    (lambda s: s.initialize(nn.Linear(1, 1), num_losses=1.5), ValueError, "num_losses=1.5: expected a whole number"),
    (lambda s: s.initialize(nn.Linear(1, 1), min_loss_scale=-1), ValueError, "min_loss_scale=-1: expected a finite"),
    (lambda s: s.initialize(nn.Linear(1, 1), min_loss_scale=8, max_loss_scale=4), ValueError, "min_loss_scale=8 is"),
    (lambda s: s.initialize(nn.Linear(1, 1), scale_growth_factor=0.5), ValueError, "scale_growth_factor=0.5: expected"),
    (lambda s: s.initialize(nn.Linear(1, 1), scale_backoff_factor=2), ValueError, "scale_backoff_factor=2: expected"),
    (lambda s: s.initialize(nn.Linear(1, 1), scale_window=0), ValueError, "scale_window=0: expected a whole number"),
    (lambda s: s.initialize(nn.Linear(1, 1), dynamic_init_scale=0), ValueError, "dynamic_init_scale=0: expected"),
    *(
        (lambda s, name=name: s.initialize(nn.Linear(1, 1), **{name: 8}), TypeError, f"{name}=8: expected True or Fal")
        for name in ("combine_grad", "check_combined_tensors", "combine_ddp")
    ),
    (lambda s: s.initialize(nn.Linear(1, 1), ddp_replica_count=0), ValueError, "ddp_replica_count=0: expected at"),
    (lambda s: s.initialize(nn.Linear(1, 1), ddp_replica_count=0.5), TypeError, "ddp_replica_count=0.5: expected a"),
    (lambda s: s.initialize(nn.Linear(1, 1), combine_ddp=True), RuntimeError, "Combine_grad should be True"),
    (
        lambda s: s.initialize(nn.Linear(1, 1), combine_ddp=True, combine_grad=True),
        ValueError,
        "combine_ddp=True without an optimizer",
    ),
    (lambda s: s.initialize(nn.Linear(1, 1), min_loss_scale="x"), TypeError, "min_loss_scale='x': expected a number"),
    (lambda s: s.initialize(nn.Linear(1, 1), max_loss_scale=True), TypeError, "max_loss_scale=True: expected a number"),
    (lambda s: s.initialize(nn.Linear(1, 1), scale_window="x"), TypeError, "scale_window='x': expected a number"),
    (
        lambda s: s.initialize(nn.Linear(1, 1), scale_growth_factor=None),
        TypeError,
        "scale_growth_factor=None: expected",
    ),
    (
        lambda s: s.initialize(nn.Linear(1, 1), scale_backoff_factor="x"),
        TypeError,
        "scale_backoff_factor='x': expected",
    ),
    (lambda s: s.initialize(nn.Linear(1, 1), dynamic_init_scale="dynamic"), TypeError, "dynamic_init_scale='dynamic'"),
    (
        lambda s: s.initialize(nn.Linear(1, 1), loss_scale=1e39),
        ValueError,
        "loss_scale=1e+39: expected a number in the",
    ),
    (
        lambda s: s.initialize(nn.Linear(1, 1), loss_scale="1e-46"),
        ValueError,
        "loss_scale=1e-46: expected a number in the",
    ),
    (lambda s: s.initialize(nn.Linear(1, 1), verbosity="loud"), TypeError, "verbosity='loud': expected 0 ("),
    (lambda s: s.initialize(nn.Linear(1, 1), cast_model_outputs="half"), TypeError, "cast_model_outputs='half': exp"),
    (lambda s: s.initialize(nn.Linear(1, 1), cast_model_outputs=torch.int8), TypeError, "expected a floating"),
    (lambda s: s.initialize(nn.Linear(1, 1), loss_scale=True), ValueError, 'loss_scale=True: expected "dynamic" or a'),
    (lambda s: s.initialize(nn.Linear(1, 1), opt_level="O9"), RuntimeError, "Unexpected optimization level O9."),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=[message[:40] for _, _, message in REFUSALS])
def test_refusals_of_initialize(session, call, error, message):
    with pytest.raises(error) as refusal:
        call(session)
    assert message in str(refusal.value)
    assert len(refusal.value.args) == 1
    assert not re.search("DynamicScale|StaticScale|floor|ceiling|growth_interval", str(refusal.value))


def test_cudnn_switched_off_is_refused(session):
    with (
        torch.backends.cudnn.flags(enabled=False),
        pytest.raises(RuntimeError, match=r"^Amp requires torch.backends.cudnn.enabled = True$"),
    ):
        session.initialize(nn.Linear(1, 1))


def test_adam_on_half_parameters_is_warned_of(session):
    model = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match=r"^Adam .*eps=1e-08 is 0 in torch.float16"):
        session.initialize(model, torch.optim.Adam(model.parameters()), opt_level="O3", verbosity=0)
    session.reset()
    session.initialize(model, torch.optim.Adam(model.parameters(), eps=1e-4), opt_level="O3", verbosity=0)


def test_what_asks_for_nothing_of_ascend_is_taken(session):
    options = {"combine_grad": None, "combine_ddp": False, "ddp_replica_count": 4, "check_combined_tensors": None}
    session.initialize(nn.Linear(1, 1), verbosity=0, user_cast_preferred=True, **options)


def test_a_check_of_buffers_that_are_not_there_is_warned_of(session):
    with pytest.warns(UserWarning, match=r"^check_combined_tensors=True .* combine_grad"):
        session.initialize(nn.Linear(1, 1), verbosity=0, check_combined_tensors=True)


def test_a_number_of_buckets_that_is_not_used_is_warned_of(session):
    with pytest.warns(UserWarning, match=r"^ddp_replica_count=8 has no effect.* combine_ddp is None"):
        session.initialize(nn.Linear(1, 1), verbosity=0, ddp_replica_count=8)


@pytest.mark.parametrize("name", ["enabled", "master_weights", "allow_banned"])
def test_a_flag_is_a_boolean_or_its_word(name):
    model = torch.nn.Linear(2, 2)
    for wrong in ("no", 3, "false"):
        with pytest.raises(TypeError, match=f"{name}={wrong!r}: expected True or False"):
            Session().initialize(model, opt_level="O3", verbosity=0, **{name: wrong})
    assert model.weight.dtype is torch.float32
    session = Session()
    session.initialize(model, opt_level="O3", verbosity=0, enabled="False", master_weights="False")
    assert model.weight.dtype is torch.float32


def test_scale_loss_wants_an_optimizer():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session()
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for nothing in (None, [], ()):
        refused = pytest.raises(TypeError, match="scale_loss got optimizers=")
        with refused, session.scale_loss(model(torch.ones(1, 2)).sum(), nothing):
            pass


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda m: amp.initialize(m, bogus=1),
            "amp.initialize: got an unexpected keyword argument 'bogus'; see help(amp.",
        ),
        (lambda m: amp.initialize(m, optlevel="O2"), "argument 'optlevel'; did you mean opt_level?"),
        (lambda m: amp.initialize(m, *[None] * 20), "amp.initialize: too many positional arguments; see help(amp.init"),
        (
            lambda m: amp.scale_loss(m.weight.sum(), m, lossid=1),
            "amp.scale_loss: got an unexpected keyword argument 'los",
        ),
        (
            lambda m: amp.master_params(),
            "amp.master_params: missing a required argument: 'optimizer'; see help(amp.mas",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_under_the_name_that_was_called(call, said):
    with pytest.raises(TypeError) as refusal:
        call(nn.Linear(1, 1))
    assert said in str(refusal.value)
    assert "Session" not in str(refusal.value)


DYNAMIC = {"dynamic_init_scale": 8.0, "scale_growth_factor": 4.0, "scale_backoff_factor": 0.25, "scale_window": 5}


@pytest.mark.parametrize(("name", "value"), DYNAMIC.items())
def test_arguments_of_a_dynamic_scale_beside_a_static_one_are_warned_of(session, name, value):
    with pytest.warns(UserWarning, match=rf"^{name}={value}: not used.*loss_scale=128.0"):
        session.initialize(nn.Linear(1, 1), opt_level="O2", loss_scale="128.0", verbosity=0, **{name: value})


def test_one_call_with_arguments_of_a_dynamic_scale_works_at_every_level(session, recwarn):
    for level in ("O0", "O1", "O2", "O3"):
        session.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0, **DYNAMIC)
    session.initialize(nn.Linear(1, 1), loss_scale="dynamic", verbosity=0, **DYNAMIC)
    assert not recwarn.list


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_torchscript_is_refused_where_hooks_would_hang_on_it(session, level):
    scripted = torch.jit.script(nn.Linear(2, 2))
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    for model in (scripted, traced):
        with pytest.raises(
            RuntimeError, match=r"^The incoming model is a \w+: expected Python modules, .* compiled from"
        ):
            session.initialize([nn.Linear(1, 1), model], opt_level=level, verbosity=0)
    holder = nn.Sequential(scripted)
    if level in ("O0", "O1"):
        session.initialize(holder, opt_level=level, verbosity=0)
        with session.casting():
            assert holder(torch.ones(1, 2)).dtype is torch.float32
    else:
        with pytest.raises(RuntimeError, match=r"^Module 0 of the incoming model is a RecursiveScriptModule: expected"):
            session.initialize(holder, opt_level=level, verbosity=0)
        assert holder[0].weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_what_is_named_twice_is_prepared_once(session, level, problem):
    """As a list of shared encoders is: the lists come back as they are, and training is that of one."""

    def train(models, optimizers, model, optimizer):
        own = Session()
        arrived = own.initialize(models, optimizers, opt_level=level, verbosity=0)
        assert arrived == (models, optimizers)
        for step in range(4):
            with own.casting(), own.scale_loss(problem.loss(model, step), optimizers) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        return model.state_dict()

    once, twice = problem.model(), problem.model()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (once, twice))
    expected = train(once, first, once, first)
    got = train([twice, twice], [second, second], twice, second)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_empty_lists_are_mirrored(session, level):
    """No model: parameters of the optimizer stay as they are, and are trained under the scale."""
    assert session.initialize([], opt_level=level, verbosity=0) == []
    assert session.initialize([], [], opt_level=level, verbosity=0) == ([], [])
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    assert session.initialize([], optimizer, opt_level=level, verbosity=0) == ([], optimizer)
    with session.scale_loss(weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert weight.item() == 0.5


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda right: [[right]], "a list of 1 inside the list"),
        (lambda right: [right, {"it": right}], "an object of type dict inside the list"),
        (lambda right: {"it": right}, "an object of type dict;"),
        (lambda right: [(right,)], "a tuple of 1 inside the list"),
    ],
)
def test_nested_lists_and_dicts_are_refused_by_a_sentence(session, wrong, found, level):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=f"^models must be either .* Found {found}"):
        session.initialize(wrong(model), optimizer, opt_level=level)
    with pytest.raises(TypeError, match=f"^optimizers must be either .* Found {found}"):
        session.initialize(model, wrong(optimizer), opt_level=level)
