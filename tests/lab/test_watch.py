"""A loop of one's own, watched: its results are bit for bit what they were, and every step is told as it was."""

import contextlib
import copy
import gc
import io
import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
from rateless_optimizers import RATELESS
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import amplab
from amplab import amp
from amplab.lab import WatchCallback, attach, load_run, watch
from amplab.lab.watched_run import WatchedRun
from amplab.scalers import StaticScale

STEPS = 60
torch.manual_seed(5)
INPUTS = torch.randn(64, 16)
LABELS = (INPUTS @ torch.randn(16, 4)).argmax(1)
BATCHES = [(INPUTS[i % 4 * 16 :][:16], LABELS[i % 4 * 16 :][:16]) for i in range(STEPS)]


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Silent:
    """In the place of a watch: a loop that nobody looks at."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def batches(self, batches):
        return batches

    def loss(self, loss):
        return loss


def apex_loop(w, model, optimizer, told):
    with w:
        for x, y in w.batches(BATCHES):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scale = amp.default_session().loss_scale()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            told.append((loss.item(), scale, not amp.last_step(optimizer).stepped))


def scaler_loop(w, model, optimizer, told, scaler, casting):
    with w:
        for x, y in w.batches(BATCHES):
            optimizer.zero_grad()
            with casting():
                loss = w.loss(F.cross_entropy(model(x), y))
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            told.append((loss.item(), scale, scaler.get_scale() < scale))


def plain_loop(w, model, optimizer, told):
    with w:
        for x, y in w.batches(BATCHES):
            optimizer.zero_grad()
            loss = w.loss(F.cross_entropy(model(x), y))
            loss.backward()
            optimizer.step()
            told.append((loss.item(), 1.0, False))


def run(face, watched, **options):
    """Train in one of the faces; return the weights, what the loop itself knows, and the watch."""
    model, optimizer = make()
    told = []
    try:
        if face in ("O1", "O2"):
            amp.initialize(model, optimizer, opt_level=face, verbosity=0, dynamic_init_scale=2.0**24, scale_window=12)
            w = watch(model, optimizer, scaler=amp, **options) if watched else Silent()
            apex_loop(w, model, optimizer, told)
        elif face == "none":
            w = watch(model, optimizer, **options) if watched else Silent()
            plain_loop(w, model, optimizer, told)
        else:
            kind = amplab.GradScaler if face == "amplab" else torch.amp.GradScaler
            scaler = kind("cpu", init_scale=2.0**24, growth_interval=12)
            region = amplab.autocast if face == "amplab" else torch.autocast
            w = watch(model, optimizer, scaler=scaler, **options) if watched else Silent()
            scaler_loop(w, model, optimizer, told, scaler, lambda: region("cpu", dtype=torch.float16))
    finally:
        amp.reset()
    return [weight.detach().float().clone() for weight in model.parameters()], told, w


@pytest.mark.parametrize("face", ["O1", "O2", "amplab", "torch", "none"])
def test_every_step_is_reported_and_none_is_changed(face, tmp_path):
    plain, told_plain, _ = run(face, watched=False)
    weights, told, w = run(face, watched=True, every=7, log=tmp_path)
    assert told == told_plain
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    records = list(w.history.records())
    assert [(each.loss, each.loss_scale, each.skipped) for each in records] == told
    assert face == "none" or w.history.skip_count > 3
    measured = {each.step for each in records if each.grad_exponent is not None and not each.skipped}
    assert measured <= {*range(0, STEPS, 7), *range(0, STEPS, 16)}
    assert [sample.step for sample in w.history.gradient_samples if sample.step % 7] == []
    again = load_run(w.log_path)
    assert list(map(repr, again.history.records())) == list(map(repr, records))
    assert isinstance(again.config, WatchedRun)
    assert w.failures == ()


@pytest.mark.parametrize("every", [1, 50])
def test_a_measured_exponent_is_the_gradients_own(every):
    model, optimizer = make()
    with watch(model, optimizer, every=every) as w:
        for x, y in BATCHES[:17]:
            optimizer.zero_grad()
            w.loss(F.cross_entropy(model(x), y)).backward()
            largest = max(weight.grad.abs().max().item() for weight in model.parameters())
            norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).double().norm().item()
            optimizer.step()
            if w.history.last.step % min(every, 16) == 0:
                assert w.history.last.grad_exponent == math.floor(math.log2(largest))
            if w.history.last.step % every == 0:
                assert w.observation.steps[-1].gradient_norm == pytest.approx(norm, rel=1e-5)
    assert len(w.history.gradient_samples) == (17 if every == 1 else 1)


@pytest.mark.parametrize("kind", RATELESS)
def test_an_optimizer_without_a_learning_rate_is_watched(kind):
    models = [make()[0] for _ in range(2)]
    watches = []
    for model, watched in zip(models, (False, True), strict=True):
        torch.manual_seed(1)  # of dropout
        optimizer = kind(model.parameters())
        watches.append(watch(model, optimizer) if watched else Silent())
        plain_loop(watches[-1], model, optimizer, [])
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert (len(watches[1].history), watches[1].failures) == (STEPS, ())
    assert not any(each.severity == "error" for each in watches[1].findings())


def test_nothing_stays_behind():
    model, optimizer = make()
    before = json.dumps([sorted(map(str, vars(each))) for each in (*model.modules(), optimizer)])
    with watch(model, optimizer) as w:
        pass
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert json.dumps([sorted(map(str, vars(each))) for each in (*model.modules(), optimizer)]) == before
    assert len(w.history) == 0


def test_an_exception_in_the_loop_leaves_a_log_that_loads(tmp_path):
    model, optimizer = make()
    w = watch(model, optimizer, log=tmp_path)

    def interrupted():
        yield from BATCHES[:5]
        raise KeyboardInterrupt

    def loop():
        with w:
            for x, y in w.batches(interrupted()):
                optimizer.zero_grad()
                w.loss(F.cross_entropy(model(x), y)).backward()
                optimizer.step()

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert len(load_run(w.log_path).history) == 5
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("every", [1, 50])
def test_a_watched_run_is_replayed_under_other_rules(every):
    _, _, w = run("amplab", watched=True, every=every)
    assert w.history.replay("torch").skips == ()
    assert w.history.skip_count > 0


def test_a_watched_run_determines_what_a_larger_scale_does():
    """Between two counts of exponents the largest gradient is measured often enough, so nothing is a guess."""
    _, _, w = run("none", watched=True)
    larger = w.history.replay(StaticScale(2.0**8))
    assert larger.certain_until is None
    assert "a guess" not in str(larger)


class Attention(nn.Module):
    """Logits without 1/sqrt(d), that leave half once the input is loud."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        return self.out((self.q(x) @ self.k(x).T).softmax(-1) @ self.v(x))


