"""A watch finds, in the loop as it runs, faults that never turn non-finite; healthy twins have none."""

import contextlib
import copy
import os
import signal
import subprocess
import sys
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import amplab
from amplab import amp
from amplab.diagnose.train_step.loop_recorder import LoopRecorder
from amplab.lab import step_look, watch
from amplab.policies.casting.function_modes import function_modes
from amplab.trace import optimizer_hooks

STEPS = 8


class Rms(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4)


def network(middle=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), middle(), nn.Linear(32, 1))


def autocast_loss(model, x):
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    return F.mse_loss(out.float().flatten(), x.mean(1) + 3)


def batches(size=8):
    torch.manual_seed(1)
    return [torch.randn(size, 16) for _ in range(STEPS)]


class Loop:
    """A loop whose steps are one of the methods; `broken` is the fault, else the loop is healthy."""

    def __init__(self, name, *, broken, kind=torch.amp.GradScaler):
        self.name, self.broken = name, broken
        halves = name == "large squares" or (name == "lost updates" and broken)
        self.model = network(Rms) if name == "large squares" else network()
        if name == "large squares":
            nn.init.constant_(self.model[0].bias, 300.0 if broken else 1.0)
        self.model = self.model.half() if halves else self.model
        self.loss_scale = 2.0**-30 if name == "underflow" else 1.0
        unscaled = name in ("large squares", "lost updates") or (name == "underflow" and broken)
        self.scaler = None if unscaled else kind("cpu", init_scale=2.0**40 if name == "underflow" else 2.0**10)
        rate = {"lost updates": 1e-6, "stepped scaled": 1e-6}.get(name, 0.01)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        self.average = copy.deepcopy(self.model).float()
        if name == "half average" and broken:
            self.average.half()

    def loss(self, x):
        if self.name in ("large squares", "lost updates"):
            dtype = next(self.model.parameters()).dtype
            return (self.model(x.to(dtype)).float().flatten() - x.mean(1)).square().mean()
        return autocast_loss(self.model, x) * self.loss_scale

    def step(self, x, noted):
        parts = x.chunk(4) if self.name in ("early", "zeroed") else [x]
        self.optimizer.zero_grad()
        for number, part in enumerate(parts):
            if self.name == "zeroed" and self.broken:
                self.optimizer.zero_grad()
            loss = noted(self.loss(part))
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if self.name == "early" and number == (0 if self.broken else len(parts) - 1):
                self.scaler.unscale_(self.optimizer)
        if self.name == "clips":
            if not self.broken:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if self.scaler is None or (self.name == "stepped scaled" and self.broken):
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.mul_(0.999).add_(now.to(mean.dtype), alpha=0.001)

    def run(self, *, watched=True, in_batches=True, steps=None):
        """Train; return the watch, or None if nothing watches."""
        if not watched:
            for x in batches(16):
                self.step(x, lambda loss: loss)
            return None
        with watch(self.model, self.optimizer, scaler=self.scaler) as w:
            data = batches(16) if steps is None else batches(16) * steps
            for x in w.batches(data) if in_batches else data:
                self.step(x, w.loss)
        assert w.failures == ()
        return w


FAULTS = {
    "clips": "clips-scaled-gradients",
    "stepped scaled": "stepped-with-scaled-gradients",
    "lost updates": "updates-rounded-away",
    "large squares": "overflow-in-half",
    "underflow": "gradients-underflow",
    "early": "unscaled-too-early",
    "zeroed": "zero-grad-in-accumulation",
    "half average": "average-in-half",
}
OF_VALUES = ("large squares", "underflow")


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_finite_is_found_and_its_twin_has_none(name, kind):
    if (name, kind) == ("early", amplab.GradScaler):  # amplab's scaler refuses the step itself
        with pytest.raises(RuntimeError, match="was unscaled, and then a backward of a scaled loss has added to it"):
            Loop(name, broken=True, kind=kind).run()
    else:
        found = Loop(name, broken=True, kind=kind).run().findings()
        assert found[0].name == FAULTS[name], str(found)
        assert found[0].severity in ("error", "warning")
    healthy = Loop(name, broken=False, kind=kind).run().findings()
    assert not healthy.harmful, str(healthy.harmful)


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in OF_VALUES])
def test_what_happens_to_gradients_is_seen_without_the_batches_too(name):
    assert Loop(name, broken=True).run(in_batches=False).findings()[0].name == FAULTS[name]
    assert not Loop(name, broken=False).run(in_batches=False).findings().harmful


