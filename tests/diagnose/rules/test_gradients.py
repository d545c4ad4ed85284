"""A loop that treats its gradients wrongly is told so, whichever functions it uses; and is left as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.amp import Session
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.gradients import gradient_findings
from amplab.diagnose.rules.raised import finding_of_error
from amplab.diagnose.train_step.rehearse_loop import rehearse, rehearse_loop

SCALERS = [torch.amp.GradScaler, amplab.GradScaler]


def network(kind=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, kind(model.parameters(), lr=0.01), torch.randn(32, 8)


def loss_of(model, x):
    return F.mse_loss(model(x), torch.full((len(x), 1), 5.0))


def names(model, step, optimizer, amp):
    return [each.name for each in gradient_findings(rehearse_loop(model, step, [optimizer], scaler=amp))]


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_loop_of_the_documentation_has_nothing(scaler_type, max_norm, kind):
    model, optimizer, x = network(kind)
    scaler = scaler_type("cpu")

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    assert names(model, step, optimizer, scaler) == []


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_before_unscaling(scaler_type, clip, foreach):
    model, optimizer, x = network()
    scaler = scaler_type("cpu")

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        clip(model.parameters(), 0.1, foreach=foreach)
        scaler.step(optimizer)
        scaler.update()

    assert names(model, step, optimizer, scaler) == ["clips-scaled-gradients"]


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_unscaling_by_hand_as_well(scaler_type):
    model, optimizer, x = network()
    scaler = scaler_type("cpu")

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        for parameter in model.parameters():
            parameter.grad /= scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()

    assert names(model, step, optimizer, scaler) == ["unscaled-twice"]


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_the_optimizers_own_step(scaler_type):
    model, optimizer, x = network()
    scaler = scaler_type("cpu")

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        optimizer.step()

    assert names(model, step, optimizer, scaler) == ["stepped-with-scaled-gradients"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_a_scaler_that_no_loss_goes_through(scaler_type, clips, dtype):
    """Healthy without half, where a scale holds nothing; its gradients are what they should be in any case."""
    model, optimizer, x = network()
    scaler = scaler_type("cpu")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, x).float()
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    (found,) = gradient_findings(rehearse_loop(model, step, [optimizer], scaler=scaler), Api(ApiStyle.TORCH))
    assert (found.name, found.severity) == ("loss-not-scaled", "warning" if dtype == torch.float16 else "note")
    loss, names = loss_of(model, x), {"scaler": scaler, "optimizer": optimizer}
    exec(found.remedy, names | {"loss": loss})
    assert scaler.state_dict()["_growth_tracker"] == 1


@pytest.mark.parametrize("half_scaled", [False, True])
def test_of_two_optimizers_one_has_a_loss_that_nothing_scales(half_scaled):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model.values()]
    scaler, x = torch.amp.GradScaler("cpu"), torch.randn(16, 8)

    def step():
        for optimizer in optimizers:
            optimizer.zero_grad()
        model["a"](x).square().mean().backward()
        optimizers[0].step()
        scaler.scale(model["b"](x).square().mean()).backward()
        optimizers[1].step() if half_scaled else (scaler.step(optimizers[1]), scaler.update())

    found = [
        (each.name, each.module) for each in gradient_findings(rehearse_loop(model, step, optimizers, scaler=scaler))
    ]
    expected = [("stepped-with-scaled-gradients", "b")] if half_scaled else []
    assert found == [*expected, ("loss-not-scaled", "a")]


def test_a_fused_optimizer_unscales_by_itself():
    model, _, x = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()

    assert names(model, step, optimizer, scaler) == []


def under_session(level, step_of, model=None, **options):
    made, optimizer, x = network()
    model = made if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session()
    session.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    try:
        return names(model, step_of(session, model, optimizer, x), optimizer, session)
    finally:
        session.reset()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("clips", [False, True])
def test_the_loop_of_apex_has_nothing(level, clips):
    def step_of(session, model, optimizer, x):
        def step():
            optimizer.zero_grad()
            with session.casting(), session.scale_loss(loss_of(model, x), optimizer) as scaled:
                scaled.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(session.master_params(optimizer), 0.1)
            optimizer.step()

        return step

    assert under_session(level, step_of) == []


@pytest.mark.parametrize("clips", [False, True])
def test_a_plain_backward_under_apex(clips):
    def step_of(session, model, optimizer, x):
        def step():
            optimizer.zero_grad()
            with session.casting():
                loss = loss_of(model, x)
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

        return step

    assert under_session("O1", step_of) == ["loss-not-scaled"]
    assert under_session("O1", step_of, loss_scale=1.0) == []


def test_a_step_inside_the_block():
    def step_of(session, model, optimizer, x):
        def step():
            optimizer.zero_grad()
            with session.casting(), session.scale_loss(loss_of(model, x), optimizer) as scaled:
                scaled.backward()
                optimizer.step()

        return step

    with pytest.raises(RuntimeError) as refused:
        under_session("O1", step_of)
    assert finding_of_error(refused.value).name == "stepped-with-scaled-gradients"


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_clipping_what_the_masters_never_see(masters, foreach):
    """With BatchNorm in float32 some gradients do lie on the model, and those alone are clipped."""

    def step_of(session, model, optimizer, x):
        def step():
            optimizer.zero_grad()
            with session.casting(), session.scale_loss(loss_of(model, x), optimizer) as scaled:
                scaled.backward()
            clipped = session.master_params(optimizer) if masters else model.parameters()
            torch.nn.utils.clip_grad_norm_(clipped, 1e-3, foreach=foreach)
            optimizer.step()

        return step

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    assert under_session("O2", step_of, model) == ([] if masters else ["clips-model-gradients"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_everything_is_put_back(kind):
    model, optimizer, x = network(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = amplab.GradScaler("cpu", growth_interval=1)

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x + torch.randn_like(x))).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    step()
    torch.manual_seed(3)

    def state():
        tensors = [
            *model.parameters(),
            *(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)),
        ]
        rest = scaler.get_scale(), scheduler.state_dict()["last_epoch"], optimizer.param_groups[0]["lr"]
        return [tensor.detach().clone() for tensor in tensors], torch.get_rng_state(), rest

    before, rng, rest = state()
    rehearse(model, step, [optimizer], scaler=scaler, stateful=[scheduler])
    after, rng_after, rest_after = state()
    assert all(map(torch.equal, before, after))
    assert torch.equal(rng, rng_after)
    assert rest == rest_after


def test_masters_are_put_back_too():
    model, optimizer, x = network(torch.optim.Adam)
    session = Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)

    def step():
        optimizer.zero_grad()
        with session.scale_loss(loss_of(model, x), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    try:
        step()
        before = [each.detach().clone() for each in session.master_params(optimizer)]
        rehearse(model, step, [optimizer], scaler=session)
        assert all(map(torch.equal, before, session.master_params(optimizer)))
        assert all(torch.equal(half, master.half()) for half, master in zip(model.parameters(), before, strict=True))
    finally:
        session.reset()


def test_an_optimizer_that_has_not_stepped_has_no_state_afterwards():
    model, optimizer, x = network(torch.optim.Adam)

    def step():
        loss_of(model, x).backward()
        optimizer.step()

    rehearse(model, step, [optimizer])
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delayed", [False, True])
def test_accumulating_and_adding_to_gradients_is_not_reported(level, delayed):
    """Three backwards, a clipping, noise and a decay by hand on what is stepped."""

    def step_of(session, model, optimizer, x):
        def step():
            optimizer.zero_grad()
            for part in range(3):
                delays = delayed and part < 2
                loss = loss_of(model, x) / 3
                with session.casting(), session.scale_loss(loss, optimizer, delay_unscale=delays) as scaled:
                    scaled.backward()
            torch.nn.utils.clip_grad_norm_(session.master_params(optimizer), 0.5)
            for parameter in session.master_params(optimizer):
                parameter.grad.add_(parameter.detach(), alpha=1e-4).add_(torch.randn_like(parameter), alpha=1e-3)
            optimizer.step()

        return step

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    assert under_session(level, step_of, model) == []


@pytest.mark.parametrize("forgotten", [False, True])
def test_two_optimizers_that_take_turns(forgotten):
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(8, 8), "judge": nn.Linear(8, 1)})
    optimizers = of_generator, of_judge = [torch.optim.Adam(part.parameters()) for part in model.values()]
    scaler, x = torch.amp.GradScaler("cpu"), torch.randn(16, 8)

    def step():
        of_judge.zero_grad()
        judged = model["judge"](torch.cat([x, model["generator"](x).detach()]))
        scaler.scale(F.softplus(judged).mean()).backward()
        scaler.step(of_judge)
        of_generator.zero_grad()
        scaler.scale(F.softplus(-model["judge"](model["generator"](x))).mean()).backward()
        of_generator.step() if forgotten else scaler.step(of_generator)
        scaler.update()

    found = gradient_findings(rehearse_loop(model, step, optimizers, scaler=scaler))
    expected = [("stepped-with-scaled-gradients", "generator")] if forgotten else []
    assert [(each.name, each.module) for each in found] == expected


@pytest.mark.parametrize("make", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("moves", [True, False])
def test_a_scale_that_moves_between_backwards_of_one_step(make, keeps, moves):
    """`keeps`: the gradients before the move stay and are added to; without them nothing is mixed."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make("cpu", init_scale=256.0)

    def step():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
        if moves:
            scaler.update(1024.0)
        if not keeps:
            optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update(256.0)

    found = gradient_findings(rehearse_loop(model, step, [optimizer], scaler=scaler), Api(ApiStyle.TORCH))
    mixed, dropped = moves and keeps, not moves and not keeps
    expected = ["accumulation-across-scales"] * mixed + ["zero-grad-in-accumulation"] * dropped
    assert [each.name for each in found] == expected
    if mixed:
        assert (found[0].evidence["smallest_scale"], found[0].evidence["largest_scale"]) == (256.0, 1024.0)


