"""Bytes of one step, against sums by hand and against torch's own hooks."""

import pytest
import torch
import torch.nn.functional as F

from amplab.lab import Experiment, ExperimentConfig, Trainer, build_model, load_task
from amplab.lab.levels import LEVELS
from amplab.lab.memory_count import level_memory
from amplab.lab.memory_fit import LevelMemory

HIDDEN, BATCH = 32, 16
WEIGHTS = 64 * HIDDEN + HIDDEN * HIDDEN + HIDDEN * 10
NUMBERS = WEIGHTS + 2 * HIDDEN + 10  # with biases
MOMENTA = {"sgd": 1, "adam": 2}


def counted(level: str, **fields: object) -> LevelMemory:
    return level_memory(ExperimentConfig(opt_level=level, hidden=HIDDEN, batch_size=BATCH, **fields))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_parameters_gradients_masters_and_optimizer_state_by_hand(optimizer: str) -> None:
    found = {level: counted(level, optimizer=optimizer) for level in LEVELS}
    steps = 4 * 6 if optimizer == "adam" else 0  # the step count of each parameter
    for level, each in found.items():
        half = level in ("O2", "O3")
        assert each.parameters == (2 if half else 4) * NUMBERS
        assert each.masters == (4 * NUMBERS if level == "O2" else 0)
        state = (2 if level == "O3" else 4) * NUMBERS * MOMENTA[optimizer]
        assert each.optimizer_state == state + steps
        assert each.gradients >= (2 if half else 4) * NUMBERS
        assert each.buffers == 0


def test_activations_of_an_mlp_by_hand() -> None:
    # Of each image: itself, the outputs of both relus, the log-softmax and the label; the total weight of the loss.
    o0, o1 = counted("O0"), counted("O1")
    per_image = 4 * 64 + 2 * (4 * HIDDEN) + 4 * 10 + 8
    assert o0.activations == per_image * BATCH + 4
    assert o0.per_example == per_image
    per_image_at_o1 = 2 * 64 + 2 * (2 * HIDDEN) + 4 * 10 + 8
    assert (o1.activations, o1.per_example) == (per_image_at_o1 * BATCH + 4, per_image_at_o1)
    assert o1.weight_casts == 2 * (WEIGHTS - 64 * HIDDEN), "the first layer's input needs no gradient"


def test_activations_agree_with_the_hooks_of_torch() -> None:
    config = ExperimentConfig(model="cnn", opt_level="O0", hidden=HIDDEN, batch_size=BATCH)
    model, task = build_model("cnn", HIDDEN, 0), load_task("digits", 0)
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

    def kept_of(size: int) -> int:
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        images, labels = task.batch(0, size)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = F.cross_entropy(model(images), labels)
        nbytes = sum(each.untyped_storage().nbytes() for at, each in saved.items() if at not in own)
        return nbytes if loss.requires_grad else 0

    found = level_memory(config)
    assert found.activations == kept_of(BATCH)
    assert found.activations_of(4 * BATCH) == kept_of(4 * BATCH), "linear beyond the two batches that were counted"
    assert found.buffers == sum(each.nbytes for each in model.buffers()) > 0


def test_the_largest_batch_is_the_last_one_that_fits() -> None:
    found = counted("O1")
    for nbytes in (found.fixed + 10_000, 2 * 10**6, 16 * 10**9):
        most = found.largest_batch(nbytes)
        assert found.total(most) <= nbytes < found.total(most + 1)
    assert found.largest_batch(found.fixed // 2) == 0


def test_counting_while_a_run_goes_on_does_not_change_it() -> None:
    config = ExperimentConfig(hidden=HIDDEN)
    plain = Experiment(config)
    trainer = Trainer(config)
    for step in range(4):
        trainer.request_memory("O2")
        trainer.request_memory("autocast-bf16")
        trainer.run(1)
        assert trainer.history.last.loss == plain.step().loss, step
