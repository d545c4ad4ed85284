"""The loss of a record is the sum of the losses of its step, as a loop that keeps a list itself would have it."""

import contextlib
import math

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.lab import load_run, watch
from amplab.lab.scale_probe import NO_STEPS
from amplab.lab.step_losses import NO_LOSSES, GivenLoss, LossSource

SCALERS = {"none": None, "torch": torch.amp.GradScaler, "amplab": amplab.GradScaler}
PARTS = 3  # micro-batches of a step


class Loop:
    """Trains a critic and a generator in turn, and keeps the critic's losses, scales and skips.

    The critic is the first one of the watch. In steps 1 and 4 its first micro-batch has a loss of inf, in step 2
    that of the generator.
    """

    def __init__(self, scaling, *, order="cg", parts=1, updates="once", has_batches=True, gives=True):
        torch.manual_seed(0)
        self.models = {"c": nn.Linear(4, 1), "g": nn.Linear(4, 4)}
        self.optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.01) for name, each in self.models.items()}
        self.scaling, self.order, self.parts, self.updates = scaling, order, parts, updates
        self.has_batches, self.gives = has_batches, gives
        self.scaler = SCALERS[scaling]("cpu", init_scale=64.0) if SCALERS.get(scaling) else None
        self.told = []

    def run(self, **options):
        models, optimizers = list(self.models.values()), list(self.optimizers.values())
        if self.scaling == "apex":
            amp.initialize(models, optimizers, opt_level="O0", loss_scale="dynamic", num_losses=2, verbosity=0)
        try:
            with watch(models[0], optimizers, scaler=self.scaler, **options) as w:
                batches = [torch.randn(self.parts, 8, 4) for _ in range(7)]
                for step, batch in enumerate(w.batches(batches) if self.has_batches else batches):
                    self.step(w, step, batch)
        finally:
            amp.reset()
        return w

    def step(self, w, step, batch):
        for name in self.order:
            optimizer, losses = self.optimizers[name], []
            optimizer.zero_grad()
            scale = self.scale()  # that of the first micro-batch, which may overflow
            for number, x in enumerate(batch):
                loss = self.loss_of(name, x, overflows=number == 0 and step in ((1, 4) if name == "c" else (2,)))
                losses.append(loss.item())
                self.backward(w.loss(loss) if self.gives else loss, name)
            self.take_step(optimizer)
            if name == "c":
                self.told.append((sum(losses), scale, self.scaling != "none" and not math.isfinite(sum(losses))))
        if self.scaler is not None and self.updates == "once":
            self.scaler.update()

    def scale(self):
        """That of the critic."""
        if self.scaling == "apex":
            return amp.default_session().loss_scale(0)
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def loss_of(self, name, x, *, overflows):
        critic, generator = self.models.values()
        loss = critic(x).square().mean() if name == "c" else 100 + critic(generator(x)).square().mean()
        if not overflows:
            return loss
        return loss + math.inf if self.scaling == "none" else loss * math.inf  # the former has finite gradients

    def backward(self, loss, name):
        if self.scaling == "apex":
            with amp.scale_loss(loss, self.optimizers[name], loss_id="cg".index(name)) as scaled:
                scaled.backward()
        else:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def take_step(self, optimizer):
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        if self.updates == "each":
            self.scaler.update()


def recorded(w):
    return [(record.loss, record.loss_scale, record.skipped) for record in w.history.records()]


@pytest.mark.parametrize("has_batches", [True, False], ids=["batches", "no batches"])
@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize("order", ["c", "cg", "gc"])
@pytest.mark.parametrize(
    ("scaling", "updates"),
    [("none", ""), ("apex", ""), ("torch", "once"), ("torch", "each"), ("amplab", "once"), ("amplab", "each")],
)
def test_a_record_has_the_losses_of_the_first_optimizer(scaling, updates, order, parts, has_batches, tmp_path):
    loop = Loop(scaling, order=order, parts=parts, updates=updates, has_batches=has_batches)
    w = loop.run(log=tmp_path)
    assert recorded(w) == loop.told
    assert recorded(load_run(w.log_path)) == loop.told
    assert w.failures == ()


@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize("order", ["c", "cg", "gc"])
@pytest.mark.parametrize(("scaling", "updates"), [("apex", ""), ("amplab", "once"), ("amplab", "each")])
def test_losses_that_only_the_scaler_gets_are_recorded_as_well(scaling, updates, order, parts):
    loop = Loop(scaling, order=order, parts=parts, updates=updates, gives=False)
    assert recorded(loop.run()) == loop.told