@pytest.mark.parametrize("face", ["apex", "amplab", "torch"])
def test_a_skipped_step_is_run_again_and_named(face, tmp_path):
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [torch.randn(8, 16) * loud for loud in (1, 1, 2000, 2000)]
    scaler = None
    if face == "apex":
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0, on_collapse="warn", dynamic_init_scale=256.0)
    else:
        scaler = (amplab.GradScaler if face == "amplab" else torch.amp.GradScaler)("cpu", init_scale=256.0)
    region = {"amplab": amplab.autocast, "torch": torch.autocast}.get(face)

    def loss_of(batch):
        if region is None:
            return model(batch).square().mean()
        with region("cpu", dtype=torch.float16):
            return model(batch).float().square().mean()

    with watch(model, optimizer, scaler=scaler or amp, step=loss_of, log=tmp_path) as w:
        for batch in w.batches(batches):
            optimizer.zero_grad()
            loss = w.loss(loss_of(batch))
            if scaler is None:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    amp.reset()
    assert [record.skipped for record in w.history.records()] == [False, False, True, True]
    assert w.failures == ()
    first = w.findings()[0]
    assert (first.name, first.severity) == ("logits-overflow-half", "error")
    assert first.op == "matmul"
    assert (first.evidence["first_step"], first.evidence["skips_explained"]) == (2, 2)
    assert "It began in step 2 and explains 2 of 2 skipped steps." in first.symptom
    assert "Attention with SGD: 4 steps, 2 skipped" in w._repr_html_()
    later = load_run(w.log_path).findings()[0]  # a log opened later knows it, too
    assert {**later.as_dict(), "evidence": {}} == {**first.as_dict(), "evidence": {}}
    assert later.evidence.keys() == first.evidence.keys()


def loaded(model):
    """Return the model that torch.save writes."""
    file = io.BytesIO()
    torch.save(model, file)
    assert b"amplab" not in file.getvalue()  # it loads where amplab is missing
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "save": loaded,
    "average": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("in_batches", [True, False])
