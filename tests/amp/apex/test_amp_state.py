"""``amp._amp_state``, its scalers and handle, and ``amp.init``, in the lines of scripts that use them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp
from amplab.amp import _amp_state


@pytest.fixture
def run(problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)


def test_hasattr_tells_whether_amp_is_initialized(problem):
    assert not hasattr(_amp_state, "loss_scalers")
    assert not hasattr(_amp_state, "opt_properties")
    amp.initialize(problem.model(), enabled=False)
    assert not hasattr(_amp_state, "loss_scalers")
    assert not _amp_state.opt_properties.enabled
    amp.initialize(problem.model(), opt_level="O2", verbosity=0)
    assert hasattr(_amp_state, "loss_scalers")
    assert amp._amp_state.opt_properties.master_weights is True
    assert (_amp_state.opt_properties.opt_level, _amp_state.verbosity) == ("O2", 0)


def test_the_state_is_found_where_scripts_look_for_it():
    assert amp.frontend._amp_state is amp._amp_state is _amp_state
    assert amp.frontend.initialize is amp.initialize


def test_the_scale_is_read_and_set(problem, run):
    model, optimizer = run
    scaler = amp._amp_state.loss_scalers[1]
    assert (scaler.loss_scale(), scaler._loss_scale, scaler._unskipped, scaler.dynamic) == (2.0**16, 2.0**16, 0, True)
    amp._amp_state.loss_scalers[1]._loss_scale = 2**20
    with amp.scale_loss(problem.loss(model, 0), optimizer, loss_id=1) as scaled_loss:
        assert scaled_loss.item() > 2**18
        (scaled_loss * 0).backward()
    assert (amp.loss_scale(0), amp.loss_scale(1), scaler._unskipped) == (2.0**16, 2.0**20, 1)
    scaler._unskipped = 1999
    with amp.scale_loss(problem.loss(model, 0), optimizer, loss_id=1) as scaled_loss:
        (scaled_loss * 0).backward()
    assert amp.loss_scale(1) == 2.0**21
    assert amp._amp_state.loss_scalers[1] is scaler


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), "x", True])
def test_a_scale_that_cannot_be_is_refused(run, scale):
    with pytest.raises(ValueError, match=r"^_loss_scale=.*: expected "):
        amp._amp_state.loss_scalers[0]._loss_scale = scale
    assert amp.loss_scale() == 2.0**16


def test_scripts_that_check_the_overflow_themselves(problem, run):
    """As BERT with ``--allreduce_post_accumulation``: delay_overflow_check, an own buffer, update_scale."""
    model, optimizer = run
    scaler = amp._amp_state.loss_scalers[0]
    skipped = []
    for factor in (1.0, float("inf"), 1.0):
        with amp.scale_loss(problem.loss(model, 0), optimizer, delay_overflow_check=True) as scaled_loss:
            (scaled_loss * factor).backward()
        overflow = any(not p.grad.isfinite().all() for p in amp.master_params(optimizer))
        scaler._overflow_buf = torch.tensor([int(overflow)], dtype=torch.int32)
        skipped.append(scaler.update_scale())
        if skipped[-1]:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
            optimizer.zero_grad()
        else:
            optimizer.step()
            assert amp.last_step(optimizer).stepped
        for param in model.parameters():
            param.grad = None
    assert skipped == [False, True, False]
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**15, 1)


def test_the_verdict_left_waiting_is_part_of_update_scale(problem, run):
    model, optimizer = run
    with amp.scale_loss(problem.loss(model, 0), optimizer, delay_overflow_check=True) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    assert amp._amp_state.loss_scalers[0].update_scale()
    assert not amp._amp_state.loss_scalers[0].update_scale()


def test_the_handle_says_whether_this_thread_casts(problem):
    handle = amp._amp_state.handle
    assert not handle.is_active()
    amp.initialize(problem.model(), opt_level="O2", verbosity=0)
    assert not handle.is_active()
    amp.initialize(problem.model(), opt_level="O1", verbosity=0)
    assert handle.is_active()
    with handle._disable_casts():
        assert not handle.is_active()
    handle._clear_cache()
    handle._deactivate()
    assert not handle.is_active()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_init_allows_the_refused_loss(problem):
    half = torch.full((2,), 0.5).half()
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(half, half).dtype == torch.float32
    amp.initialize(problem.model(), opt_level="O1", verbosity=0)
    assert F.binary_cross_entropy(half, half).dtype == torch.float32


REFUSALS = [
    (lambda: amp._amp_state.loss_scalers, AttributeError, "loss_scalers: nothing is initialized, or with enabled"),
    (lambda: amp._amp_state.nothing, AttributeError, "amp._amp_state.nothing does not exist"),
    (lambda: setattr(amp._amp_state, "opt_level", "O2"), AttributeError, "amp._amp_state.opt_level = 'O2': "),
    (lambda: setattr(amp._amp_state, "verbosity", 0), AttributeError, "Pass the option to amp.initialize"),
    (lambda: amp._amp_state.handle._save_func, AttributeError, "amp._amp_state.handle._save_func does not exist"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=[each[2][:40] for each in REFUSALS])
def test_refusals(call, error, message):
    with pytest.raises(error) as refusal:
        call()
    assert message in str(refusal.value)


def test_unknown_names_of_a_scaler_say_what_there_is(run):
    with pytest.raises(AttributeError, match=r"^amp._amp_state.loss_scalers\[…\].unscale does not exist"):
        amp._amp_state.loss_scalers[0].unscale  # noqa: B018


def test_another_initialize_has_other_scalers(problem, run):
    before = amp._amp_state.loss_scalers
    amp.initialize(nn.Linear(1, 1), opt_level="O1", loss_scale=8.0, verbosity=0)
    (after,) = amp._amp_state.loss_scalers
    assert len(before) == 2
    assert (after.loss_scale(), after.dynamic) == (8.0, False)


def test_the_module_of_the_name_is_the_state(problem, capsys):
    from amplab.amp._amp_state import AmpState, master_params, maybe_print, warn_or_err
    from amplab.amp._amp_state import _amp_state as state_of_module

    assert state_of_module is amp._amp_state
    assert isinstance(state_of_module, AmpState)
    assert amp._amp_state is _amp_state
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert [*map(id, master_params(optimizer))] == [*map(id, amp.master_params(optimizer))]
    maybe_print("quiet", rank0=True)
    amp.initialize(model, optimizer, opt_level="O2")
    capsys.readouterr()
    maybe_print("said", rank0=True)
    assert capsys.readouterr().out == "said\n"
    with pytest.raises(RuntimeError, match=r"^wrong$"):
        warn_or_err("wrong")
