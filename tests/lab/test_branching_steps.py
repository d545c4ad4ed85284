"""A step that takes one of two branches, by what code keeps or draws: the branch that ran is blamed, or none."""

import dataclasses
import random
import warnings

import numpy as np
import pytest
import torch
from own_models import registered
from torch import nn

import amplab
from amplab.lab import Experiment

KINDS = ("attribute", "list", "python", "numpy", "own torch", "own python", "own numpy", "bound", "closure")
CALLS = {"number": 0}


class Branching(nn.Module):
    """Overflows in a product or in a square; notes in `ran` which."""

    def __init__(self, kind, ran):
        super().__init__()
        self.a, self.b, self.kind, self.ran = nn.Linear(4, 1), nn.Linear(4, 1), kind, ran
        self.calls, self.listed = 0, [0]
        self.torchs, self.pythons, self.numpys = (
            torch.Generator().manual_seed(1),
            random.Random(1),
            np.random.default_rng(1),
        )
        self.bound = random.Random(2).random
        with torch.no_grad():
            for each in self.parameters():
                each.fill_(1e3)

    def chosen(self):
        if self.kind == "attribute":
            self.calls += 1
            return self.calls % 2
        if self.kind == "list":
            self.listed[0] += 1
            return self.listed[0] % 2
        if self.kind == "closure":
            CALLS["number"] += 1
            return CALLS["number"] % 2
        drawn = {
            "python": random.random,
            "numpy": np.random.rand,
            "own torch": lambda: torch.rand((), generator=self.torchs).item(),
            "own python": self.pythons.random,
            "own numpy": self.numpys.random,
            "bound": self.bound,
        }
        return drawn[self.kind]() < 0.5

    def forward(self, x):
        is_product = self.chosen()
        self.ran.append("mul" if is_product else "square")
        if is_product:
            return (self.a(x).float().half() * 1000).float()
        return self.b(x).float().half().square().float()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    CALLS["number"] = 0


@pytest.mark.parametrize("by", ["loss", "step"])
@pytest.mark.parametrize("make_scaler", [amplab.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_blames_the_branch_that_ran(kind, make_scaler, by):
    ran, seen = [], []
    model = Branching(kind, ran)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), make_scaler("cpu", init_scale=1.0)
    criterion = torch.mean
    given = {"loss": lambda output: criterion(output.square())} if by == "loss" else {}
    given |= {"step": lambda x: criterion(model(x).square())} if by == "step" else {}
    with warnings.catch_warnings(action="ignore"), amplab.watch(model, optimizer, scaler=scaler, **given) as w:
        for x in w.batches([torch.rand(8, 4) * 1e-4] * 8):
            optimizer.zero_grad()
            loss = w.loss(criterion(model(x).square()))
            seen.append(ran[-1])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    blamed = {step: each.op for step, each in w.history.explanations.items()}
    assert blamed[0] == seen[0]
    assert {step: seen[step] for step, op in blamed.items() if op} == {step: op for step, op in blamed.items() if op}
    assert sum(map(bool, blamed.values())) >= len(blamed) - 1  # one may be left out, after which more is kept
    assert len(ran) == len(seen)  # what a rerun notes is taken back


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "closure"])  # of which a lab knows nothing
def test_the_lab_blames_the_branch_that_ran_also_later(kind):
    ran, seen, blamed = [], [], {}
    data = [torch.rand(8, 4) * 1e-4 for _ in range(8)]
    config = registered(Branching(kind, ran), data, loss=lambda output, x: output.square().mean())
    experiment = Experiment(dataclasses.replace(config, init_scale=1.0, min_loss_scale=None))
    own = experiment.model.ran
    for step in range(6):
        before = len(own)
        assert experiment.step().skipped
        seen.append(own[before])
        found = experiment.explain_skip()
        assert found is not None
        assert found.record.op == seen[step]
        assert len(own) == before + 1
    kept = experiment.past_skips.steps
    for step in kept:
        beside = Experiment(experiment.config)
        beside.become(experiment.past_skips.get(step))
        blamed[step] = beside.explain_skip().record.op
    assert blamed == {step: seen[step] for step in kept}
    assert kept or kind in ("own torch", "own python", "own numpy", "bound")  # a checkpoint has no generators