def replaced(change):
    """A loop that changes the gradients between backward and the scaler's step."""
    model, optimizer, x = network()
    scaler = amplab.GradScaler("cpu")

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        change(model)
        scaler.step(optimizer)
        scaler.update()

    return names(model, step, optimizer, scaler)


def masked(model):
    for each in model.parameters():
        each.grad.masked_fill_(~torch.isfinite(each.grad), 0.0)


def copied(model):
    for each in model.parameters():
        each.grad = torch.where(torch.isfinite(each.grad), each.grad, torch.zeros_like(each.grad))


def zeroed(model):
    for each in model.parameters():
        each.grad.nan_to_num_(0.0, 0.0, 0.0)


@pytest.mark.parametrize("change", [zeroed, masked, copied])
def test_gradients_that_the_loop_makes_finite_are_hidden_from_the_scaler(change):
    assert replaced(change) == ["nonfinite-gradients-hidden"]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: next(model.parameters()).grad.zero_(),
        lambda model: next(model.parameters()).grad[0].zero_(),
        lambda model: [each.grad.mul_(each.grad != 0) for each in model.parameters()],
    ],
    ids=["freeze", "freeze a row", "mask"],
)
def test_a_gradient_that_is_set_to_zero_is_no_finding_and_no_error(change):
    assert replaced(change) == []


