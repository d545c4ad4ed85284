"""Healthy loops give nothing above a note, in any precision."""

import warnings

import pytest
import torch
from patients import SIZES, scale_of
from precisions import PRECISIONS, Precision
from recipes import RECIPES

from amplab.amp import Session
from amplab.diagnose import Findings, Observation, StepObservation, doctor

STEPS = 10


def examined(name: str, size: int, seed: int, precision_name: str) -> Findings:
    """Train, and have the loop, the run and one more batch looked at."""
    torch.manual_seed(seed)
    recipe = RECIPES[name](size, seed)
    models = list(recipe.model.values()) if name == "gan" else [recipe.model]
    precision = Precision(precision_name, models, recipe.optimizers)
    batch = recipe.batch(STEPS)

    def loss_fn():
        with precision.region():
            return recipe.loss(*batch)

    try:
        return doctor(
            recipe.model,
            step=loss_fn,
            train_step=lambda: recipe.run(precision, batch),
            optimizer=recipe.optimizers,
            scaler=precision.amp,
            batch=batch,
            run=trained(recipe, precision),
            stateful=recipe.schedulers,
        )
    finally:
        if isinstance(precision.amp, Session):
            precision.amp.reset()


def trained(recipe, precision) -> Observation:
    run = Observation(growth_interval=2000)
    for number in range(STEPS):
        scale, rate = scale_of(precision.amp), recipe.optimizers[0].param_groups[0]["lr"]
        loss = recipe.run(precision, recipe.batch(number)).item()
        after = scale_of(precision.amp)
        run = run.then(StepObservation(number, loss, scale, after < scale, after, learning_rate=rate))
    return run


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.long)])
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_above_a_note(name, size, precision):
    if (name, precision) == ("lstm", "torch fp16"):
        pytest.skip("torch has no LSTM in float16 under its autocast on CPU")
    if (name, precision) == ("lstm", "torch bf16") and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch has no LSTM in bfloat16 on this CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = examined(name, size, size % 3, precision)
    assert not found.harmful, str(found.harmful)
