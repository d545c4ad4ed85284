"""The Trainer of transformers with amplab's scaler and regions."""

import copy

import pytest
import torch

import amplab

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Accelerate keeps its settings for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def tiny_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=12, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def sequences():
    """Counting modulo 16."""
    starts = torch.arange(32) % 16
    return [{"input_ids": (row := (start + torch.arange(12)) % 16), "labels": row} for start in starts]


def arguments(directory, **options):
    defaults = {
        "output_dir": str(directory),
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 0,
        "lr_scheduler_type": "constant",
    }
    return transformers.TrainingArguments(**defaults | options)


def fitted(page, model, directory, scaler, resume=None, dtype=torch.float16, **options):
    trainer = page("transformers").AmplabTrainer(
        model, arguments(directory, **options), train_dataset=sequences(), scaler=scaler, dtype=dtype
    )
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulates", [1, 2])
def test_the_scaler_trains_as_torchs_does_to_the_bit(page, tmp_path, overflowing, accumulates):
    found = []
    for kind in (torch.amp.GradScaler, amplab.GradScaler):
        model, scaler = tiny_model(), kind(**overflowing)
        options = {"max_steps": 8, "gradient_accumulation_steps": accumulates}
        losses = fitted(page, model, tmp_path, scaler, **options)
        found.append((losses, list(model.parameters()), scaler.get_scale()))
    (losses, params, scale), (our_losses, our_params, our_scale) = found
    assert our_losses == losses
    assert all(map(torch.equal, our_params, params))
    assert our_scale == scale < overflowing["init_scale"]


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_regions_and_scaler_train(page, tmp_path, lower):
    model, seen = tiny_model(), set()
    block = model.transformer.h[0]
    block.mlp.c_fc.register_forward_hook(lambda _module, _args, output: seen.add(output.dtype))
    block.ln_1.register_forward_hook(lambda _module, _args, output: seen.add(output.dtype))
    scaler = amplab.GradScaler("cpu") if lower is torch.float16 else None
    losses = fitted(page, model, tmp_path, scaler, dtype=lower)
    assert seen == {lower, torch.float32}
    assert losses[-1] < 0.2 * losses[0]


def test_a_resumed_run_goes_on_to_the_bit(page, tmp_path, overflowing):
    whole, first = tiny_model(), tiny_model()
    second = copy.deepcopy(first)
    scalers = [amplab.GradScaler(**overflowing) for _ in range(3)]
    fitted(page, whole, tmp_path / "whole", scalers[0], max_steps=12)
    options = {"save_strategy": "steps", "save_steps": 6}
    fitted(page, first, tmp_path / "first", scalers[1], max_steps=6, **options)
    fitted(page, second, tmp_path / "first", scalers[2], max_steps=12, resume=str(tmp_path / "first" / "checkpoint-6"))
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    assert scalers[0].state_dict() == scalers[2].state_dict()