def test_a_term_added_before_unscaling_is_divided_with_the_gradients():
    def decay(model):
        for each in model.parameters():
            each.grad.add_(each.detach(), alpha=0.1)

    assert replaced(decay) == ["added-to-scaled-gradients"]


def test_a_term_added_after_unscaling_is_right():
    model, optimizer, x = network()
    scaler = torch.amp.GradScaler("cpu")

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(optimizer)
        for each in model.parameters():
            each.grad.add_(each.detach(), alpha=0.1)
        scaler.step(optimizer)
        scaler.update()

    assert names(model, step, optimizer, scaler) == []


@pytest.mark.parametrize("unscaled_first", [True, False])
def test_unscaled_gradients_that_are_rounded_to_half_lose_what_the_scale_kept(unscaled_first):
    model, optimizer, x = network()
    scaler = torch.amp.GradScaler("cpu")

    def compress():
        for each in model.parameters():
            each.grad.copy_(each.grad.half())

    def step():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x) * 2.0**-22).backward()
        if not unscaled_first:
            compress()
        scaler.unscale_(optimizer)
        if unscaled_first:
            compress()
        scaler.step(optimizer)
        scaler.update()

    assert names(model, step, optimizer, scaler) == ["gradients-rounded"] * unscaled_first


@pytest.mark.parametrize("broken", [True, False])
def test_a_hook_that_clamps_scaled_gradients(broken):
    model, optimizer, x = network()
    scaler = torch.amp.GradScaler("cpu")

    def step():
        optimizer.zero_grad()
        limit = 0.001 if broken else 0.001 * scaler.get_scale()
        hooked = model[0].register_forward_hook(
            lambda _m, _i, out: out.register_hook(lambda g: g.clamp(-limit, limit)) and None
        )
        scaler.scale(loss_of(model, x)).backward()
        hooked.remove()
        scaler.step(optimizer)
        scaler.update()

    assert names(model, step, optimizer, scaler) == ["backward-not-linear"] * broken


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_a_scaler_made_in_the_loop_is_not_the_one_that_was_passed(scaler_type):
    model, optimizer, x = network()
    loop = {"scaler": scaler_type("cpu")}

    def step():
        optimizer.zero_grad()
        loop["scaler"].scale(loss_of(model, x)).backward()
        loop["scaler"].step(optimizer)
        loop["scaler"].update()

    assert names(model, step, optimizer, loop["scaler"]) == []
    assert names(model, step, optimizer, scaler_type("cpu")) == ["another-scaler"]