@pytest.mark.parametrize("scaling", ["torch", "amplab", "apex"])
@pytest.mark.parametrize("order", ["c", "cg"])
def test_a_loss_of_inf_in_the_first_micro_batch_is_the_cause_of_a_skip(scaling, order):
    found = Loop(scaling, order=order, parts=PARTS).run().findings()
    assert "nonfinite-loss" in [each.name for each in found]
    assert "nonfinite-gradient" not in [each.name for each in found]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("scaling", SCALERS)
def test_one_loss_of_two_optimizers_is_that_of_the_step(scaling, order):
    model, told = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in model]
    scaler = SCALERS[scaling] and SCALERS[scaling]("cpu", init_scale=64.0)
    with watch(model, optimizers, scaler=scaler) as w:
        for x in torch.randn(5, 8, 4):
            model.zero_grad()
            loss = w.loss(model(x).square().mean())
            (scaler.scale(loss) if scaler else loss).backward()
            for place in order:
                scaler.step(optimizers[place]) if scaler else optimizers[place].step()
            if scaler:
                scaler.update()
            told.append(loss.item())
    assert w.history.column("loss").tolist() == told


@pytest.mark.parametrize("scaling", SCALERS)
def test_two_losses_of_one_backward_are_added(scaling):
    model, told = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = SCALERS[scaling]("cpu", init_scale=64.0) if SCALERS[scaling] else torch.amp.GradScaler(enabled=False)
    with watch(model, optimizer, scaler=scaler) as w:
        for x in w.batches(torch.randn(5, 8, 4)):
            optimizer.zero_grad()
            y = model(x)
            loss = w.loss(y.square().mean()) + w.loss(y.abs().mean())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            told.append(loss.item())
    assert w.history.column("loss").tolist() == pytest.approx(told)


class Own(nn.Linear):
    """Returns its loss, as models of transformers do."""

    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}


@pytest.mark.parametrize("gives", [False, True], ids=["output", "output and w.loss"])
@pytest.mark.parametrize("scaling", SCALERS)
def test_losses_in_the_output_of_the_model_are_added(scaling, gives):
    model, told = Own(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = SCALERS[scaling]("cpu", init_scale=64.0) if SCALERS[scaling] else torch.amp.GradScaler(enabled=False)
    with watch(model, optimizer, scaler=scaler) as w:
        for batch in torch.randn(5, PARTS, 8, 4):
            optimizer.zero_grad()
            losses = []
            for x in batch:
                loss = model(x)["loss"]
                loss = w.loss(loss / PARTS) if gives else loss
                losses.append(loss.item())
                scaler.scale(loss).backward()
            with torch.no_grad():
                model(batch[0] * math.nan)
            scaler.step(optimizer)
            scaler.update()
            told.append(sum(losses))
    assert w.history.column("loss").tolist() == told


def test_a_loss_without_a_graph_is_none_of_the_step():
    """As of a validation between two steps."""
    model, told = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer) as w:
        for x in torch.randn(5, 8, 4):
            optimizer.zero_grad()
            loss = w.loss(model(x).square().mean())
            with torch.no_grad():
                w.loss(model(x).square().mean())
            loss.backward()
            optimizer.step()
            told.append(loss.item())
    assert w.history.column("loss").tolist() == told


def test_the_first_loss_of_a_closure_is_that_of_the_step():
    """LBFGS computes its step from several; the first one is of the weights before the step."""
    model, x, told = nn.Linear(4, 1), torch.randn(8, 4), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with watch(model, optimizer) as w:

        def closure():
            optimizer.zero_grad()
            loss = w.loss((model(x) - 1).square().mean())
            loss.backward()
            return loss

        for _ in range(4):
            told.append((model(x) - 1).square().mean().item())
            optimizer.step(closure)
    assert w.history.column("loss").tolist() == told


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("has_batches", [True, False], ids=["batches", "no batches"])
@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize("scaling", SCALERS)
def test_the_loss_of_a_batch_that_the_loop_drops_is_in_no_record(scaling, parts, has_batches, set_to_none):
    """Also where it is one of several of a step, and where the gradients are zeros."""
    model, told, losses = nn.Linear(4, 1), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = SCALERS[scaling]("cpu", init_scale=64.0) if SCALERS[scaling] else torch.amp.GradScaler(enabled=False)
    data = torch.randn(6 * parts, 8, 4)
    with watch(model, optimizer, scaler=scaler) as w:
        for number, x in enumerate(w.batches(data) if has_batches else data):
            loss = w.loss(model(x * (math.nan if number in (0, 4) else 1.0)).square().mean())
            if loss.isfinite():
                scaler.scale(loss).backward()
                losses.append(loss.item())
            if losses and (number + 1) % parts == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=set_to_none)
                told.append(sum(losses))
                losses.clear()
    assert w.history.column("loss").tolist() == told
    assert not w.findings()


