"""What a scaler tells a watch: a step that adds up backwards under several scales is found, and nothing else is."""

import math
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.lab import load_run, watch

torch.manual_seed(5)
BATCHES = [(torch.randn(16, 16), torch.randint(4, (16,))) for _ in range(8)]


def make():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def accumulated(scaler, between, log=None):
    """Watch three steps of two backwards each, and `between` them."""
    model, optimizer = make()
    with watch(model, optimizer, scaler=scaler, log=log) as w:
        for first, second in zip(BATCHES[:6:2], BATCHES[1:6:2], strict=True):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(first[0]), first[1]) / 2).backward()
            between(scaler)
            scaler.scale(F.cross_entropy(model(second[0]), second[1]) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
    return w


def test_gradients_accumulated_across_scales_are_found(tmp_path):
    scaler = amplab.GradScaler("cpu", init_scale=64.0)
    w = accumulated(scaler, lambda scaler: scaler.update(scaler.get_scale() * 4), log=tmp_path)
    (finding,) = (each for each in w.findings() if each.name == "accumulation-across-scales")
    assert finding.evidence == {"steps": 3, "smallest_scale": 64.0, "largest_scale": 256.0}
    assert [step.backward_scales for step in w.observation] == [(64.0, 256.0), (256.0, 1024.0), (1024.0, 4096.0)]
    assert len(w.history) == 3
    again = load_run(w.log_path)
    assert again.history.mixed_scales == w.history.mixed_scales
    assert "accumulation-across-scales" in [each.name for each in again.findings()]


@pytest.mark.parametrize("growth_interval", [1, 2000])
def test_gradients_accumulated_under_one_scale_are_not(growth_interval):
    scaler = amplab.GradScaler("cpu", init_scale=64.0, growth_interval=growth_interval)
    w = accumulated(scaler, lambda _: None)
    assert scaler.get_scale() == (512.0 if growth_interval == 1 else 64.0)
    assert w.history.mixed_scales == ()
    assert "accumulation-across-scales" not in [each.name for each in w.findings()]


def test_two_optimizers_that_update_the_scale_in_turn_accumulate_nothing():
    first, second = make(), make()
    scaler = amplab.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    with watch(*first, scaler=scaler) as w:
        for x, y in BATCHES[:6]:
            for model, optimizer in (first, second):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
    assert len(w.history) == 6
    assert w.history.mixed_scales == ()


def test_a_session_takes_each_scale_out_before_it_accumulates():
    """So whatever the scales were, the gradients are those of one scale, and there is nothing to find."""
    gradients, found = [], []
    for window in (1, 2000):
        model, optimizer = make()
        amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", scale_window=window, verbosity=0)
        try:
            with watch(model, optimizer, scaler=amp) as w:
                for x, y in BATCHES[:2]:
                    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                        scaled.backward()
                optimizer.step()
            scale = amp.default_session().loss_scale()
        finally:
            amp.reset()
        assert scale == (2.0**18 if window == 1 else 2.0**16)
        gradients.append(model.weight.grad.clone())
        found += [each.name for each in w.findings()]
    assert torch.equal(*gradients)
    assert "accumulation-across-scales" not in found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
def test_a_skip_of_one_of_two_optimizers_counts_if_it_is_the_first(scaler_type, order, fused):
    """In step 2 the first one overflows, in step 4 the second one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, fused=fused) for each in model]
    scaler = scaler_type("cpu", init_scale=1024.0)
    with watch(model, optimizers, scaler=scaler) as w:
        for step, (x, y) in enumerate(BATCHES[:6]):
            model.zero_grad()
            scaler.scale(w.loss(F.cross_entropy(model(x), y))).backward()
            for place, overflows_in in enumerate((2, 4)):
                if step == overflows_in:
                    model[place].weight.grad[0, 0] = float("inf")
            for place in order:
                scaler.step(optimizers[place])
            scaler.update()
    records = w.history.records()
    assert [record.skipped for record in records] == [step == 2 for step in range(6)]
    assert [record.next_loss_scale for record in records] == [1024.0, 1024.0, 512.0, 512.0, 256.0, 256.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
def test_a_scale_set_by_hand_is_no_skip(scaler_type, fused):
    """Steps 1 and 4 overflow; the loop sets a lower scale itself, in place of the update and besides it."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scaler = scaler_type("cpu", init_scale=1024.0)
    with watch(model, optimizer, scaler=scaler) as w:
        for step, (x, y) in enumerate(BATCHES[:6]):
            optimizer.zero_grad()
            other.zero_grad()
            bad = float("inf") if step in (1, 4) else 1.0
            scaler.scale(w.loss(F.cross_entropy(model(x), y) * bad)).backward()
            scaler.step(optimizer)
            if step == 5:  # overflows with an optimizer that is not the watched one
                scaler.scale(other.param_groups[0]["params"][0] * float("inf")).backward()
                scaler.step(other)
            if step in (2, 4):
                scaler.update(scaler.get_scale() / 8)
            else:
                scaler.update()
            if step == 0:
                scaler.update(512.0)
    assert [record.skipped for record in w.history.records()] == [step in (1, 4) for step in range(6)]
    assert len(w.history) == 6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (3,), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("known_by", ["loss", "forward"])
def test_each_of_several_steps_of_a_batch_is_recorded(known_by, bad, fused):
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler, told = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    with watch(model, optimizer, scaler=scaler) as w:
        for number, (x, y) in enumerate(w.batches(BATCHES[:3])):
            for part in range(4):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y) * (float("inf") if number == 1 and part in bad else 1.0)
                told.append((loss.item(), scaler.get_scale(), number == 1 and part in bad))
                scaler.scale(w.loss(loss) if known_by == "loss" else loss).backward()
                scaler.step(optimizer)
                scaler.update()
    got = [(record.loss, record.loss_scale, record.skipped) for record in w.history.records()]
    assert [each[1:] for each in got] == [each[1:] for each in told]
    assert known_by == "forward" or got == told


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (3,), (0, 1, 2), (0, 1, 2, 3)])
def test_a_skip_among_the_steps_of_one_batch_is_counted(bad, fused):
    """With torch's scaler, and neither losses nor calls of the model, a batch of `w.batches` is one record."""
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer, scaler=scaler) as w:
        for number, (x, y) in enumerate(w.batches(BATCHES[:3])):
            for part in range(4):
                optimizer.zero_grad()
                factor = float("inf") if number == 1 and part in bad else 1.0
                scaler.scale(F.cross_entropy(model.forward(x), y) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
    assert [record.skipped for record in w.history.records()] == [False, bool(bad), False]


@pytest.mark.parametrize("bad", [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
def test_a_pass_that_only_updates_the_scale_hides_no_skip(scaler_type, bad):
    """As the first pass of sharpness-aware minimization, whose loss is the only one that the watch gets."""
    model, optimizer = make()
    scaler, told = scaler_type("cpu", init_scale=1024.0), []
    with watch(model, optimizer, scaler=scaler) as w:
        for number, (x, y) in enumerate(w.batches(BATCHES)):
            first, second = (math.inf if number in (0, 3, 4) and each else 1.0 for each in bad)
            scaler.scale(w.loss(F.cross_entropy(model(x), y) * first)).backward()
            scaler.unscale_(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told.append((scaler.get_scale(), second == math.inf))
            scaler.scale(F.cross_entropy(model(x), y) * second).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [(record.loss_scale, record.skipped) for record in w.history.records()] == told


def test_a_scale_that_is_set_after_each_of_several_steps_of_a_batch_is_no_skip():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer, scaler=scaler) as w:
        for x, y in w.batches(BATCHES[:3]):
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(w.loss(F.cross_entropy(model(x), y))).backward()
                scaler.step(optimizer)
                scaler.update(scaler.get_scale() * 0.9)
    assert [record.skipped for record in w.history.records()] == [False] * 6


def test_steps_between_watch_and_its_block_are_not_counted():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    w = watch(model, optimizer, scaler=scaler)

    def step():
        optimizer.zero_grad()
        scaler.scale(w.loss(F.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]))).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    with w:
        step()
    assert [record.skipped for record in w.history.records()] == [False]


class ByMethod(nn.Linear):
    def loss_of(self, x, y):
        return F.cross_entropy(F.linear(x, self.weight, self.bias), y)


def in_evaluation(model):
    model.eval()  # as with frozen statistics
    return lambda x, y: F.cross_entropy(model(x), y)


def validating(model):
    def loss_of(x, y):
        F.cross_entropy(model.eval()(x), y)  # with gradients
        return F.cross_entropy(model.train()(x), y)

    return loss_of


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize("loss_of", [lambda model: model.loss_of, in_evaluation, validating])
def test_steps_are_told_apart_however_the_loop_calls_its_model(scaler_type, loss_of):
    torch.manual_seed(0)
    model = ByMethod(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, loss_of = scaler_type("cpu", init_scale=1024.0), loss_of(model)
    with watch(model, optimizer, scaler=scaler) as w:
        for step, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            scaler.scale(w.loss(loss_of(x, y) * (float("inf") if step in (2, 3, 6) else 1.0))).backward()
            scaler.step(optimizer)
            scaler.update()
    skipped = [record.step for record in w.history.records() if record.skipped]
    assert (len(w.history), skipped) == (8, [2, 3, 6])
    assert list(w.history.column("next_loss_scale")) == [1024.0] * 2 + [512.0] + [256.0] * 3 + [128.0] * 2


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
def test_a_forward_between_step_and_update_ends_no_step(scaler_type):
    """As of a loop that measures the model it has just stepped."""
    model, optimizer = make()
    scaler = scaler_type("cpu", init_scale=1024.0)
    with watch(model, optimizer, scaler=scaler) as w:
        for step, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * (float("inf") if step in (2, 3, 6) else 1.0)
            scaler.scale(w.loss(loss)).backward()
            scaler.step(optimizer)
            model(x)
            scaler.update()
    assert [record.skipped for record in w.history.records()] == [step in (2, 3, 6) for step in range(8)]
    assert list(w.history.column("next_loss_scale")) == [1024.0] * 2 + [512.0] + [256.0] * 3 + [128.0] * 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("after", ["unscale_", "step"])
def test_an_iteration_that_was_given_up_leaves_the_next_skip_as_it_is(after, error, fused):
    """Iteration 1 runs out of memory, or is interrupted, in a function; the loop goes on, and iteration 2 overflows."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler, seen = amplab.GradScaler("cpu", init_scale=1024.0), []

    def train_step(number, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (float("inf") if number == 2 else 1.0)
        scaler.scale(w.loss(loss)).backward()
        scaler.unscale_(optimizer)
        if (number, after) == (1, "unscale_"):
            raise error
        scaler.step(optimizer)
        if (number, after) == (1, "step"):
            raise error
        scaler.update()

    with watch(model, optimizer, scaler=scaler) as w:
        for number, batch in enumerate(BATCHES[:5]):
            scale, weight = scaler.get_scale(), model.weight.detach().clone()
            try:
                train_step(number, *batch)
            except (RuntimeError, KeyboardInterrupt):
                if after == "unscale_":  # else the optimizer has stepped
                    continue
            seen.append((scale, scaler.get_scale(), torch.equal(weight, model.weight)))
    assert [(each.loss_scale, each.next_loss_scale, each.skipped) for each in w.history.records()] == seen
    assert [skipped for *_, skipped in seen] == [False] * (1 + (after == "step")) + [True, False, False]


@pytest.fixture
def apex():
    """`amp.initialize` without its banner, until the end of the test."""
    yield lambda *given, **options: amp.initialize(*given, **{"opt_level": "O1", "verbosity": 0} | options)
    amp.reset()


def scales():
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


def backward(loss, optimizer, loss_id=0):
    """Run the backward of a loss; return the scale of its loss scaler before it."""
    scale = scales()[loss_id]
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
        scaled.backward()
    return scale


def scaling(record):
    return record.loss_scale, record.next_loss_scale, record.skipped


@pytest.mark.parametrize("watched", [0, 1])
def test_each_of_two_networks_with_losses_of_their_own_has_its_scales_and_its_overflows(apex, watched):
    """As a GAN in apex: two losses of one network, one of the other. In step 1 both overflow, then one of them."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(16, 4)), nn.Sequential(nn.Linear(16, 4))]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    apex(models, optimizers, num_losses=3)
    losses, overflows = {0: 0, 1: 0, 2: 1}, {1: (1, 2), 2: (2,), 3: (1,), 4: (0, 1)}
    seen = []
    with watch(models[watched], optimizers[watched], scaler=amp) as w:
        for step, (x, y) in enumerate(BATCHES[:6]):
            for place, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                own = [loss_id for loss_id, owner in losses.items() if owner == place]
                used = {}
                for loss_id in own:
                    bad = float("inf") if loss_id in overflows.get(step, ()) else 1.0
                    used[loss_id] = backward(F.cross_entropy(models[place](x), y) * bad, optimizer, loss_id)
                weight = models[place][0].weight.detach().clone()
                optimizer.step()
                if place == watched:
                    first = [each for each in own if each in overflows.get(step, ())]
                    limiting = first[0] if first else min(own, key=used.get)
                    skipped = torch.equal(weight, models[place][0].weight)
                    name = amp.last_step(optimizer).first_nonfinite
                    seen.append((step, used, (used[limiting], scales()[limiting], skipped), name))
    records = w.history.records()
    assert [scaling(each) for each in records] == [each for *_, each, _ in seen]
    assert [each.first_nonfinite for each in records] == [name for *_, name in seen]
    assert {name[: len("models[0]")] for *_, name in seen if name} == {f"models[{watched}]"}
    mixed = [(step, tuple(used.values())) for step, used, *_ in seen if len({*used.values()}) > 1]
    assert [(each.step, each.scales) for each in w.history.mixed_scales] == mixed
    assert bool(mixed) == (watched == 0)
    assert "accumulation-across-scales" not in [each.name for each in w.findings()]


def test_a_skip_of_several_backwards_has_the_scale_of_the_first_that_overflowed(apex):
    model, optimizer = make()
    apex(model, optimizer)
    seen = []
    overflows = {(1, 0), (2, 1), (3, 0), (3, 1)}
    with watch(model, optimizer, scaler=amp) as w:
        for step, (x, y) in enumerate(BATCHES[:5]):
            optimizer.zero_grad()
            used = []
            for part in range(2):
                bad = float("inf") if (step, part) in overflows else 1.0
                used.append(backward(F.cross_entropy(model(x), y) * bad, optimizer))
            weight = model.weight.detach().clone()
            optimizer.step()
            place = min((part for number, part in overflows if number == step), default=0)
            seen.append((used[place], scales()[0], torch.equal(weight, model.weight)))
    assert [scaling(each) for each in w.history.records()] == seen
    assert [skipped for *_, skipped in seen] == [False, True, True, True, False]


def test_the_next_scale_is_that_after_a_later_backward_of_another_network(apex):
    """Two networks with one loss scaler step after both backwards, of which the second one overflows in step 1."""
    (model, optimizer), (other, other_optimizer) = make(), make()
    apex([model, other], [optimizer, other_optimizer])
    with watch(model, optimizer, scaler=amp) as w:
        for step, (x, y) in enumerate(BATCHES[:3]):
            backward(F.cross_entropy(model(x), y), optimizer)
            backward(F.cross_entropy(other(x), y) * (float("inf") if step == 1 else 1.0), other_optimizer)
            for each in (optimizer, other_optimizer):
                each.step()
                each.zero_grad()
    expected = [(2.0**16, 2.0**16, False), (2.0**16, 2.0**15, False), (2.0**15, 2.0**15, False)]
    assert [scaling(each) for each in w.history.records()] == expected


def test_an_accumulated_step_runs_again_at_the_scale_of_its_overflow(apex):
    """The first of its two batches overflows at 65536, and not at 32768."""
    model, optimizer = make()
    apex(model, optimizer)

    def loss_of(batch):
        x, y, factor = batch
        return F.cross_entropy(model(x), y) * factor

    x = torch.ones(16, 16) / 16
    batches = [(x, torch.zeros(16, dtype=torch.long), factor) for factor in (0.1, 0.1, 2.0, 0.1, 0.1, 0.1)]
    with watch(model, optimizer, scaler=amp, step=loss_of) as w:
        for number, batch in enumerate(w.batches(batches)):
            if number % 2 == 0:
                optimizer.zero_grad()
            backward(loss_of(batch), optimizer)
            if number % 2:
                optimizer.step()
    (skip,) = w.history.skips()
    why = w.history.explanations[skip.step]
    assert scaling(skip) == (2.0**16, 2.0**15, True)
    assert (why.kind, why.fits) == ("scale", 2.0**15)


def test_an_overflow_that_was_given_up_is_not_that_of_a_later_step(apex):
    """The loop is interrupted before the step, clears the gradients, and overflows again, or not."""
    model, optimizer = make()
    apex(model, optimizer)
    bad = float("inf")
    with watch(model, optimizer, scaler=amp) as w:
        for given_up, factor in ((bad, 1.0), (bad, bad), (1.0, 1.0)):
            backward(F.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]) * given_up, optimizer)
            optimizer.zero_grad()
            backward(F.cross_entropy(model(BATCHES[1][0]), BATCHES[1][1]) * factor, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    expected = [(2.0**15, 2.0**15, False), (2.0**14, 2.0**13, True), (2.0**13, 2.0**13, False)]
    assert [scaling(each) for each in w.history.records()] == expected
    assert w.history.mixed_scales == ()


def test_a_session_that_is_not_enabled_is_watched_as_a_loop_without_a_scale(apex):
    """As with the flag of apex's scripts; and as with a GradScaler that is not enabled."""
    weights, losses = [], []
    for scaler in (amp, amplab.GradScaler("cpu", enabled=False)):
        model, optimizer = make()
        apex(model, optimizer, enabled=False)
        with watch(model, optimizer, scaler=scaler) as w:
            for x, y in BATCHES[:3]:
                optimizer.zero_grad()
                with amp.scale_loss(w.loss(F.cross_entropy(model(x), y)), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        assert [scaling(each) for each in w.history.records()] == [(1.0, 1.0, False)] * 3
        weights.append(model.weight.detach())
        losses.append(list(w.history.column("loss")))
    assert torch.equal(*weights)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, amplab.optimizers.FusedSGD, amplab.optimizers.FusedAdam])
