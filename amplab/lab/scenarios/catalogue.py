"""The scenarios of the lab, in the order in which they build on one another.

Each must hold for the seed of its config; `tests/lab/test_scenarios.py` plays all of them, and the fix of each.
"""

from __future__ import annotations

from amplab.lab.config import ExperimentConfig
from amplab.lab.scenarios.conditions import (
    Both,
    Fails,
    LossFalls,
    LossIsNaN,
    LossStays,
    OwnScales,
    ScaleRises,
    ScoreReaches,
    ScoreStays,
    Skips,
    Steps,
)
from amplab.lab.scenarios.scenario import Fix, Injection, Scenario

__all__ = ["SCENARIOS"]

_ALL = (
    Scenario(
        "healthy",
        "Healthy training at O1",
        ExperimentConfig(opt_level="O1"),
        expect=(
            "Linear layers run in float16, the loss in float32. The loss falls as it does in float32. The loss scale "
            "doubles after every 50 steps without overflow."
        ),
        sees=Both(ScoreReaches(0.9), ScaleRises(4)),
        seen=(
            "{score} of the held-out digits are right after {steps} steps. The loss scale rose from {first_scale} to "
            "{scale}. {skipped}."
        ),
    ),
    Scenario(
        "first-overflow",
        "The scale climbs until it overflows",
        ExperimentConfig(opt_level="O1", growth_interval=10),
        expect=(
            "The scale doubles after only 10 steps, until a gradient times the scale passes 65,504, the largest "
            "float16 number. That step is skipped and the scale halves. This is normal: it is how the scale finds its "
            "place."
        ),
        sees=Skips(),
        seen=(
            "Step {step} was skipped. At scale {before} the gradient of {parameter} was not finite, so the weights "
            "stayed as they were and the next step used {after}."
        ),
    ),
    Scenario(
        "underflow",
        "Underflow without a loss scale",
        ExperimentConfig(task="small-targets", opt_level="O3"),
        expect=(
            "The targets are about 10⁻⁵, so the gradient of each output is about 5·10⁻⁹. The smallest float16 number "
            "is 6·10⁻⁸: the gradients become zero. O3 does not scale the loss, so the model cannot learn."
        ),
        sees=Both(LossStays(0.8, steps=200), ScoreStays(0.1, steps=200)),
        seen=(
            "After {steps} steps the loss is {loss}; it began at {first_loss}. R² on held-out data is {score}: the "
            "model is no better than the mean of the targets."
        ),
        steps=250,
        fix=Fix(
            {"opt_level": "O2"},
            why="O2 scales the loss before the backward pass, and updates float32 master weights. Watch the loss fall.",
            sees=Both(ScoreReaches(0.6), Steps(100)),
            seen="{steps} steps later R² is {score}, and the loss {loss}: at scale {scale} the gradients fit float16.",
        ),
    ),
    Scenario(
        "static-scale",
        "A static scale that is too high",
        ExperimentConfig(opt_level="O2", loss_scale=2.0**24),
        expect=(
            "The loss is multiplied by 2²⁴ in every step. The gradients overflow in float16, and with a static scale "
            "nothing is skipped: inf goes into the weights."
        ),
        sees=LossIsNaN(10),
        seen="The loss is NaN from step {step} on. The weights are NaN, so nothing can repair this run.",
        steps=100,
        fix=Fix(
            {"loss_scale": "dynamic"},
            why="A dynamic scale skips a step that overflows. The weights are spoiled, so the run starts over.",
            sees=ScoreReaches(0.9),
            seen="{score} of the held-out digits are right after {steps} steps, at scale {scale}.",
            starts_over=True,
        ),
    ),
    Scenario(
        "overflow-spiral",
        "Overflow that no scale can mend",
        ExperimentConfig(task="pressure", opt_level="O2"),
        expect=(
            "The inputs are air pressures of 101,325 pascals, above 65,504, and O2 casts the batch to float16: they "
            "are inf and the loss is NaN. The scale halves in every step, but the overflow is in the forward pass."
        ),
        sees=Skips(30),
        seen=(
            "{skipped}, all since step {step}. The loss scale fell from {before} to {scale}. The weights never changed."
        ),
        steps=100,
        fix=Fix(
            {"opt_level": "O1"},
            why=(
                "At O1 the batch stays float32, and LayerNorm, which comes first, runs in float32: it makes the "
                "pressures small before the first float16 op."
            ),
            sees=Both(ScoreReaches(0.7), Steps(100)),
            seen="{steps} steps later R² is {score}, with no weight lost: the skipped steps had changed nothing.",
        ),
    ),
    Scenario(
        "lost-updates",
        "Updates too small for float16 weights",
        ExperimentConfig(task="digits-16", opt_level="O3", loss_scale=128.0, lr=2e-5),
        expect=(
            "A float16 weight of 0.1 has neighbors 0.00006 apart. The updates are smaller than half of that, so most "
            "of them round to nothing. The gradients are fine: the loss scale is 128."
        ),
        sees=ScoreStays(0.4, steps=300),
        seen=(
            "After {steps} steps only {score} of the held-out digits are right. The loss went from {first_loss} to "
            "{loss}."
        ),
        fix=Fix(
            {"master_weights": True},
            why="The optimizer updates float32 copies of the weights, in which small updates add up.",
            sees=ScoreReaches(0.6),
            seen="{steps} steps later {score} of the held-out digits are right: the same updates, kept in float32.",
            steps=1500,
        ),
    ),
    Scenario(
        "softmax",
        "A softmax that overflows",
        ExperimentConfig(task="text", model="handmade-softmax", opt_level="O2", lr=0.005, batch_size=8),
        expect=(
            "This transformer computes softmax as exp(x) / Σ exp(x). In float16, exp overflows from x = 11.09 on. At "
            "first the scores are small. Once they have grown, inf / inf is NaN and every step is skipped."
        ),
        sees=Skips(20),
        seen=(
            "From step {step} on every step is skipped. The scale fell from {before} to {scale}; the weights do not "
            "change any more."
        ),
        fix=Fix(
            {"opt_level": "O1"},
            why=(
                "O1 runs exp in float32, as its list says. The scale has collapsed, so the run starts over. In your "
                "own code use torch.softmax, which subtracts the largest score first."
            ),
            sees=Both(Steps(100), LossFalls(0.8)),
            seen="After {steps} steps the loss is {loss}, perplexity {score}. {skipped}.",
            starts_over=True,
        ),
    ),
    Scenario(
        "bce",
        "A loss that O1 refuses",
        ExperimentConfig(task="even-bce", opt_level="O1"),
        expect=(
            "The loss is binary cross-entropy of a sigmoid. In float16 a sigmoid is exactly 1 from 8.32 up, and "
            "log(1 - 1) is -inf. O1 refuses the op with an error instead of training wrongly."
        ),
        sees=Fails("BCEWithLogitsLoss"),
        seen=(
            "The first step ended with a NotImplementedError: amp does not work out of the box with "
            "F.binary_cross_entropy. It says what to do: {advice}"
        ),
        steps=25,
        fix=Fix(
            {"task": "even-logits"},
            why="BCEWithLogitsLoss computes sigmoid and loss together, in float32. The run starts over with it.",
            sees=ScoreReaches(0.9),
            seen="{score} of the held-out digits are called even or odd rightly after {steps} steps.",
        ),
    ),
    Scenario(
        "batchnorm",
        "BatchNorm in float16",
        ExperimentConfig(task="digits-1023", model="cnn", opt_level="O2", keep_batchnorm_fp32=False),
        expect=(
            "The images have gray levels up to 1023, and BatchNorm is float16 too. The variance of its inputs passes "
            "65,504. Training does not notice. Evaluation does: it uses the running variance, which is inf."
        ),
        sees=Both(LossFalls(0.5), ScoreStays(0.3, steps=100)),
        seen="The training loss fell to {loss}, yet {score} of the held-out digits are right, as if by chance.",
        fix=Fix(
            {"keep_batchnorm_fp32": True},
            why="O2's default: BatchNorm and its statistics stay float32. They are inf by now, so the run starts over.",
            sees=Both(ScoreReaches(0.9), Steps(100)),
            seen="{score} of the held-out digits are right after {steps} steps, with everything else in float16.",
            starts_over=True,
        ),
    ),
    Scenario(
        "gan",
        "A GAN with three loss scales",
        ExperimentConfig(task="gan", opt_level="O1", growth_interval=100),
        expect=(
            "Two losses of the discriminator and one of the generator: each has a loss_id and a scale of its own. At "
            "step 60 an overflow is injected into the first loss."
        ),
        sees=Both(Skips(injected="overflow"), OwnScales(), Steps(90)),
        seen=(
            "Step {step} was skipped by the first loss alone, and only its scale halved. The scales of the three "
            "losses are now {scales}."
        ),
        injections=(Injection(60, "overflow"),),
    ),
    Scenario(
        "accumulation",
        "Gradient accumulation",
        ExperimentConfig(opt_level="O1", batch_size=16, accumulate=4),
        expect=(
            "Each step adds up the gradients of 4 batches of 16 images at one loss scale, then unscales once and "
            "steps once. At step 60 one batch overflows: the whole step is skipped, not a quarter of it."
        ),
        sees=Both(Skips(injected="overflow"), ScoreReaches(0.9), Steps(75)),
        seen=(
            "Step {step} was skipped as a whole. After {steps} steps {score} of the held-out digits are right, as with "
            "one batch of 64."
        ),
        injections=(Injection(60, "overflow"),),
    ),
    Scenario(
        "bfloat16",
        "bfloat16 needs no loss scale",
        ExperimentConfig(task="small-targets", opt_level="autocast-bf16"),
        expect=(
            "The targets of 10⁻⁵ again, without a loss scale. bfloat16 has the range of float32, down to 10⁻³⁸, so no "
            "gradient becomes zero. Its price: 8 bits of precision instead of 11."
        ),
        sees=Both(ScoreReaches(0.6), Steps(100)),
        seen="R² is {score} after {steps} steps at scale {scale}. {skipped}.",
    ),
)

SCENARIOS = {scenario.name: scenario for scenario in _ALL}
"""Each scenario by its name."""