def test_a_copy_of_the_model_is_not_watched(copied, in_batches):
    """In the first step, whose ops are seen, after it, and after skipped steps, when each module has a hook."""
    model, optimizer = make()
    scaler = amplab.GradScaler("cpu")
    step = (lambda batch: F.cross_entropy(model(batch[0]), batch[1]) * math.inf) if in_batches else None  # has a hook
    with watch(model, optimizer, scaler=scaler, step=step) as w:
        for x, y in w.batches(BATCHES[:8]) if in_batches else BATCHES[:8]:
            duplicate = copied(model).eval()
            assert torch.equal(duplicate(x), model.eval()(x))
            optimizer.zero_grad()
            loss = F.cross_entropy(model.train()(x), y)
            duplicate.train()(x * math.nan).sum().backward()
            scaler.scale(w.loss(loss * math.inf)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [(record.loss, record.skipped) for record in w.history.records()] == [(math.inf, True)] * 8
    assert not any("not-explained" in each.name or each.name == "nonfinite-forward" for each in w.findings())
    assert not w.failures


def test_twin_and_ladder_run_in_a_watch():
    model, optimizer = make()
    with watch(model, optimizer) as w:
        for x, y in BATCHES[:2]:
            amplab.twin(model, (x, y), loss=F.cross_entropy, steps=1)
            amplab.ladder(model, (x, y), loss=F.cross_entropy, steps=8, tell=lambda _: None)
            optimizer.zero_grad()
            w.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
    assert len(w.history) == 2
    assert not w.failures


@pytest.mark.parametrize("make_scaler", [lambda: None, lambda: amplab.GradScaler("cpu")], ids=["none", "amplab"])
def test_a_step_that_the_doctor_tries_is_no_step_of_the_run(make_scaler):
    model, optimizer = make()
    scaler = make_scaler()
    with watch(model, optimizer, scaler=scaler) as w:

        def train(batch, observe=lambda loss: loss):
            optimizer.zero_grad()
            loss = observe(F.cross_entropy(model(batch[0]), batch[1]))
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return loss.item()

        losses = []
        for batch in BATCHES[:3]:
            losses.append(train(batch, w.loss))
            amplab.doctor(model, batch, loss=F.cross_entropy, train_step=train, optimizer=optimizer, scaler=scaler)
    assert [record.loss for record in w.history.records()] == losses
    assert w.history.skip_count == 0
    assert not w.findings()
    assert not w.failures


def test_without_a_step_the_forward_is_looked_at():
    torch.manual_seed(0)
    model = Attention()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), amplab.GradScaler("cpu", init_scale=256.0)
    with watch(model, optimizer, scaler=scaler) as w:
        for _ in range(8):
            optimizer.zero_grad()
            with amplab.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(8, 16) * 2000).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    found = [each for each in w.findings() if each.name == "nonfinite-forward"]
    assert [each.module for each in found] == ["out"]
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters())


class Own(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_loss_in_the_output_is_taken():
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    with watch(model, optimizer) as w:
        for x, y in BATCHES[:4]:
            optimizer.zero_grad()
            loss = model(x, y)["loss"]
            loss.backward()
            optimizer.step()
            told.append(loss.item())
    assert w.history.column("loss").tolist() == told


def test_as_a_callback_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    data = [{"x": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]
    callback = WatchCallback(log=tmp_path, every=3)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=12, report_to=[], save_strategy="no", use_cpu=True, logging_steps=1, disable_tqdm=True
    )
    trainer = transformers.Trainer(Own(), arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert callback.watch.history.column("loss").tolist() == pytest.approx(logged, abs=1e-3)
    assert len(load_run(callback.watch.log_path).history.gradient_samples) == 4


def test_a_run_of_a_trainer_that_raises_leaves_no_mode_and_frees_its_model(tmp_path):
    def run():
        model = Own()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        WatchCallback(log=tmp_path).on_train_begin(None, None, None, model=model, optimizer=optimizer)
        model(*BATCHES[0])["loss"].backward()
        return weakref.ref(model)  # an exception ends the run, and `on_train_end` is not called

    before = torch.overrides._get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    model = run()
    assert (torch.overrides._get_current_function_mode_stack(), _get_current_dispatch_mode_stack()) == before
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("renewed", ["callback", "model", "neither"])
def test_the_log_of_an_interrupted_run_of_a_trainer_has_no_step_of_the_next_run(tmp_path, renewed):
    def run(callback, model, optimizer, interrupted):
        callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
        for x, y in BATCHES[:4]:
            optimizer.zero_grad()
            model(x, y)["loss"].backward()
            optimizer.step()
        if not interrupted:  # Trainer.train raises KeyboardInterrupt instead
            callback.on_train_end()

    callback, model = WatchCallback(log=tmp_path), Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(callback, model, optimizer, interrupted=True)
    first, first_model = callback.watch, model
    if renewed == "callback":
        callback = WatchCallback(log=tmp_path)
    if renewed == "model":
        model = Own()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(callback, model, optimizer, interrupted=False)
    assert (len(first.history), len(load_run(first.log_path).history)) == (4, 4)
    assert len(load_run(callback.watch.log_path).history) == 4
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in first_model.modules())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "sentence"),
    [
        ((3, None), {}, TypeError, "expected a torch.nn.Module"),
        ((nn.Linear(1, 1), 3), {}, TypeError, "expected a torch.optim.Optimizer"),
        (make(), {"scaler": "amp"}, TypeError, "expected a GradScaler, a Session"),
        (make(), {"every": 0}, ValueError, "expected a whole number of steps"),
        (make(), {"step": 3}, TypeError, "step=int:"),
    ],
)
def test_refusals(arguments, options, error, sentence):
    with pytest.raises(error, match=sentence):
        watch(*arguments, **options)