@pytest.mark.parametrize("first", [0, 1])
def test_a_skip_counts_whichever_of_several_losses_has_overflowed(first, kind):
    """Which steps are skipped is what the weights say: each loss overflows in turn, then both."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer, unmoved = kind(model.parameters(), lr=0.1), []
    scaler = amplab.GradScaler("cpu", init_scale=1024.0, num_losses=2)
    bad = {2: (first,), 4: (1 - first,), 6: (0, 1)}
    with watch(model, optimizer, scaler=scaler) as w:
        for number, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            for loss_id in range(2):
                loss = F.cross_entropy(model(x), y) * (float("inf") if loss_id in bad.get(number, ()) else 1.0)
                with scaler.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                    scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            unmoved.append(torch.equal(before, model.weight))
    assert unmoved == [number in bad for number in range(8)]
    assert [record.skipped for record in w.history.records()] == unmoved


def spoiled(scaler, optimizer, loss):
    """A step of a scaler, or of the session."""
    if scaler is amp:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("in_batches", [True, False])
@pytest.mark.parametrize("kind", ["amplab", "fused", "apex"])
def test_a_skip_has_no_gradients_of_an_iteration_that_was_given_up(kind, in_batches, apex):
    """Iteration 1 ends in a hook of the optimizer, whose gradients were measured before; iteration 2 overflows."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=kind == "fused")
    if kind == "apex":
        apex(model, optimizer, loss_scale="dynamic")
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}})
    scaler, number = amp if kind == "apex" else amplab.GradScaler("cpu", init_scale=1024.0), 0

    def run_out_of_memory(*_):
        if number == 1:
            raise MemoryError

    with watch(model, optimizer, scaler=scaler, every=1) as w:
        optimizer.register_step_pre_hook(run_out_of_memory)
        for number, (x, y) in enumerate(w.batches(BATCHES[:5]) if in_batches else BATCHES[:5]):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * (float("inf") if number == 2 else 1.0)
            with suppress(MemoryError):
                spoiled(scaler, optimizer, w.loss(loss) if scaler is not amp else loss)
    assert [record.skipped for record in w.history.records()] == [False, True, False, False]
    measured = {sample.step: sample.histogram for sample in w.history.gradient_samples}
    finite = [step for step, histogram in measured.items() if not histogram.infs + histogram.nans]
    assert finite == [0, 2, 3]
    assert len(measured) == 3 + (kind == "fused")
