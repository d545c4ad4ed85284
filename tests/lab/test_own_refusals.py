"""What `lab.open` refuses of a model of one's own, and what a run does that cannot be changed."""

import threading

import pytest
import torch
import torch.nn.functional as F
from own_models import TAGS, Tagger, registered
from torch import nn

import amplab.lab
from amplab.lab import (
    TASKS,
    Experiment,
    ExperimentConfig,
    Trainer,
)
from amplab.lab.own_task import check_devices, register_own

pytestmark = pytest.mark.usefixtures("nothing_own")


ONE = Tagger()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda _weights: torch.optim.SGD(ONE.parameters(), lr=0.1),
            "of the parameters that the function",
        ),
        (lambda _weights: hooked(torch.optim.SGD(ONE.parameters(), lr=0.1)), "optimizer of the parameters"),
        ("hooked", "pass a function that makes the optimizer with its hooks"),
    ],
)
def test_an_optimizer_that_cannot_be_made_again_is_refused(make, words):
    given = hooked(torch.optim.SGD(ONE.parameters(), lr=0.1)) if make == "hooked" else make
    with pytest.raises(ValueError, match=words):
        registered(ONE, TAGS, loss=F.cross_entropy, optimizer=given)


@pytest.mark.parametrize("as_object", [False, True])
def test_an_optimizer_that_needs_a_closure_is_refused_before_its_first_step(as_object):
    optimizer = torch.optim.LBFGS(ONE.parameters()) if as_object else torch.optim.LBFGS
    with pytest.raises(ValueError, match=r"optimizer=LBFGS: .*'closure'.*such as"):
        registered(ONE, TAGS, loss=F.cross_entropy, optimizer=optimizer)
    assert "own" not in TASKS


def hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def test_a_setting_that_cannot_begin_here_is_refused_and_the_run_goes_on(tmp_path):
    trainer = Trainer(registered(Tagger(), TAGS, loss=F.cross_entropy), log=tmp_path)
    trainer.run(3)
    for text in ("amplab/1 task=own-7 model=net", "amplab/1 task=digits batch_size=60000"):
        config = ExperimentConfig.parse(text)
        if config.task != "digits":
            with pytest.raises(ValueError, match="open it again"):
                trainer.reset(config)
    assert len(trainer.run(2)) == 5
    digits = Trainer(ExperimentConfig(hidden=4))
    digits.run(2)
    with pytest.raises(ValueError, match="60000"):
        digits.reset(ExperimentConfig(hidden=4, batch_size=60000))
    assert len(digits.run(2)) == 4


