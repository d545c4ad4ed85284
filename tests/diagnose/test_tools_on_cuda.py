"""The tools on a GPU: they find what was planted there, and the program goes on as without them, to the bit."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.policies import PrecisionPolicy, apply_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HALF = torch.float16


class Net(nn.Module):
    """A layer of `size` ones, which sum to more than half's 65504 for large inputs, and dropout."""

    def __init__(self, size=16):
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(size, 32), nn.Dropout(0.3), nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.norm(self.drop(torch.relu(self.first(x)))))


def network():
    torch.manual_seed(0)
    return Net().cuda()


def batch(step=0, factor=1.0):
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(0, 4, (32,), generator=generator)
    return (torch.randn(32, 16, generator=generator) * factor + y[:, None]).cuda(), y.cuda()


def loss_of(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).float(), y)


def half_loss_of(model, batch):
    with amplab.autocast("cuda", dtype=HALF):
        return loss_of(model, batch)


TOOLS = {
    "none": lambda model, optimizer, scaler: None,
    "xray": lambda model, optimizer, scaler: amplab.xray(model, batch(), step=loss_of, opt_level="O1", stats=True),
    "xray O2": lambda model, optimizer, scaler: amplab.xray(model, batch(), step=loss_of, opt_level="O2"),
    "first_nonfinite": lambda model, optimizer, scaler: amplab.first_nonfinite(
        model, batch(factor=1e6), step=loss_of, opt_level="O1"
    ),
    "gradient_range": lambda model, optimizer, scaler: amplab.gradient_range(model, batch(), step=loss_of),
    "twin": lambda model, optimizer, scaler: amplab.twin(model, batch(), step=loss_of, steps=2),
    "ladder": lambda model, optimizer, scaler: amplab.ladder(model, [batch()], step=loss_of, steps=8),
    "doctor": lambda model, optimizer, scaler: amplab.doctor(model, batch(), step=loss_of, opt_level="O1"),
    "doctor's rehearsal": lambda model, optimizer, scaler: amplab.doctor(
        model,
        batch(),
        step=loss_of,
        train_step=lambda model, batch: iteration(model, optimizer, scaler, batch),
        optimizer=optimizer,
        scaler=scaler,
    ),
}


def iteration(model, optimizer, scaler, batch):
    optimizer.zero_grad()
    loss = half_loss_of(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def run(tool, where):
    model, scaler = network(), amplab.GradScaler("cuda", init_scale=2.0**20, growth_interval=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    for step in range(8):
        if step == 4 and where == "before":
            tool(model, optimizer, scaler)
        iteration(model, optimizer, scaler, batch(step))
    state = [*model.state_dict().values(), *(value for each in optimizer.state.values() for value in each.values())]
    return [*state, *(param.grad for param in model.parameters()), torch.rand(3, device="cuda"), torch.rand(3)]


@pytest.mark.parametrize("name", TOOLS)
def test_a_program_goes_on_as_without_the_tool(built, name):
    expected, found = run(TOOLS["none"], "before"), run(TOOLS[name], "before")
    assert all(map(torch.equal, found, expected))


def seen_in(seen, name, module, inputs, output):
    seen[name] = output.dtype


def test_the_dtypes_are_those_of_torchs_autocast(built):
    seen = {}
    model = network()
    for name, module in model.named_children():
        module.register_forward_hook(partial(seen_in, seen, name))
    with torch.autocast("cuda", dtype=HALF):
        loss_of(model, batch())
    rows = amplab.xray(network(), batch(), step=loss_of, autocast=torch.autocast("cuda", dtype=HALF)).rows()
    told = {row["module"]: row["outputs"][0] for row in rows if row["phase"] == "forward" and row["module"]}
    for name, dtype in seen.items():
        assert f"torch.{told[name].partition('[')[0]}" == str(dtype)


def test_the_first_overflow_on_the_gpu_is_found(built):
    found = amplab.first_nonfinite(network(), batch(factor=1e6), step=loss_of, opt_level="O1")
    assert found is not None
    assert "in first" in str(found)
    assert amplab.first_nonfinite(network(), batch(factor=1e6), step=loss_of, opt_level="O0") is None


def test_gradients_lose_in_half_what_they_lose_on_the_cpu(built):
    model = network().eval()
    on_gpu = amplab.gradient_range(model, batch(), step=loss_of)
    x, y = batch()
    on_cpu = amplab.gradient_range(network().eval().cpu(), (x.cpu(), y.cpu()), step=loss_of)
    assert [row["largest_fit"] for row in on_gpu.rows()] == [row["largest_fit"] for row in on_cpu.rows()]


def watched():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = amplab.GradScaler("cuda", init_scale=2.0**10)
    with amplab.watch(model, optimizer, scaler=scaler, step=half_loss_of) as w:
        for x, y in w.batches([batch(step, factor=1e6) for step in range(12)]):
            optimizer.zero_grad()
            loss = half_loss_of(model, (x, y))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return w


def test_a_watch_finds_the_layer_that_overflows_on_the_gpu(built):
    w = watched()
    assert len(w.history) == 12
    assert "in first" in str(w.findings())


def test_a_clean_watched_loop_has_the_bits_of_the_bare_one(built):
    def train(observe):
        model = network()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), amplab.GradScaler("cuda")
        data = [batch(step) for step in range(60)]
        if not observe:
            for each in data:
                iteration(model, optimizer, scaler, each)
        else:
            with amplab.watch(model, optimizer, scaler=scaler, step=half_loss_of) as w:
                for each in w.batches(data):
                    iteration(model, optimizer, scaler, each)
            assert len(w.history) == 60
        return [*model.state_dict().values(), torch.rand(3, device="cuda")]

    assert all(map(torch.equal, train(True), train(False)))


def test_a_float32_rule_on_the_layers_that_overflow_saves_the_run(built):
    def train(rules):
        model = network()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amplab.GradScaler("cuda")
        skipped, policy = 0, PrecisionPolicy("torch_cuda", module_rules=rules)
        for step in range(20):
            optimizer.zero_grad()
            with apply_policy(policy, model):
                loss = loss_of(model, batch(step, factor=1e6))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            skipped += not scaler.last_step.stepped
            scaler.update()
        return skipped

    assert train({}) == 20
    assert train({"first": "float32", "drop": "float32", "norm": "float32"}) < 10