def test_a_step_past_the_scaler_with_gradients_that_overflow_is_found():
    """The first step already ends in NaN: no second one shows the ratio of the norms."""
    loop = Loop("stepped scaled", broken=True)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    assert loop.run().findings()[0].name == "stepped-with-scaled-gradients"


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_the_results_are_those_of_the_unwatched_loop(name, broken):
    watched, plain = Loop(name, broken=broken), Loop(name, broken=broken)
    watched.run()
    plain.run(watched=False)
    for one, other in ((watched.model, plain.model), (watched.average, plain.average)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_first_step_that_overflows_is_followed_by_another_look():
    loop = Loop("clips", broken=True)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    w = loop.run()
    assert w.history.skip_count > 0
    assert w.findings()[0].name == "clips-scaled-gradients"


def test_a_fault_that_begins_later_is_found_by_a_later_look(monkeypatch):
    monkeypatch.setattr(step_look, "_EVERY", 10)
    loop = Loop("clips", broken=False)
    with watch(loop.model, loop.optimizer, scaler=loop.scaler) as w:
        for number, x in enumerate(w.batches(batches(16) * 3)):
            loop.broken = number >= 5
            loop.step(x, w.loss)
    (found,) = w.findings().named("clips-scaled-gradients")
    assert found.evidence["first_step"] == 10


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_session_is_looked_at_too(level):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, dynamic_init_scale=2.0**10)
    try:
        with watch(model, optimizer, scaler=amp) as w:
            for x in w.batches(batches()):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x).float().flatten(), x.mean(1) + 3)
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
    finally:
        amp.reset()
    assert w.findings()[0].name == "clips-scaled-gradients"


def test_a_limit_that_follows_the_scale_is_healthy():
    loop = Loop("clips", broken=True)
    with watch(loop.model, loop.optimizer, scaler=loop.scaler) as w:
        for x in w.batches(batches()):
            loop.optimizer.zero_grad()
            loop.scaler.scale(w.loss(loop.loss(x))).backward()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1 * loop.scaler.get_scale())
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
    assert not w.findings().harmful


@pytest.mark.parametrize("ends", ["break", "raise", "open"])
def test_nothing_stays_on_however_the_loop_ends(ends):
    loop = Loop("clips", broken=False)
    ending = pytest.raises(KeyboardInterrupt) if ends == "raise" else warnings.catch_warnings()
    with ending, watch(loop.model, loop.optimizer, scaler=loop.scaler) as w:
        given = w.batches(batches())
        for x in given:
            loop.scaler.scale(w.loss(loop.loss(x))).backward()
            if ends == "raise":
                raise KeyboardInterrupt
            break
        if ends == "break":
            del given
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not any(each._post_accumulate_grad_hooks for each in loop.model.parameters())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in loop.model.modules())
    assert not optimizer_hooks._OBSERVERS.before
    assert not optimizer_hooks._OBSERVERS.after


def test_an_autocast_region_around_the_whole_body_does_no_harm():
    """Its modes begin after those of the look and end before them."""
    loop = Loop("clips", broken=True, kind=amplab.GradScaler)
    with watch(loop.model, loop.optimizer, scaler=loop.scaler) as w:
        for x in batches():
            with amplab.autocast("cpu", dtype=torch.float16), FlopCounterMode(display=False):
                loop.step(x, w.loss)
    assert w.findings()[0].name == "clips-scaled-gradients"
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_what_cannot_be_followed_is_left_alone():
    lstm = nn.LSTM(16, 16)
    optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
    with watch(lstm, optimizer) as w:
        for x in w.batches(batches()):
            w.loss(lstm(x)[0].square().mean()).backward()
            assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
            optimizer.step()
    assert w.failures == ()