def test_a_change_that_cannot_be_made_leaves_the_run_as_it_was():
    """The optimizer of one's own cannot be built a second time."""
    works = True

    def make(weights):
        if not works:
            raise RuntimeError("no other optimizer")
        return torch.optim.SGD(weights, lr=0.1)

    batches = [(torch.rand(4, 8), torch.rand(4, 1)) for _ in range(3)]
    config = registered(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), batches, loss=F.mse_loss, optimizer=make)
    trainers = [Trainer(config.changed(optimizer="adam", opt_level="O2", growth_interval=3)) for _ in range(2)]
    for trainer in trainers:
        trainer.run(4)
    works = False
    trainers[0].change(opt_level="O1", optimizer="own", lr=0.5)
    changed, other = [trainer.run(4) for trainer in trainers]
    assert changed.column("loss").tolist() == other.column("loss").tolist()
    assert changed.column("loss_scale").tolist() == other.column("loss_scale").tolist()
    assert (trainers[0].state, trainers[0].config, trainers[0].last_change) == ("paused", trainers[1].config, None)
    (told,) = trainers[0].failures
    assert told.attempted
    assert "no other optimizer" in told.text
    trainers[0].change(lr=0.01)
    trainers[0].run(1)
    assert trainers[0].config == trainers[1].config.changed(lr=0.01)
    for trainer in trainers:
        trainer.stop()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"data": iter(TAGS)}, "read only once"),
        ({"loss": None}, "float"),  # nothing that can be a loss: below
        ({"step": lambda batch: batch}, r"amplab\.lab\.open\(model=model, data=loader, step=lambda model, batch"),
        ({"loss": F.cross_entropy, "step": lambda model, batch: model}, "both loss= and step="),
        (
            {"step": lambda _, batch: F.cross_entropy(ONE(batch[0]), batch[1])},
            "another model.* step=lambda model, batch",
        ),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}, "not the model's"),
        ({"optimizer": lambda: None}, "called with the parameters"),
        (
            {"model": Tagger, "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)},
            "pass a function as well",
        ),
        ({"model": [Tagger(), Tagger()]}, "several models without step="),
        ({"model": {"A": Tagger()}, "step": {"B": lambda models, batch: models}}, "'B'"),
        ({"evaluate": 0.5}, "evaluate=float"),
        ({"model": nn.ReLU()}, "nothing to train"),
        ({"model": lambda: ONE}, r"the same \S+ twice, and Reset and Compare need fresh ones"),
        ({"model": lambda: [Tagger(), ONE], "step": lambda models, batch: 0}, r"same Tagger1\S+ twice"),
        ({"model": 3}, "int"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_trains(parts, words):
    given = {"model": Tagger(), "data": TAGS, "loss": F.cross_entropy, **parts}
    if "step" in parts and parts.get("loss") is None:
        given["loss"] = None
    if parts == {"loss": None}:
        given["step"], words = (lambda model, batch: 3.0), "float"
    with pytest.raises((TypeError, ValueError), match=words):
        register_own(given.pop("model"), given.pop("data"), **given)
    assert "own" not in TASKS


class Locked(nn.Module):
    """Keeps a buffer, and a lock, which cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, out, target):
        return F.cross_entropy(out, target)


def test_what_cannot_be_copied_is_named_with_what_to_pass_instead():
    model = Tagger()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "lock": threading.Lock()}], lr=0.1)
    for parts, words in (
        ({"model": nn.Sequential(model, Locked())}, r"model=Sequential .*lock.*model=lambda: Net\(\)"),
        ({"loss": Locked()}, "loss=Locked .*lock.*pass one that has no buffers"),
        ({"optimizer": optimizer}, "optimizer=SGD .*lock.*optimizer=lambda weights: Adam"),
    ):
        given = {"model": model, "data": TAGS, "loss": F.cross_entropy, **parts}
        with pytest.raises(ValueError, match=words):
            register_own(given.pop("model"), given.pop("data"), **given)
        assert "own" not in TASKS


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(TypeError, match=r"Linear returns none of its own.*Pass loss="):
        register_own(nn.Linear(4, 2), [(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))])
    assert "own" not in TASKS


def test_a_model_on_mps_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"on mps, which has no float64.*model\.to\('cpu'\)"):
        check_devices({"cpu", "mps"})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: amplab.lab.open(Tagger()), r"write amplab\.lab\.open\(model=model, data=loader, loss=criterion\)"),
        (lambda: amplab.lab.open(model=Tagger()), "without data="),
        (lambda: amplab.lab.open(data=TAGS, loss=F.cross_entropy), "without model="),
        (lambda: amplab.lab.open(Tagger(), TAGS), r"Write amplab\.lab\.open\(config\) or"),
        (lambda: amplab.lab.open(criterion=F.cross_entropy), "use loss="),
        (lambda: amplab.lab.attach(Tagger()), r"write amplab\.lab\.open\(model="),
        (lambda: amplab.lab.open(Trainer(ExperimentConfig(hidden=4))), r"amplab\.lab\.attach\(run\)"),
    ],
)
def test_a_wrong_call_says_which_of_open_and_attach_to_use(kernel, call, words):
    with pytest.raises(TypeError, match=words):
        call()


class Numbered:
    """As a data module of Lightning, or a function in a notebook, that counts the epochs in which it is called."""

    def __init__(self):
        self.epoch = 0

    def batches(self):
        self.epoch += 1
        return [(torch.roll(inputs, self.epoch), labels) for inputs, labels in TAGS]


def test_data_that_are_others_for_each_run_are_told_each_time():
    data = Numbered().batches
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"data=.*each run has other batches.*pass an object"):
            register_own(Tagger(), data, loss=F.cross_entropy)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_weights_with_hooks_are_refused_as_an_object_and_trained_from_a_function(register):
    def masked():
        torch.manual_seed(0)
        model = Tagger()
        getattr(model.words.weight, register)(FROZEN[register])
        return model

    with pytest.raises(ValueError, match=r"model=Tagger: words\.weight has a hook.*pass a function"):
        registered(masked(), TAGS, loss=F.cross_entropy)
    experiment = Experiment(registered(masked, TAGS, loss=F.cross_entropy))
    before = experiment.model.words.weight.clone()
    for _ in range(3):
        experiment.step()
    moved = (experiment.model.words.weight != before).any(1)
    assert not moved[:6].any()
    assert moved[6:].any()


def rows_dropped(weight):
    weight.grad[:6] = 0


FROZEN = {
    "register_hook": lambda grad: torch.cat([torch.zeros_like(grad[:6]), grad[6:]]),
    "register_post_accumulate_grad_hook": rows_dropped,
}
