"""Whole trainings on a GPU: apex's levels, torch's names, a compiled model, a captured graph, few synchronizations."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.optimizers import FusedAdam, FusedLAMB, FusedSGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]
HALF = torch.float16


def moved(problem):
    problem.inputs, problem.labels = problem.inputs.cuda(), problem.labels.cuda()
    return problem


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4)]
    return nn.Sequential(*layers).cuda()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    labels = [torch.randint(0, 4, (32,), generator=generator) for _ in range(count)]
    images = [torch.randn(32, 1, 8, 8, generator=generator) + each[:, None, None, None] for each in labels]
    return [(x.cuda(), y.cuda()) for x, y in zip(images, labels, strict=True)]


@contextlib.contextmanager
def synchronizations():
    """Count where the host waits for the device, by the lines that torch's warnings name."""
    found = []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [
                f"{each.filename}:{each.lineno}" for each in caught if "called a synchronizing" in str(each.message)
            ]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, FusedSGD, FusedAdam, FusedLAMB])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_level_trains(built, problem, session, level, kind):
    moved(problem)
    model = problem.model(batch_norm=level != "O3").cuda()
    rate = 0.1 if "SGD" in kind.__name__ else 0.01
    optimizer = kind(model.parameters(), lr=rate, **({"eps": 1e-4} if kind is torch.optim.Adam else {}))
    model, optimizer = session.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = problem.train(session, model, optimizer, range(60))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert {param.device.type for param in model.parameters()} == {"cuda"}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_torchs_names_train_to_torchs_bits(built, kind, channels_last):
    def run(autocast, scaler):
        model = network()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        optimizer = kind(model.parameters(), lr=0.01)
        for number, (x, y) in enumerate(batches(30)):
            optimizer.zero_grad()
            with autocast("cuda", dtype=HALF):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if number in (3, 20) else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [*model.state_dict().values()], scaler.get_scale()

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        ours, our_scale = run(amplab.autocast, amplab.GradScaler("cuda", growth_interval=5))
        theirs, their_scale = run(torch.autocast, torch.amp.GradScaler("cuda", growth_interval=5))
        again, _ = run(torch.autocast, torch.amp.GradScaler("cuda", growth_interval=5))
    assert our_scale == their_scale
    if not all(map(torch.equal, theirs, again)):
        pytest.skip("torch's own run does not repeat its bits on this GPU")
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.filterwarnings("ignore")  # of Triton and Inductor
def test_a_compiled_model_trains_under_the_default_backend(built):
    model, scaler = network(), amplab.GradScaler("cuda")
    compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for x, y in batches(30):
        with amplab.autocast("cuda", dtype=HALF):
            out = compiled(x)
            assert out.dtype is HALF
            loss = F.cross_entropy(out, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
def test_a_step_of_the_scaler_waits_for_the_device_once(built, scaler_type):
    """torch's waits once for each step, for found_inf; ours no more often."""
    model, scaler = network(), scaler_type("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (x, y), *_ = batches(1)
    for measured in (False, False, True):
        with synchronizations() if measured else contextlib.nullcontext([]) as found:
            with amplab.autocast("cuda", dtype=HALF):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert len(found) <= 1, found


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD, FusedAdam])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_of_apexs_names_waits_for_the_device_once(built, session, level, kind):
    model = network()
    model, optimizer = session.initialize(model, kind(model.parameters(), lr=0.01), opt_level=level, verbosity=0)
    (x, y), *_ = batches(1)
    with session.casting():
        for measured in (False, False, True):
            with synchronizations() if measured else contextlib.nullcontext([]) as found:
                loss = F.cross_entropy(model(x).float(), y)
                with session.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert len(found) <= 1, found


def test_unscaling_a_scale_update_and_a_step_are_captured_in_a_graph(built):
    from amplab.kernels import adam_, unscale_, update_scale_

    def tensors():
        generator = torch.Generator("cuda").manual_seed(0)
        params = [torch.randn(size, generator=generator, device="cuda") for size in (5, 1030, 70_000)]
        zeros = [[torch.zeros_like(each) for each in params] for _ in range(2)]
        steps = [torch.zeros((), device="cuda") for _ in params]
        scale, tracker = torch.full((1,), 1024.0, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        return params, [torch.randn_like(each) for each in params], *zeros, steps, scale, tracker

    found_inf, inverse = torch.zeros(1, device="cuda"), torch.full((1,), 0.5, device="cuda")

    def step(params, grads, first, second, steps, scale, tracker):
        found_inf.zero_()
        unscale_(grads, found_inf, inverse)
        adam_(params, grads, first, second, steps, lr=0.01, found_inf=found_inf)
        update_scale_(scale, tracker, None, found_inf, 2.0, 0.5, 2)

    torch.manual_seed(5)
    eager = tensors()
    captured = tuple([each.clone() for each in group] if isinstance(group, list) else group.clone() for group in eager)
    for _ in range(4):
        step(*eager)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step(*captured)
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
    for mine, other in zip(captured, eager, strict=True):
        pairs = zip(mine, other, strict=True) if isinstance(mine, list) else [(mine, other)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(built, problem, session, tmp_path):
    def started(seed):
        model = problem.model(seed).cuda()
        return session.initialize(model, FusedAdam(model.parameters()), opt_level="O2", verbosity=0)

    moved(problem)
    model, optimizer = started(0)
    problem.train(session, model, optimizer, range(10))
    amp.save_run_state(tmp_path / "run.pt", model=model, optimizer=optimizer, amp=session)
    problem.train(session, model, optimizer, range(10, 20))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    session.reset()
    model, optimizer = started(1)
    amp.load_run_state(tmp_path / "run.pt", model=model, optimizer=optimizer, amp=session)
    problem.train(session, model, optimizer, range(10, 20))
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