def plain(scaler=None, **options):
    model, optimizer = make()
    with watch(model, optimizer, scaler=scaler, **options) as w:
        for x, y in BATCHES[:6]:
            optimizer.zero_grad()
            loss = w.loss(F.cross_entropy(model(x), y))
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    return w


def test_a_session_of_another_model_is_not_taken():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    try:
        assert len(plain().history) == 6
        with pytest.raises(RuntimeError, match="not part of the session"):
            plain(amp)
    finally:
        amp.reset()


@pytest.mark.parametrize("kind", [amplab.GradScaler, torch.amp.GradScaler])
def test_a_scaler_that_is_switched_off_leaves_a_plain_loop(kind):
    assert len(plain(kind("cpu", enabled=False)).history) == 6


def test_an_update_that_sets_the_scale_is_not_a_step():
    model, optimizer = make()
    scaler = amplab.GradScaler("cpu", init_scale=64.0)
    with watch(model, optimizer, scaler=scaler) as w:
        for x, y in BATCHES[:4]:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            scaler.update(32.0)
    assert [record.loss_scale for record in w.history.records()] == [64.0, 32.0, 32.0, 32.0]


def test_odd_arguments_are_answered_with_a_sentence():
    model, optimizer = make()
    with watch(model, optimizer) as w, pytest.raises(TypeError, match="expected the tensor"):
        w.loss(3.0)
    with pytest.raises(TypeError, match="expected a folder"):
        watch(model, optimizer, log=3)
    with pytest.raises(TypeError, match="expected the path"):
        load_run(None)
    with pytest.raises(TypeError, match="expected a Trainer, a Watch"):
        attach(3)


def test_scalars_for_tensorboard(tmp_path):
    model, optimizer = make()
    with watch(model, optimizer, tensorboard=tmp_path, every=1) as w:
        for x, y in BATCHES[:3]:
            optimizer.zero_grad()
            w.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [round(each.value, 5) for each in events.Scalars("amplab/loss")] == [
        round(each.loss, 5) for each in w.history.records()
    ]


def test_scalars_have_no_loss_that_is_missing(tmp_path):
    model, optimizer = make()
    with watch(model, optimizer, tensorboard=tmp_path, every=1) as w:
        for x, y in BATCHES[:3]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert w.history.missing_losses() == {0, 1, 2}
    assert "amplab/loss" not in events.Tags()["scalars"]
    assert len(events.Scalars("amplab/gradient_norm")) == 3


def train_with_scalars(w, model, optimizer, after_step):
    """Train `STEPS` steps, and call `after_step(step)` after each."""
    with w:
        for step, (x, y) in enumerate(w.batches(BATCHES)):
            optimizer.zero_grad()
            w.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            after_step(step)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
