"""The Trainer of transformers under `amplab run --device cpu`: fp16, checkpoints and resuming, as on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

def trainer(steps, folder):
    set_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=12, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": (row := (torch.arange(12) + start) % 16), "labels": row} for start in range(32)]
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=10, logging_steps=5, per_device_train_batch_size=8, report_to=[],
        learning_rate=1e-2, lr_scheduler_type="constant", fp16=True, disable_tqdm=True,
    )
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)

whole = trainer(20, sys.argv[1] + "/whole")
whole.train()
trainer(10, sys.argv[1] + "/part").train()
rest = trainer(20, sys.argv[1] + "/part")
rest.train(resume_from_checkpoint=True)
logs = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (whole, rest)]
print("LOSSES", json.dumps([whole.args.device.type, *logs]))
"""


def test_fp16_saves_checkpoints_and_resumes_where_it_was(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "amplab", "run", "--device", "cpu", str(tmp_path / "script.py"), str(tmp_path)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    device, whole, rest = json.loads(result.stdout.partition("LOSSES")[2])
    assert device == "cuda"
    assert whole[-1] < whole[0] / 2
    assert rest == whole