def scaled(model, batch):
    """Writes to its batch: in place, and its label is taken out."""
    x = batch.pop("x").div_(255.0)
    return model(x).half().float().square().mean()


@pytest.mark.parametrize("make_scaler", [amplab.GradScaler, torch.amp.GradScaler])
def test_a_batch_that_the_loop_writes_to_is_as_without_a_watch(make_scaler):
    def trained(watched):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.fill_(1e5)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), make_scaler("cpu", init_scale=1.0)
        data = [{"x": torch.rand(8, 4) * 255} for _ in range(3)]
        tensors = [each["x"] for each in data]
        w = amplab.watch(model, optimizer, scaler=scaler, step=lambda batch: scaled(model, batch))
        with w, warnings.catch_warnings(action="ignore"):
            for batch in w.batches(data) if watched else data:
                optimizer.zero_grad()
                loss = scaled(model, batch)
                scaler.scale(w.loss(loss) if watched else loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return data, tensors, w

    data, tensors, w = trained(True)
    expected, unwatched, _ = trained(False)
    assert data == expected == [{}, {}, {}]
    for one, other in zip(tensors, unwatched, strict=True):
        assert torch.equal(one, other)
    assert w.history.skip_count == 3
    assert all("batch was written to" in each.sentence for each in w.history.explanations.values())


class Ahead:
    """Reads one batch ahead of the loop, in its thread."""

    def __init__(self, batches):
        self.batches = iter(batches)
        self.waiting = next(self.batches, None)

    def __iter__(self):
        while (batch := self.waiting) is not None:
            self.waiting = next(self.batches, None)
            yield batch


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler("cpu", init_scale=128.0), None])
def test_a_reader_that_is_one_batch_ahead_is_told_instead_of_a_reason(scaler):
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [(torch.randn(4, 8), torch.arange(4) % 3) for _ in range(8)]
    data[4][0][:] = 1e5 if scaler else float("nan")

    def loss_of(batch):
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    w = amplab.watch(model, optimizer, scaler=scaler, step=loss_of)
    with warnings.catch_warnings(action="ignore"), w:
        for batch in Ahead(w.batches(data)):
            optimizer.zero_grad()
            loss = w.loss(loss_of(batch))
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    assert "one batch ahead" in w.history.explanations[4].sentence


@pytest.mark.parametrize("gives", [True, False], ids=["after w.loss", "before w.loss"])
@pytest.mark.parametrize("make_scaler", [amplab.GradScaler, torch.amp.GradScaler])
def test_a_skip_is_not_explained_by_a_batch_that_the_loop_has_dropped(make_scaler, gives):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), make_scaler("cpu", init_scale=2.0**10)
    data = [torch.full((4, 4), float("nan") if number == 3 else 0.5) for number in range(6)]

    def loss_of(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().square().mean()

    with amplab.watch(model, optimizer, scaler=scaler, step=loss_of) as w:
        for number, x in enumerate(w.batches(data)):
            optimizer.zero_grad()
            if number == 4:
                scaler.update(2.0**30)
            loss = loss_of(x)
            if gives:
                w.loss(loss)
            if not loss.isfinite():
                continue
            scaler.scale(loss if gives else w.loss(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
    kinds = {each.kind for each in w.history.explanations.values()}
    assert kinds == {"scale"}


def test_a_large_tensor_that_a_step_writes_by_data_is_as_without_a_watch():
    def trained(step_is_known):
        torch.manual_seed(0)
        model, bank = nn.Linear(4, 1), torch.zeros(2**20)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amplab.GradScaler("cpu", init_scale=2.0**30)

        def step(x):
            bank.data[0] += 1
            with torch.autocast("cpu", dtype=torch.float16):
                return model(x).float().square().mean()

        with amplab.watch(model, optimizer, scaler=scaler, step=step if step_is_known else None) as w:
            for x in w.batches(torch.ones(4, 2, 4)):
                optimizer.zero_grad()
                scaler.scale(w.loss(step(x))).backward()
                scaler.step(optimizer)
                scaler.update()
        return bank[0].item(), w.history.explanations

    (known, explanations), (unknown, _) = trained(True), trained(False)
    assert explanations
    assert known == unknown == 4