def test_where_nothing_is_found_the_watch_says_what_it_looked_at():
    with_batches, without = (str(Loop("clips", broken=False).run(in_batches=each).findings()) for each in (True, False))
    assert with_batches.startswith("nothing found")
    assert "looked at the values of every op of 1 step" in with_batches
    assert "looked at the losses, loss scales and skips of 8 steps" in without
    assert "not looked at: the values of ops; use for batch in w.batches(loader)" in without


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("kind", [FlopCounterMode, CommDebugMode, DebugMode])
@pytest.mark.parametrize("with_batches", [False, True])
def test_a_mode_of_the_loop_around_each_step_ends_with_its_block(kind, with_batches):
    """Such a block takes the topmost mode off: that of a look, if the look began in it."""
    model, options = nn.Linear(8, 1), {"display": False} if kind is FlopCounterMode else {}
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    batches = [torch.full((8, 8), 30.0)] * 6
    with watch(model, optimizer, scaler=scaler) as w:
        loader = iter(w.batches(batches) if with_batches else batches)
        for _ in batches:
            with kind(**options):
                batch = next(loader)
                optimizer.zero_grad()
                scaler.scale(w.loss(model(batch).square().mean())).backward()
                scaler.step(optimizer)
                scaler.update()
    assert w.history.skip_count > 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_a_look_begins_within_modes_that_were_there_before_the_loop():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with FlopCounterMode(display=False), torch.device("cpu"), watch(model, optimizer) as w:
        for batch in w.batches([torch.ones(8, 8)] * 3):
            optimizer.zero_grad()
            w.loss(model(batch).square().mean()).backward()
            optimizer.step()
    assert "looked at the values of every op of 1 step" in str(w)
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("tool", ["xray", "first_nonfinite", "gradient_range", "doctor"])
@pytest.mark.parametrize("at", [-1, 0, 2])
@pytest.mark.parametrize("around", [False, True])
def test_a_tool_that_raises_in_a_watched_loop_leaves_no_mode_of_a_look(tool, at, around):
    """It ends the look, whose mode was on when the tool began."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def look(step):
        if step == at:
            with contextlib.suppress(RuntimeError):
                getattr(amplab, tool)(model, torch.ones(4, 9), loss=lambda output: output.mean())

    outer = FlopCounterMode(display=False) if around else contextlib.nullcontext()
    with outer, watch(model, optimizer) as w:
        look(-1)
        for step, batch in enumerate(w.batches([torch.ones(4, 8)] * 4)):
            optimizer.zero_grad()
            w.loss(model(batch).square().mean()).backward()
            optimizer.step()
            look(step)
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert not [name for name, on in vars(torch.utils._python_dispatch).items() if name.startswith("_is_in") and on]
    assert (len(w.history), w.failures) == (4, ())


class Modes(torch.utils.data.Dataset):
    """Each item is the number of modes on the thread of the worker that reads it."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        flags = [name for name, on in vars(torch.utils._python_dispatch).items() if name.startswith("_is_in") and on]
        return torch.full(
            (8,), float(len(stack) + len(torch.overrides._get_current_function_mode_stack()) + len(flags))
        )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("begins", ["in the watch", "in batches"])