@pytest.mark.parametrize("has_batches", [True, False], ids=["batches", "no batches"])
@pytest.mark.parametrize("scaling", SCALERS)
def test_the_loss_of_an_iteration_that_is_given_up_is_in_no_record(scaling, has_batches):
    model, told, data = nn.Linear(4, 1), [], torch.randn(6, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = SCALERS[scaling]("cpu", init_scale=64.0) if SCALERS[scaling] else torch.amp.GradScaler(enabled=False)

    def train(x, number):
        optimizer.zero_grad()
        loss = w.loss(model(x).square().mean())
        scaler.scale(loss).backward()
        if number in (1, 4):
            raise MemoryError
        scaler.step(optimizer)
        scaler.update()
        told.append(loss.item())

    with watch(model, optimizer, scaler=scaler) as w:
        for number, x in enumerate(w.batches(data) if has_batches else data):
            with contextlib.suppress(MemoryError):
                train(x, number)
    assert w.history.column("loss").tolist() == told


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("clear", [nn.Module.zero_grad, lambda model, **_: model.weight.grad._values().zero_()])
@pytest.mark.parametrize("sparse", [True, False])
def test_zeros_of_an_embedding_are_no_gradients(sparse, clear):
    """Its sparse gradient loses its elements in ``zero_grad(set_to_none=False)``."""
    torch.manual_seed(0)
    model, told = nn.Embedding(10, 4, sparse=sparse), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as w:
        for step in w.batches(range(5)):
            loss = w.loss(model(torch.tensor([1, 1, step])).square().mean())
            loss.backward()
            if step == 2:
                (clear if sparse else nn.Module.zero_grad)(model, set_to_none=False)
                continue
            optimizer.step()
            told.append(loss.item())
            optimizer.zero_grad(set_to_none=False)
    assert [each.loss for each in w.history] == told


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("zeroes", ["first", "before backward"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scaling", SCALERS)
def test_a_gradient_penalty_leaves_the_loss_what_it_is(scaling, parts, zeroes, gives):
    """The recipe of torch's AMP examples: `torch.autograd.grad` of the scaled loss, then one backward of the sum."""
    model, told = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = SCALERS[scaling] and SCALERS[scaling]("cpu", init_scale=4.0)
    with watch(model, optimizer, scaler=scaler) as w:
        for batch in w.batches(torch.randn(4, parts, 8, 4)):
            losses = []
            for number, x in enumerate(batch):
                if number == 0 and zeroes == "first":
                    optimizer.zero_grad()
                loss = model(x).square().mean()
                loss = w.loss(loss) if gives else loss
                scaled = scaler.scale(loss) if scaler else loss
                grads = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
                scale = scaler.get_scale() if scaler else 1.0
                total = loss + 0.01 * sum((each / scale).square().sum() for each in grads)
                losses.append(loss.item() if gives else total.item())
                if number == 0 and zeroes == "before backward":
                    optimizer.zero_grad()
                (scaler.scale(total) if scaler else total).backward()
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            told.append(sum(losses))
    if gives or scaling == "amplab":
        assert w.history.column("loss").tolist() == told
    else:
        assert len(w.history.missing_losses()) == len(told)


@pytest.mark.parametrize("zeroes", ["first", "before backward"])
def test_losses_that_are_weighed_by_their_gradients_are_those_of_the_step(zeroes):
    """As a VQGAN weighs its two losses, by their gradients in the last layer."""
    model, told = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as w:
        for x in w.batches(torch.randn(4, 8, 4)):
            if zeroes == "first":
                optimizer.zero_grad()
            one, two = w.loss(model(x).square().mean()), w.loss(model(x).abs().mean())
            grads = [torch.autograd.grad(each, model[2].weight, retain_graph=True)[0] for each in (one, two)]
            if zeroes == "before backward":
                optimizer.zero_grad()
            (one + grads[0].norm() / grads[1].norm() * two).backward()
            optimizer.step()
            told.append(one.item() + two.item())
    assert w.history.column("loss").tolist() == told


def test_losses_whose_gradients_are_put_together_by_hand_are_those_of_the_step():
    model, told = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as w:
        for x in w.batches(torch.randn(4, 8, 4)):
            losses = w.loss(model(x).square().mean()), w.loss(model(x).abs().mean())
            grads = [torch.autograd.grad(each, list(model.parameters()), retain_graph=True) for each in losses]
            optimizer.zero_grad()
            for param, one, two in zip(model.parameters(), *grads, strict=True):
                param.grad = one + two
            optimizer.step()
            told.append(sum(each.item() for each in losses))
    assert w.history.column("loss").tolist() == told


@pytest.mark.parametrize("sums", [True, False], ids=["one backward", "a backward each"])
def test_a_second_backward_of_the_same_losses_counts_them_once(sums):
    """The first one's gradients are cleared."""
    model, told = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as w:
        for x in w.batches(torch.randn(4, 8, 4)):
            losses = w.loss(model(x).square().mean()), w.loss(model(x).abs().mean())
            for _ in range(2):
                optimizer.zero_grad()
                for each in (sum(losses),) if sums else losses:
                    each.backward(retain_graph=True)
            optimizer.step()
            told.append(sum(each.item() for each in losses))
    assert w.history.column("loss").tolist() == told


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("zeroes", ["first", "last"])
def test_all_losses_of_the_first_run_of_a_closure_are_those_of_the_step(zeroes, parts):
    model, data, told = net(), torch.randn(4, 8, 4), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with watch(model, optimizer) as w:
        for _ in range(3):
            sums = []

            def closure(sums=sums):
                if zeroes == "first":
                    optimizer.zero_grad()
                total = 0.0
                for number, x in enumerate(data.chunk(parts)):
                    losses = w.loss(model(x).square().mean()), w.loss(model(x).abs().mean())
                    if zeroes == "last" and number == 0:
                        optimizer.zero_grad()
                    sum(losses).backward()
                    total += sum(each.item() for each in losses)
                sums.append(total)
                return torch.tensor(total)

            optimizer.step(closure)
            assert len(sums) > 1
            told.append(sums[0])
    assert w.history.column("loss").tolist() == pytest.approx(told, rel=1e-12)


def test_a_skip_of_torchs_scaler_has_the_name_of_a_parameter():
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(model, optimizer, scaler=scaler) as w:
        for step, x in enumerate(w.batches(torch.randn(4, 8, 4))):
            optimizer.zero_grad()
            loss = w.loss(model(x).square().mean())
            scaler.scale(loss).backward()
            if step == 1:
                model[0].bias.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
    assert [each.first_nonfinite for each in w.history] == [None, "0.bias", None, None]


def test_a_loss_of_a_tool_is_none_of_the_step():
    model, x, told = nn.Linear(4, 1), torch.ones(8, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer) as w:

        def train(batch):
            optimizer.zero_grad()
            loss = w.loss(model(batch).square().mean())
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(3):
            amplab.doctor(model, x, loss=lambda y: y.square().mean(), train_step=train, optimizer=optimizer)
            told.append(train(x).item())
    assert w.history.column("loss").tolist() == told


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_losses_that_are_read_late_have_the_sum_that_numbers_have(dtype):
    """As losses on a device; half ones may add up to more than half holds."""
    losses, given = NO_LOSSES, torch.rand(50, dtype=torch.float64).mul(40_000).to(dtype)
    for loss in given:
        losses = losses.plus(GivenLoss(loss, []), LossSource.LOOP)
    total, left = losses.recorded(NO_STEPS)
    assert isinstance(total, torch.Tensor)
    assert total.item() == sum(given.tolist())
    assert left == NO_LOSSES


def test_a_loss_of_several_elements_is_missing():
    """Its step has no loss, as it has alone, and its shape fits no other."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer) as w:
        for batch in torch.randn(3, 2, 8, 4):
            for number, x in enumerate(batch):
                w.loss(model(x[: number + 2]).square()).sum().backward()
            optimizer.step()
    assert list(w.history.missing_losses()) == [0, 1, 2]
