"""What the catalogue says of a whole run: its losses, its loss scale and its schedule."""

from __future__ import annotations

from amplab.diagnose.catalogue.entry import Case, CatalogueEntry
from amplab.diagnose.catalogue.shared_texts import DYNAMIC_SCALE, SCALER_STEP, SMALLER_RATE, around, scale_setting
from amplab.diagnose.remedies.api_styles import by_scaling

__all__ = ["RUN"]

_FIRST_NONFINITE = by_scaling(
    "print(amplab.first_nonfinite(model, batch, step=loss_of))",
    scaler="print(amplab.first_nonfinite(model, batch, step=loss_of, scaler=scaler))",
)

_WATCHED = "step=lambda batch: loss_of(model, batch))  # and w.batches(loader)"

_WATCH = by_scaling(
    f"amplab.watch(model, optimizer, {_WATCHED}",
    apex=f"amplab.watch(model, optimizer, scaler=amp, {_WATCHED}",
    scaler=f"amplab.watch(model, optimizer, scaler=scaler, {_WATCHED}",
)
"""A watch examines a bad step before it is taken; afterwards the weights that caused it are gone."""

_SCHEDULER_AFTER_STEP = by_scaling(
    "if amp.last_step(optimizer).stepped:  # amplab.GradScaler: if scaler.last_step.stepped\n    scheduler.step()",
    apex="if amp.last_step(optimizer).stepped:\n    scheduler.step()",
    amplab="if scaler.last_step.stepped:  # after scaler.update()\n    scheduler.step()",
    torch="scale = scaler.get_scale()\nscaler.update()\nif scaler.get_scale() >= scale:\n    scheduler.step()",
    plain="optimizer.step()\nscheduler.step()",
)

_UPDATE_ONCE = "scaler.update()  # once per optimizer step, after it; not after each backward"

_WINDOW = scale_setting("scale_window={new_window}", "growth_interval={new_window}")