@pytest.mark.parametrize("step", [0, 30, STEPS - 2])
def test_a_loop_goes_on_without_scalars_that_cannot_be_written(step, tmp_path):
    """Their folder is gone after a step; after the last but one, it is the end of the watch that may learn it."""
    model, optimizer = make()
    scalars = tmp_path / "scalars"
    w = watch(model, optimizer, tensorboard=scalars, every=1, log=tmp_path / "log")
    before = threading.active_count()
    with pytest.warns(RuntimeWarning, match="tensorboard: cannot write") as warned:
        # Renamed, which is one operation: TensorBoard's thread would write between two deletions.
        train_with_scalars(w, model, optimizer, lambda now: now == step and scalars.rename(tmp_path / "gone"))
    assert len(warned) == len(w.failures) == 1
    assert len(w.history) == len(load_run(w.log_path).history) == STEPS
    assert threading.active_count() < before  # TensorBoard's thread has ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.skipif(os.name != "posix", reason="needs a limit of the size of files")
def test_scalars_that_fill_the_disk_do_not_end_the_loop(tmp_path):
    import resource

    model, optimizer = make()
    w = watch(model, optimizer, tensorboard=tmp_path, every=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match="tensorboard: cannot write"):
            train_with_scalars(w, model, optimizer, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(w.history) == STEPS
    assert len(w.failures) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_loop_has_no_scalars(tmp_path):
    """It has no thread that writes them, so they would wait for ever."""
    model, optimizer = make()
    w = watch(model, optimizer, tensorboard=tmp_path, every=1)

    def in_child():
        signal.alarm(60)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                for x, y in BATCHES:
                    optimizer.zero_grad()
                    w.loss(F.cross_entropy(model(x), y)).backward()
                    optimizer.step()
                w.__exit__()
            os._exit(int(len(w.failures) != 1 or len(warned) != 1))
        finally:
            os._exit(2)

    with w:
        if (child := os.fork()) == 0:
            in_child()
        assert os.waitpid(child, 0)[1] == 0
    assert w.failures == ()


def test_parameters_have_the_names_of_the_model():
    """amplab's scaler knows places in the optimizer only."""
    model, optimizer = make()
    scaler = amplab.GradScaler("cpu", init_scale=2.0**30)
    with watch(model, optimizer, scaler=scaler) as w:
        for x, y in BATCHES[:2]:
            optimizer.zero_grad()
            with amplab.autocast("cpu", dtype=torch.float16):
                loss = w.loss(F.cross_entropy(model(x), y))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [each.first_nonfinite for each in w.history.records()] == ["4.bias", "4.bias"]


@pytest.mark.parametrize("whole", [False, True], ids=["graphs", "one graph"])
@pytest.mark.parametrize("late", [False, True], ids=["before the watch", "in it"])
def test_a_loop_that_compiles_its_loss_is_compiled_and_gets_the_same_bits(whole, late):
    """In a look it would run as it is, also later, or raise if one graph is asked for."""

    def train(watched):
        torch._dynamo.reset()
        model, optimizer = make()
        graphs = []

        def compiled():
            def keep(graph, _):
                graphs.append(graph)
                return graph.forward

            return torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend=keep, fullgraph=whole)

        loss_of = None if late else compiled()
        with watch(model, optimizer) if watched else contextlib.nullcontext() as w:
            loss_of = loss_of or compiled()
            for x, y in w.batches(BATCHES[:5]) if watched else BATCHES[:5]:
                optimizer.zero_grad()
                loss = loss_of(x, y)
                (w.loss(loss) if watched else loss).backward()
                optimizer.step()
        assert graphs
        return w, [*model.parameters()]

    (_, expected), (w, found) = train(watched=False), train(watched=True)
    torch._dynamo.reset()  # a watch of the next test looks again
    assert all(map(torch.equal, found, expected))
    assert len(w.history) == 5
    assert w.failures == ()
    assert any("the program compiles" in each for each in w.findings().looked_at)


def test_batches_that_are_never_read_end_no_look():
    model, optimizer = make()
    with watch(model, optimizer) as w:
        for x, y in w.batches(BATCHES[:3]):
            w.batches(BATCHES)
            optimizer.zero_grad()
            w.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
    assert w.traced is not None
    assert len(w.history) == 3


