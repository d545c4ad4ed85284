"""Lightning's Trainer and Fabric with amplab's scaler and regions."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import amplab

lightning = pytest.importorskip("lightning")
from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Task(lightning.LightningModule):
    def __init__(self, model, fused=False):
        super().__init__()
        self.model, self.fused, self.losses = model, fused, []

    def training_step(self, batch):
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def fitted(task, plugin, batches, **options):
    trainer = lightning.Trainer(**QUIET | {"max_epochs": 3, "plugins": [plugin]} | options)
    trainer.fit(task, batches)
    return trainer


OPTIONS = {
    "plain": ({}, False),
    "clipped": ({"gradient_clip_val": 0.5}, False),
    "clipped by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, False),
    "accumulated": ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, False),
    "fused": ({}, True),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_scaler_trains_as_torchs_does_to_the_bit(classifier, batches, overflowing, options):
    options, fused = OPTIONS[options]
    trained = []
    for kind in (torch.amp.GradScaler, amplab.GradScaler):
        plugin, task = MixedPrecision("16-mixed", "cpu", kind(**overflowing)), Task(copy.deepcopy(classifier), fused)
        fitted(task, plugin, batches, **options)
        trained.append((list(task.parameters()), plugin.scaler.state_dict()))
    (theirs, their_state), (ours, our_state) = trained
    assert all(map(torch.equal, ours, theirs))
    assert our_state["scale"] == their_state["scale"] < overflowing["init_scale"]
    assert our_state["_growth_tracker"] == their_state["_growth_tracker"]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_regions_and_scaler_train(page, classifier, batches, precision):
    lower = torch.float16 if precision == "16-mixed" else torch.bfloat16
    scaler = amplab.GradScaler("cpu") if precision == "16-mixed" else None
    task = Task(classifier)
    fitted(
        task, page("Lightning").AmplabPrecision(precision, "cpu", scaler), batches, gradient_clip_val=1.0, max_epochs=8
    )
    assert classifier.dtypes == (lower, torch.float32)  # the lists of a GPU
    assert task.losses[-1] < 0.7 * task.losses[0]
    assert all(param.dtype is torch.float32 for param in task.parameters())
    assert not amplab.is_autocast_enabled("cpu")


def test_a_resumed_run_goes_on_to_the_bit(page, classifier, batches, overflowing, tmp_path):
    def plugin():
        return page("Lightning").AmplabPrecision("16-mixed", "cpu", amplab.GradScaler(**overflowing))

    whole, first, second = (Task(copy.deepcopy(classifier)) for _ in range(3))
    trainer = fitted(whole, plugin(), batches, max_epochs=4)
    fitted(first, plugin(), batches, max_epochs=2).save_checkpoint(tmp_path / "last.ckpt")
    resumed = lightning.Trainer(**QUIET, max_epochs=4, plugins=[plugin()])
    resumed.fit(second, batches, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    scalers = trainer.precision_plugin.scaler, resumed.precision_plugin.scaler
    assert scalers[0].state_dict() == scalers[1].state_dict()


class Adversaries(lightning.LightningModule):
    """Manual optimization of two nets, as in a GAN."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator, self.critic, self.dtypes = nn.Linear(8, 8), nn.Linear(8, 1), set()

    def training_step(self, batch):
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            optimizer.zero_grad()
            fake = self.generator(batch[0])
            self.dtypes.add(fake.dtype)
            self.manual_backward(sign * self.critic(fake).float().tanh().mean())
            self.clip_gradients(optimizer, 1.0, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.generator, self.critic)]


def test_manual_optimization_of_two_nets(page, batches, overflowing):
    trained = []
    for kind in (torch.amp.GradScaler, amplab.GradScaler):
        torch.manual_seed(0)
        task = Adversaries()
        fitted(task, page("Lightning").AmplabPrecision("16-mixed", "cpu", kind(**overflowing)), batches, max_epochs=1)
        trained.append(list(task.parameters()))
        assert task.dtypes == {torch.float16}
    assert all(map(torch.equal, *trained))


def test_fabric(page, classifier, batches, overflowing):
    trained = []
    for kind in (torch.amp.GradScaler, amplab.GradScaler):
        plugin = page("Lightning").AmplabFabricPrecision("16-mixed", "cpu", kind(**overflowing))
        fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        net = copy.deepcopy(classifier)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in fabric.setup_dataloaders(batches):
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
        assert net.dtypes == (torch.float16, torch.float32)
        trained.append(list(net.parameters()))
    assert all(map(torch.equal, *trained))


class Watched(Task):
    """Notes the exponent of the largest gradient of each step; Lightning calls the step with a closure."""

    def __init__(self, model):
        super().__init__(model)
        self.optimizer, self.largest = torch.optim.SGD(self.parameters(), lr=0.1), []

    def configure_optimizers(self):
        return self.optimizer

    def configure_gradient_clipping(self, *given, **named):
        super().configure_gradient_clipping(*given, **named)
        largest = max(param.grad.abs().max().item() for param in self.parameters())
        self.largest.append(math.frexp(largest)[1] - 1.0)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_watch_records_the_gradients_of_each_step(classifier, batches, precision, options):
    task = Watched(classifier)
    with amplab.watch(task, task.optimizer, every=1) as w:
        lightning.Trainer(**QUIET | {"max_epochs": 2, "precision": precision} | options).fit(task, batches)
    assert len(set(task.largest)) > 1
    assert [record.grad_exponent for record in w.history.records()] == task.largest


class RegionsOfAmplab(MixedPrecision):
    def autocast_context_manager(self):
        return amplab.autocast(self.device, torch.float16)


def fitted_by_two_processes(rank, overflowing):
    """Fit with each plugin and scaler; return the weights and the scale of each."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)
    trained = {}
    for name, options in (("accumulated", OPTIONS["accumulated"][0]), ("two nets", {"max_epochs": 1})):
        for regions in (MixedPrecision, RegionsOfAmplab):
            for kind in (torch.amp.GradScaler, amplab.GradScaler):
                torch.manual_seed(rank)  # DistributedDataParallel makes the weights equal
                task = Adversaries() if name == "two nets" else Task(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 2)))
                plugin = regions("16-mixed", "cpu", kind(**overflowing))
                plugins = {"plugins": [plugin, TorchElasticEnvironment()], "devices": 2}
                ddp = {"strategy": "ddp_find_unused_parameters_true"}  # one net at a time
                trainer = fitted(task, plugin, batches, **{**options, **plugins, **ddp})
                assert trainer.world_size == 2
                weights = [each.detach().clone() for each in task.parameters()]
                trained[name, regions.__name__, kind.__module__] = weights, plugin.scaler.get_scale()
    return trained


def test_two_processes_train_as_with_torchs_scaler_to_the_bit(overflowing):
    first, second = run_ranks(fitted_by_two_processes, overflowing)
    assert len(first) == 8
    for (name, regions, _), (weights, scale) in first.items():
        theirs = first[name, regions, torch.amp.GradScaler.__module__]
        assert all(map(torch.equal, weights, theirs[0]))
        assert scale == theirs[1] < overflowing["init_scale"]
    assert all(torch.equal(*pair) for key in first for pair in zip(first[key][0], second[key][0], strict=True))