RUN = (
    CatalogueEntry(
        "diverging",
        "The loss grows: the update steps are too large",
        ("error",),
        {
            "": Case(
                "The loss went from {first_loss:.4g} to {loss_now:.4g} in {steps_taken} steps that were taken, "
                "{until}.",
                "The update steps are too large. Later overflows are a consequence.",
                SMALLER_RATE,
            ),
            "at-once": Case(
                "The loss was {last_loss:.4g} and, after {taken}, is not finite in any of the {steps_lost} steps that "
                "follow.",
                "The first update steps were too large and moved the weights out of range. Later overflows are a "
                "consequence.",
            ),
            "in-float32": Case(
                "Trained in float32 on this batch alone, the loss goes from {float32_loss_before:.4g} to "
                "{float32_loss_after:.4g} in {float32_steps}.",
                "At this learning rate the update steps are too large in float32 too. The overflow in float16 is a "
                "consequence, so no dtype and no loss scale fixes this.",
            ),
        },
        explains=(
            *("overflow-in-half", "logits-overflow-half", "reduction-overflows-half", "nonfinite-in-float32"),
            *("cast-overflows-half", "scale-collapse", "nonfinite-loss", "nonfinite-parameter"),
        ),
    ),
    CatalogueEntry(
        "scale-collapse",
        "Every recent step was skipped, and a smaller loss scale does not help",
        ("error",),
        {
            "": Case(
                "The last {skips} steps were all skipped; the loss scale has fallen to {scale}.",
                "The gradients stay non-finite while the loss scale falls, so the loss scale is not the cause.",
                around("", _FIRST_NONFINITE, "  # names the op"),
            ),
            "loss": Case(cause="The loss is not finite before it is scaled, so no loss scale fixes this."),
            "floor": Case(
                "The last {skips} steps were all skipped; the loss scale stays at {scale}.",
                "The loss scale is at its floor and cannot fall to one at which the gradients may fit.",
            ),
        },
        supersedes_as_error=("still-skipping",),
    ),
    CatalogueEntry(
        "nonfinite-loss",
        "The loss is inf or NaN",
        ("error", "warning"),
        {
            "": Case(
                "The loss is not finite in {steps} of {all_steps} steps; step {first_step} {outcome}",
                "The loss is computed before it is scaled, so the loss scale is not the cause.",
                around("", _FIRST_NONFINITE, "  # with the batch of that step: names the op"),
            ),
            "taken": Case(remedy=_WATCH),
            "static-scale": Case(
                "",
                "With a static loss scale, here {scale}, a step is taken even if its gradients overflow. From then on "
                "the weights and every loss are NaN.",
                DYNAMIC_SCALE,
            ),
        },
        supersedes_as_error=("still-skipping",),
    ),
    CatalogueEntry(
        "loss-missing",
        "The losses of the run are unknown",
        ("note",),
        {
            "": Case(
                "None of the {steps} steps reported a loss.",
                "A torch.amp.GradScaler, or a loop without a scaler, does not report the loss, so nothing can be said "
                "about its values.",
                "loss = w.loss(loss)  # w is the watch; before backward, in every step",
            )
        },
    ),
    CatalogueEntry(
        "window-too-short",
        "The loss scale grows too often",
        ("warning",),
        {
            "": Case(
                "{skips} of {steps} steps were skipped because the loss scale had just grown.",
                "The loss scale grows after every {window} clean steps and then overflows: up to one step in {one_in} "
                "is lost.",
                _WINDOW,
            )
        },
    ),
    CatalogueEntry(
        "window-too-long",
        "The loss scale recovers too slowly",
        ("warning",),
        {
            "": Case(
                "{underflow:percent} of the gradient elements are 0 in float16 at a loss scale of {scale}.",
                "The loss scale was {highest} before, and doubles only once in {window} clean steps.",
                _WINDOW,
            )
        },
    ),
    CatalogueEntry(
        "slow-start",
        "The initial loss scale is too large",
        ("note",),
        {
            "": Case(
                "The first {skips} steps were skipped while the loss scale fell to {scale}.",
                "The initial loss scale is too large for these gradients; a dynamic loss scale falls until it fits.",
                scale_setting(
                    "dynamic_init_scale={first_scale_without_overflow:.12g}",
                    "init_scale={first_scale_without_overflow:.12g}",
                ),
            )
        },
    ),
    CatalogueEntry(
        "still-skipping",
        "The most recent steps were skipped",
        ("note",),
        {
            "": Case(
                "The last {steps_were} skipped{finite}; the loss scale has fallen to {scale}.",
                "If the loss scale is too large, steps are skipped until it fits. If the skipping does not stop, an op "
                "overflows at every loss scale.",
                _WATCH,
            )
        },
    ),
    CatalogueEntry(
        "scheduler-before-step",
        "The learning-rate scheduler steps before the optimizer",
        ("note",),
        {
            "": Case(
                "{scheduler} steps before optimizer {optimizer}.",
                "Its first learning rate is never used, and every other one comes one step early; torch warns about "
                "it.",
                by_scaling(
                    "optimizer.step()\nscheduler.step()",
                    scaler=f"{SCALER_STEP}\nscheduler.step()",
                ),
            )
        },
    ),
    CatalogueEntry(
        "scheduler-counts-skips",
        "The learning-rate scheduler advances in skipped steps",
        ("note", "warning"),
        {
            "": Case(
                "{scheduler} advances in a step that is skipped because of an overflow.",
                "Most training loops do this, and an occasional skipped step does no harm. If the first steps are "
                "skipped, a warm-up is shorter than intended, and torch warns about it.",
                _SCHEDULER_AFTER_STEP,
            ),
            "run": Case(
                "The first {steps_were} skipped, but the learning rate changed from {rate_before:g} to {rate_after:g}.",
                "The scheduler counts steps that were not taken. A warm-up is then shorter than intended, and torch "
                "warns about it.",
            ),
        },
    ),
    CatalogueEntry(
        "accumulation-across-scales",
        "One step accumulates gradients with different loss scales",
        ("warning",),
        {
            "": Case(
                "Optimizer {optimizer} was stepped with a sum of gradients that were scaled by {scales}.",
                "The loss scale changed between two backward passes of one step, so some gradients count more than "
                "others.",
                _UPDATE_ONCE,
            ),
            "run": Case("Step {step} accumulates gradients that were scaled by {scales}."),
        },
    ),
    CatalogueEntry(
        "nonfinite-forward",
        "A module's output is inf or NaN in forward",
        ("error",),
        {
            "": Case(
                "{skips} steps in a row were skipped, and the output of {output_of} is inf or NaN in forward.",
                "The forward does not depend on the loss scale, so no loss scale fixes this. A replay of the step "
                "names the op.",
                _WATCH,
            )
        },
    ),
    CatalogueEntry(
        "nonfinite-gradient",
        "Every output is finite, and a gradient is not",
        ("note",),
        {
            "": Case(
                "{skips} steps in a row were skipped. In the next step every output is finite, and the gradient of "
                "{parameter} is the first that is not.",
                "Either the loss scale is still too large and falls until it fits, or the backward of an op overflows "
                "at every loss scale. A replay of the step shows which.",
                _WATCH,
            ),
            "loss": Case(
                "{skips} steps in a row were skipped. In the next step every output that was seen is finite, the loss "
                "is not, and the gradient of {parameter} is the first that is not.",
                "An op between these outputs and the loss makes it inf or NaN; no loss scale fixes this. A replay of "
                "the step names the op.",
                _WATCH,
            ),
        },
        supersedes=("still-skipping",),
    ),
)