class Corrupt(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, place):
        if place == 13:
            raise OSError("a corrupt image")
        return INPUTS[place]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_goes_on_after_an_error_of_its_loader_gets_the_batches_after_it(workers):
    model, optimizer = make()
    loader = torch.utils.data.DataLoader(Corrupt(), batch_size=4, num_workers=workers)
    with watch(model, optimizer) as w:
        batches, seen = iter(w.batches(loader)), 0
        while True:
            try:
                x = next(batches)
            except StopIteration:
                break
            except OSError:
                continue
            optimizer.zero_grad()
            w.loss(model(x).square().mean()).backward()
            optimizer.step()
            seen += 1
    assert seen == len(w.history) == 9
    assert w.failures == ()
    assert w.traced is not None
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch._dynamo
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_loop_that_compiles_the_step_of_its_optimizer_gets_the_same_bits(kind):
    """The hooks of the watch run outside of the graphs."""

    def train(watched):
        torch._dynamo.reset()
        model, _ = make()
        optimizer = kind(model.parameters(), lr=0.01)
        step = torch.compile(optimizer.step, backend="eager")
        with watch(model, optimizer) if watched else contextlib.nullcontext() as w:
            for x, y in BATCHES[:4]:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (w.loss(loss) if watched else loss).backward()
                step()
        torch._dynamo.reset()
        return w, [*model.parameters()]

    (_, expected), (w, found) = train(watched=False), train(watched=True)
    assert all(map(torch.equal, found, expected))
    assert (len(w.history), w.failures) == (4, ())


DAEMON = """
import sys, threading, time
import torch
import amplab.lab.run_log.writer as writer
from amplab.lab import watch

class Slow(writer.FileIO):
    def write(self, data):
        time.sleep(0.001)
        return super().write(data)

writer.FileIO = Slow
begun = threading.Event()

def train():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, log=sys.argv[1]) as w:
        while True:
            w.loss(model(torch.ones(2, 4)).sum()).backward()
            optimizer.step()
            if len(w.history) == 50:
                begun.set()

threading.Thread(target=train, daemon=True).start()
begun.wait()
"""


def test_a_program_that_ends_while_a_daemon_thread_trains_leaves_a_log_that_can_be_read(tmp_path):
    for number in range(6):
        command = [sys.executable, "-c", DAEMON, str(tmp_path / f"{number}.jsonl")]
        subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        steps = [each.step for each in load_run(tmp_path / f"{number}.jsonl").history.records()]
        assert steps == [*range(len(steps))]


ENDS = """
import sys, time
import torch
import amplab.lab.run_log.writer as writer
from amplab.lab import WatchCallback

class Slow(writer.FileIO):
    "A disk on which steps are written together."
    def write(self, data):
        time.sleep(0.01)
        return super().write(data)

folder, disk, scaling, kept = sys.argv[1:]
if disk == "slow":
    writer.FileIO = Slow

def train():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaling == "torch" else None
    callback = WatchCallback(log=folder)
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False) if optimizer.scaler is None else optimizer.scaler
    for _ in range(30):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    if kept == "kept":
        globals().update(callback=callback)
    raise MemoryError
train()
"""


@pytest.mark.parametrize("kept", ["kept", "not referenced"])
@pytest.mark.parametrize("scaling", ["torch", "none"])
@pytest.mark.parametrize("disk", ["fast", "slow"])
def test_a_program_that_ends_by_an_exception_loses_no_step_of_a_trainer(tmp_path, disk, scaling, kept):
    command = [sys.executable, "-c", ENDS, str(tmp_path), disk, scaling, kept]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stderr.endswith("MemoryError\n")
    (log,) = tmp_path.glob("*.jsonl")
    assert len(load_run(log).history) == 30


def read_ahead(batches):
    """Batches that another thread reads, two ahead of the loop."""
    read, end = queue.Queue(2), object()

    def read_all():
        for batch in batches:
            read.put(batch)
        read.put(end)

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    yield from iter(read.get, end)
    reader.join()


@pytest.mark.parametrize("peeks", [False, True], ids=["read by a thread", "begun by the loop"])
@pytest.mark.filterwarnings("ignore:amplab.watch")
def test_batches_that_another_thread_reads_ahead_record_every_step_and_leave_nothing(peeks):
    for _ in range(20):
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with watch(model, optimizer, scaler=scaler, loss=F.cross_entropy) as w:
            batches = iter(w.batches(BATCHES[:6]))
            first = [next(batches)] if peeks else []
            for x, y in itertools.chain(first, read_ahead(batches)):
                optimizer.zero_grad()
                scaler.scale(w.loss(F.cross_entropy(model(x), y))).backward()
                scaler.step(optimizer)
                scaler.update()
        assert [record.step for record in w.history.records()] == list(range(6))
        assert _get_current_dispatch_mode_stack() == []
        assert not any(each._backward_hooks for each in model.parameters())
        assert [text.split(" is read in another thread")[0] for text in w.failures] == ["w.batches(loader)"]