def test_workers_of_a_loader_have_no_mode_of_a_look(begins):
    loader = DataLoader(Modes(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer) as w:
        given = w.batches(loader) if begins == "in batches" else w.batches(iter(loader))
        for batch in given:
            assert batch.sum().item() == 0
            optimizer.zero_grad()
            w.loss(model(batch).square().mean()).backward()
            optimizer.step()
    assert len(w.history) == 4
    assert "looked at the gradients of 1 step" in str(w)


IN_THE_LOOP = {
    "fake tensors": lambda model: fake_product(),
    "make_fx": lambda model: make_fx(lambda x: x.sin() * 2)(torch.ones(3)),
    "torch.export of another model": lambda model: torch.export.export(nn.Linear(8, 1), (torch.ones(1, 8),)),
    "torch.export of the model": lambda model: torch.export.export(model, (torch.ones(1, 8),)),
    "torch.jit.trace": lambda model: torch.jit.trace(nn.Linear(8, 1), torch.ones(1, 8)),
    "vmap of grad": lambda model: torch.vmap(torch.func.grad(lambda x: x.sin().sum()))(torch.ones(3, 2)),
}


def fake_product():
    with FakeTensorMode():
        return torch.empty(3, 3) @ torch.empty(3, 3)


TRACES = """
import sys, warnings
import test_step_look
warnings.simplefilter("ignore")
print(test_step_look.steps_with(*sys.argv[1:]))
"""


def steps_with(what, where):
    """Watch three steps, with something else of torch before or after each."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer) as w:
        for batch in w.batches([torch.ones(2, 8)] * 3):
            if where == "before":
                IN_THE_LOOP[what](model)
            optimizer.zero_grad()
            w.loss(model(batch).square().mean()).backward()
            optimizer.step()
            if where == "after":
                IN_THE_LOOP[what](model)
    return len(w.history)


@pytest.mark.parametrize(
    ("what", "where"), [*((what, "before") for what in IN_THE_LOOP), ("torch.export of the model", "after")]
)
def test_tracers_of_torch_work_in_a_watched_loop(what, where):
    """An error in an op of a tracer ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", TRACES, what, where],
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_the_look_at_a_step_of_many_ops_looks_up_the_gradients_a_few_times(monkeypatch):
    """Else its time grows with the square of the number of parameters."""
    looked_up = []
    stepped_params = LoopRecorder._stepped_params
    monkeypatch.setattr(LoopRecorder, "_stepped_params", lambda self: looked_up.append(0) or stepped_params(self))
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(40)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with watch(model, optimizer) as w:
        for x in w.batches([torch.ones(2, 4)] * 2):
            optimizer.zero_grad()
            w.loss(model(x).square().mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
    assert "looked at the gradients of 1 step: unscaling, clipping, updates" in w.findings().looked_at
    assert 0 < len(looked_up) < 20, "the step has more than 500 ops that write in place"


def in_a_block(step, batch):
    with torch.inference_mode(mode=False):
        step(batch)


def off_in_a_block(step, batch):
    with torch.inference_mode(), torch.inference_mode(False):
        step(tuple(each.clone() for each in batch))


def after_a_block(step, batch):
    with torch.inference_mode():
        batch[0].sum()
    step(batch)


def watched_or_not(is_watched, model, optimizer):
    return amplab.watch(model, optimizer) if is_watched else contextlib.nullcontext()


@pytest.mark.parametrize("around", [in_a_block, off_in_a_block, after_a_block])
@pytest.mark.parametrize("with_batches", [True, False])
@pytest.mark.parametrize("next_in_block", [True, False])
def test_blocks_of_inference_mode_end_as_without_a_watch(around, with_batches, next_in_block):
    """A look may end within a block that began after it, whose end restores that there is a mode."""

    def trained(is_watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(6)]

        def step(batch):
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch[0]), batch[1])
            if is_watched and not with_batches:
                w.loss(loss)
            loss.backward()
            optimizer.step()

        with watched_or_not(is_watched, model, optimizer) as w:
            source = iter(w.batches(data) if is_watched and with_batches else data)
            for _ in data:
                with torch.inference_mode() if next_in_block else contextlib.nullcontext():
                    batch = next(source)
                around(step, batch)
        assert _get_current_dispatch_mode_stack() == []
        return [*model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


class Rounds(torch.optim.SGD):
    """Draws a random number for each weight in its step, as stochastic rounding does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.add_(torch.rand_like(param), alpha=1e-3)
        return super().step(closure)


@pytest.mark.parametrize("with_batches", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, partial(torch.optim.AdamW, eps=1e-3), Rounds])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_of_the_program_runs_twice(dtype, kind, with_batches):
    """Not a mask of dropout, whose numbers come from the generator, nor a step, nor a hook on all optimizers."""
    counted = []

    def trained(is_watched):
        torch.manual_seed(0)
        own = torch.Generator().manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).to(dtype)
        optimizer = kind(model.parameters(), lr=0.1)
        average, total = torch.zeros(8, 8, dtype=dtype), torch.zeros(8, 8, dtype=torch.float64)
        count = torch.zeros(8, 8, dtype=torch.int64)
        with watched_or_not(is_watched, model, optimizer) as w:
            data = [torch.randn(8, 8).to(dtype) for _ in range(4)]
            for x in w.batches(data) if is_watched and with_batches else data:
                optimizer.zero_grad()
                loss = model(x + torch.empty(8, 8, dtype=dtype).normal_(generator=own)).float().square().mean()
                if is_watched and not with_batches:
                    w.loss(loss)
                loss.backward()
                optimizer.step()
                torch._foreach_add_([average, total, count], 1)
        return [*model.parameters(), average, total, count, torch.rand(3), torch.rand(3, generator=own)]

    hook = register_optimizer_step_post_hook(lambda *_: counted.append(1))
    try:
        plain = trained(False)
        expected, counted[:] = len(counted), []
        assert all(map(torch.equal, trained(True), plain))
        assert len(counted) == expected
    finally:
        hook.remove()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("with_batches", [True, False])
def test_a_fast_path_of_torch_is_taken_as_without_a_watch(with_batches, masked):
    """A teacher in eval mode: with a function mode torch takes another path, which rounds, and pads, differently."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def losses(is_watched):
        torch.manual_seed(0)
        teacher = nn.TransformerEncoder(copy.deepcopy(layer), 2).eval()
        model = nn.Linear(8, 8)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        mask = torch.tensor([[False, False, True]]).expand(4, 3) if masked else None
        with watched_or_not(is_watched, model, optimizer) as w:
            data = [torch.randn(4, 3, 8) for _ in range(3)]
            for x in w.batches(data) if is_watched and with_batches else data:
                with torch.no_grad():
                    target = teacher(x, src_key_padding_mask=mask)
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), target)
                found.append(loss.item())
                loss.backward()
                optimizer.step()
        return found

    assert losses(True) == losses(False)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_look_reads_a_step_in_forward_mode_and_leaves_it():
    """It has tangents without memory."""

    def trained(is_watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [torch.randn(5, 4) for _ in range(3)]
        with watched_or_not(is_watched, model, optimizer) as w:
            for x in w.batches(data) if is_watched else data:
                optimizer.zero_grad()
                torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().mean().backward()
                optimizer.step()
        return [*model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_a_teacher_in_another_thread_ends_no_look():
    """Its forward would end the modes in the thread that runs it."""
    model, teacher = nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amplab.watch(model, optimizer) as w:
        for x in w.batches([torch.randn(4, 3, 8) for _ in range(3)]):
            serving = threading.Thread(target=teacher, args=(x,))
            serving.start()
            serving.join()
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert function_modes() == []
    assert "looked at the values of every op of 1 step" in str(w.findings())


def test_an_op_of_others_that_writes_an_average_runs_once():
    dtypes = []

    @torch.library.custom_op("amplab_tests::average", mutates_args={"average"})
    def average(average: torch.Tensor, weight: torch.Tensor) -> None:
        dtypes.append(average.dtype)
        average.lerp_(weight, 0.5)

    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(4, 4, dtype=torch.bfloat16)
    with amplab.watch(model, optimizer) as w:
        for x in w.batches([torch.randn(2, 4, dtype=torch.bfloat16) for _ in range(3)]):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                average(kept, model.weight)
    assert dtypes == [torch.bfloat16] * 3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*:torch.jit.TracerWarning")
@pytest.mark.parametrize("has_batches", [True, False])
@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("at", ["before the step", "after the step"])
def test_a_model_that_is_traced_in_a_looked_at_step_computes_what_it_computes(at, with_grad, has_batches):
    """Under a dispatch mode the tracer records the result of a convolution as a constant, or raises."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 1))
    optimizer, exported = torch.optim.SGD(model.parameters(), lr=0.01), []
    data, other = [torch.randn(2, 1, 5, 5) for _ in range(4)], torch.randn(2, 1, 5, 5)

    def export(x):
        with torch.set_grad_enabled(with_grad):
            traced = torch.jit.trace(model, x, check_trace=False)
            exported.append((traced(other).detach(), model(other).detach()))

    with amplab.watch(model, optimizer) as w:
        for x in w.batches(data) if has_batches else data:
            optimizer.zero_grad()
            w.loss(model(x).square().mean()).backward()
            if at == "before the step" and len(exported) < 2:
                export(x)
            optimizer.step()
            if at == "after the step" and len(exported) < 2:
                export(x)
    assert all(torch.equal(*pair) for pair in exported)
    assert not w.failures
    assert len(w.history) == 4
    assert "looked at the gradients of 1 step" in str(w.findings())


@pytest.mark.parametrize("has_batches", [True, False])
@pytest.mark.parametrize(("gives_up", "accumulates"), [(True, False), (False, True)])
def test_an_iteration_that_is_given_up_is_no_accumulation(gives_up, accumulates, has_batches):
    """Its gradients are dropped once; a loop that accumulates, and drops them, does so in every step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = [torch.full((4, 4), 1000.0), *torch.randn(7, 4, 4)]
    with watch(model, optimizer) as w:
        for number, x in enumerate(w.batches(data) if has_batches else data):
            optimizer.zero_grad()
            w.loss(model(x).square().mean()).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            if (gives_up and norm > 1000) or (accumulates and number % 2 == 0):
                continue
            optimizer.step()
    assert [each.name for each in w.findings()] == (["zero-grad-in-accumulation"] if accumulates else [])


@pytest.mark.parametrize("look", ["_LoopLook", "_ValueLook"])
def test_an_interrupt_where_the_hook_of_a_look_is_registered_leaves_none(look):
    """As Ctrl-C comes: at the return of torch's function, before the line that keeps its handle."""
    model = nn.Linear(4, 1)
    optimizer, before, fired = torch.optim.SGD(model.parameters(), lr=0.1), len(_global_forward_pre_hooks), []

    def trace(frame, _event, _argument):
        if frame.f_code.co_name != "register_module_forward_pre_hook" or fired:
            return None
        owners = [each.f_locals.get("self") for each in (frame.f_back.f_back, frame.f_back.f_back.f_back)]
        if look not in [type(each).__name__ for each in owners]:
            return None

        def end(_frame, event, _argument):
            if event == "return":
                fired.append(look)
                signal.raise_signal(signal.SIGINT)
            return end

        return end

    def loop():
        with watch(model, optimizer) as w:
            for x in w.batches(torch.randn(3, 4, 4)):
                w.loss(model(x).square().mean()).backward()
                optimizer.step()

    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            loop()
    finally:
        sys.settrace(None)
    assert fired == [look]
    assert len(_global_forward_pre_hooks) == before
