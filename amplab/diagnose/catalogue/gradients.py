"""What the catalogue says of gradients: scaled, unscaled, clipped, accumulated."""

from __future__ import annotations

from amplab.diagnose.catalogue.entry import SYMPTOMS, Case, CatalogueEntry
from amplab.diagnose.catalogue.shared_texts import (
    CLIP_MASTERS,
    CLIP_MODEL,
    CLIP_UNSCALED,
    SCALER_STEP,
    STEP_RAISED,
    around,
)
from amplab.diagnose.remedies.api_styles import by_scaling

__all__ = ["GRADIENTS"]

_SCALED_LOSS = by_scaling(
    "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()\noptimizer.step()",
    scaler=f"scaler.scale(loss).backward()  # instead of loss.backward()\n{SCALER_STEP}",
)

GRADIENTS = (
    CatalogueEntry(
        "clips-scaled-gradients",
        "Gradients are clipped while they are still scaled",
        ("error",),
        {
            "": Case(
                "Gradients with norm {norm:.4g} were clipped by a factor of {factor:.3g} while still multiplied by the "
                "loss scale, {scale}.",
                "Their true norm is {true_norm:.4g}. The limit is compared with the scaled norm, so the gradients "
                "become too small, by a factor that changes with the loss scale.",
                by_scaling(
                    "scaler.unscale_(optimizer)  # with a GradScaler; with scale_loss: clip after its block,\n"
                    + CLIP_MODEL.format(most="max_norm"),
                    apex=CLIP_MASTERS.format(most="max_norm") + "  # after the block of scale_loss",
                    scaler=CLIP_UNSCALED.format(most="max_norm"),
                    plain=CLIP_MODEL.format(most="max_norm"),
                ),
            ),
            "some": Case(
                "{scaled} of the {clipped} gradients that were clipped together were still multiplied by the loss "
                "scale, {scale}; the others were not.",
                "The scaled ones make up nearly all of the common norm, so the clipping makes every gradient too "
                "small, by a factor that changes with the loss scale. They are those of optimizer {optimizer}.",
                by_scaling(
                    "scaler.unscale_(optimizers[{optimizer}])  # as well, before the clipping",
                    apex="with amp.scale_loss(loss, optimizers) as scaled_loss:  # every optimizer that it reaches\n"
                    "    scaled_loss.backward()",
                ),
            ),
        },
    ),
    CatalogueEntry(
        "stepped-with-scaled-gradients",
        "The optimizer uses gradients that are still scaled",
        ("error",),
        {
            "": Case(
                "Optimizer {optimizer} was stepped with {gradients} of its gradients still multiplied by the loss "
                "scale.",
                by_scaling(
                    "The step is inside the block of scale_loss, or this optimizer was not passed to scale_loss (or to "
                    "scaler.step).",
                    scaler="The code calls optimizer.step(). Only scaler.step(optimizer) unscales the gradients and "
                    "skips a step that overflows.",
                ),
                by_scaling(
                    "with amp.scale_loss(loss, [optimizer_a, optimizer_b]) as scaled_loss:  # all optimizers that this "
                    "backward reaches\n    scaled_loss.backward()\noptimizer_a.step(); optimizer_b.step()  # after the "
                    "block",
                    scaler="scaler.step(optimizer)  # instead of optimizer.step()\nscaler.update()",
                ),
            ),
            "raised": Case(
                STEP_RAISED,
                "The gradients are unscaled at the end of the block of scale_loss; inside it they are still multiplied "
                "by the loss scale.",
                _SCALED_LOSS.otherwise,
            ),
        },
        supersedes_as_error=(*SYMPTOMS, "diverging"),
    ),
    CatalogueEntry(
        "loss-not-scaled",
        "A loss is not scaled although a loss scale is in use",
        ("warning", "note", "error"),
        {
            "": Case(
                "{gradients} gradients of optimizer {optimizer} do not depend on the loss scale: their loss is not "
                "scaled.",
                "Gradients below 2^-24 become 0 in float16; the loss scale is there to prevent that.",
                _SCALED_LOSS,
            ),
            "no-half": Case(
                "",
                "No op of this step writes float16, so nothing is lost.",
                around("# without float16 no loss scale is needed; to use one:\n", _SCALED_LOSS),
            ),
            "divided": Case(
                "{gradients} gradients of optimizer {optimizer} are divided by the loss scale, {scale}, but do not "
                "depend on it: their loss is not scaled.",
                "The step divides every gradient by the loss scale, so these are too small by that factor.",
                by_scaling(
                    "scaler.scale(auxiliary_loss).backward()  # every loss, before its backward",
                    apex="with amp.scale_loss(loss + auxiliary_loss, optimizer) as scaled_loss:  # every loss\n"
                    "    scaled_loss.backward()",
                ),
            ),
        },
    ),
    CatalogueEntry(
        "loss-depends-on-scale",
        "The loss, before it is scaled, depends on the loss scale",
        ("error",),
        {
            "": Case(
                "The loss, before it is scaled, is {loss:.4g} at a loss scale of {scale} and "
                "{loss_at_half_the_scale:.4g} at {half}.",
                "A derivative in the loss, as of a gradient penalty or a physical law, is taken of a scaled value and "
                "is not divided by the loss scale before it enters the loss.",
                by_scaling(
                    "(slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)  # of u itself, not scaled",
                    scaler="slope = slope / scaler.get_scale()  # what torch.autograd.grad returned",
                ),
            )
        },
        supersedes_as_error=(*SYMPTOMS, "diverging"),
        explains=(
            *("overflow-in-half", "logits-overflow-half", "reduction-overflows-half", "nonfinite-in-float32"),
            *("cast-overflows-half", "scale-too-large"),
        ),
    ),
    CatalogueEntry(
        "unscaled-twice",
        "Gradients are divided by the loss scale twice",
        ("error",),
        {
            "": Case(
                "Optimizer {optimizer} was stepped with {gradients} of its gradients divided by the loss scale twice.",
                by_scaling(
                    "The code divides the gradients by the loss scale, and scale_loss or scaler.step does so again.",
                    apex="The code divides the gradients by the loss scale, and scale_loss does so again.",
                    plain="The code divides the gradients by the loss scale, and scale_loss does so again.",
                    scaler="The code divides the gradients by the loss scale, and scaler.step does so again.",
                ),
                by_scaling(
                    "scaler.unscale_(optimizer)  # instead of the division; scaler.step then does not unscale again",
                    apex="# remove the division: after the block of scale_loss the gradients are unscaled",
                ),
            ),
            "raised": Case(
                STEP_RAISED,
                "unscale_ was called twice for one optimizer between two calls of update.",
                "scaler.unscale_(optimizer)  # once, after the last backward and before clipping",
            ),
        },
        supersedes_as_error=(*SYMPTOMS, "diverging"),
    ),
    CatalogueEntry(
        "unscaled-too-early",
        "Gradients are unscaled before the last backward of a step",
        ("error",),
        {
            "": Case(
                "Optimizer {optimizer} was stepped with {gradients} gradients that were unscaled before the last "
                "{backwards} had added to them.",
                "What a backward adds after unscale_ is still multiplied by the loss scale, {scale}, and nothing "
                "unscales it. It is much larger than the rest.",
                "scaler.unscale_(optimizer)  # once per step: after its last backward, before clipping",
            )
        },
        supersedes_as_error=(*SYMPTOMS, "diverging"),
    ),
    CatalogueEntry(
        "two-scalers",
        "Two scalers unscale the gradients of one optimizer",
        ("error",),
        {
            "": Case(
                "The gradients of optimizer {optimizer} were unscaled {times} times in one step, by different scalers.",
                "Each scaler divides them by its own loss scale and steps the optimizer: one step uses gradients that "
                "are too small, and an optimizer with momentum steps twice.",
                "scaler.scale(first_loss + second_loss).backward()  # one scaler for all losses of an optimizer\n"
                + SCALER_STEP,
            )
        },
        supersedes=("unscaled-twice", "stepped-with-scaled-gradients", "loss-not-scaled"),
        supersedes_as_error=(*SYMPTOMS, "diverging"),
    ),
    CatalogueEntry(
        "another-scaler",
        "The loop uses another GradScaler than the one that was passed",
        ("error",),
        {
            "": Case(
                "Another scaler than the one that was passed divided the gradients: by {used_scale}. The one that was "
                "passed has a loss scale of {passed_scale}.",
                "The loop makes a new scaler, for example in each epoch, or uses one that was not passed. A new scaler "
                "begins at its init_scale again and skips steps until its scale fits.",
                "scaler = amplab.GradScaler()  # once, before the first epoch; pass this scaler, and save its "
                "state_dict",
            )
        },
        supersedes=("clips-scaled-gradients", "stepped-with-scaled-gradients", "unscaled-twice", "two-scalers"),
    ),
    CatalogueEntry(
        "nonfinite-gradients-hidden",
        "Gradients that are inf or NaN are replaced before the scaler checks them",
        ("error",),
        {
            "": Case(
                "{gradients} gradients were inf or NaN after backward; the loop replaced these values, and the "
                "optimizer used what was left.",
                "found_inf stays 0, so the step is not skipped and the loss scale does not fall: every step whose "
                "gradients overflow uses wrong gradients.",
                "# remove the line that replaces inf and NaN in the gradients; the scaler skips such a step",
            )
        },
        supersedes=("stepped-with-scaled-gradients", "scale-too-large", "nonfinite-gradient"),
    ),
    CatalogueEntry(
        "added-to-scaled-gradients",
        "A term is added to gradients that are still scaled",
        ("error",),
        {
            "": Case(
                "A term with norm {added:.4g} was added to gradients that were still multiplied by the loss scale, "
                "{scale}; at another loss scale it is the same.",
                "Unscaling divides the term by the loss scale as well, so it has almost no effect.",
                by_scaling(
                    "# add the term to the gradients after the block of scale_loss, before optimizer.step()\n"
                    "for parameter in amp.master_params(optimizer):\n"
                    "    parameter.grad.add_(parameter.detach(), alpha=weight_decay)  # your own term",
                    scaler="scaler.unscale_(optimizer)  # before the line that adds the term",
                ),
            )
        },
    ),
    CatalogueEntry(
        "backward-not-linear",
        "Backward limits gradients that are still scaled",
        ("error",),
        {
            "": Case(
                "{gradients} gradients do not grow with the loss scale, {scale}, although those of later layers do; at "
                "a small loss scale they are smaller.",
                "A hook or the backward of an autograd.Function limits its gradient to a fixed size. In backward the "
                "gradient is multiplied by the loss scale, so a limit meant for its true size cuts nearly all of it.",
                by_scaling(
                    "limit * amp.state_dict()['loss_scaler0']['loss_scale']  # in the hook, instead of limit",
                    scaler="limit * scaler.get_scale()  # in the hook, instead of limit",
                ),
            )
        },
        supersedes=("loss-not-scaled", "stepped-with-scaled-gradients"),
    ),
    CatalogueEntry(
        "gradients-rounded",
        "Unscaled gradients are rounded to float16",
        ("warning",),
        {
            "": Case(
                "{share:percent} of the elements of {tensor} that backward made non-zero are 0 at the step, and "
                "float16 holds every value that is left.",
                "The gradients were rounded to float16 after they had been divided by the loss scale, {scale}. Values "
                "below 2^-25 become 0, which the loss scale is there to prevent.",
                by_scaling(
                    "# round the gradients inside the block of scale_loss, or keep them in float32",
                    scaler="# round the gradients before scaler.unscale_(optimizer), or keep them in float32",
                ),
            )
        },
    ),
    CatalogueEntry(
        "zero-grad-in-accumulation",
        "Gradients are set to zero between the backwards of one step",
        ("error",),
        {
            "": Case(
                "Optimizer {optimizer} was stepped with the gradients of the last backward alone; those of {before} "
                "before it were dropped.",
                "zero_grad runs before every backward instead of once per step, so the step does not see the other "
                "batches.",
                "optimizer.zero_grad()  # once per step, before its first backward",
            )
        },
    ),
    CatalogueEntry(
        "gradients-left-over",
        "Gradients that are not finite stay after a skipped step",
        ("error",),
        {
            "": Case(
                "{gradients} gradients that were inf or NaN after a skipped step were still there at the next "
                "backward, which added to them.",
                "zero_grad does not run after a skipped step. What is added to inf or NaN stays inf or NaN, so every "
                "later step is skipped and the loss scale falls; these steps themselves may be finite.",
                "optimizer.zero_grad()  # once in every step, also after a step that was skipped",
            )
        },
        supersedes=("scale-too-large", "nonfinite-gradient", "still-skipping"),
    ),
    CatalogueEntry(
        "clips-model-gradients",
        "Clipping does not reach the gradients of the float32 masters",
        ("warning",),
        {
            "": Case(
                "{clipped} gradients were clipped, and none of the {masters} gradients of the float32 masters was.",
                "model.parameters() returns the half weights; the optimizer uses the gradients of the masters.",
                CLIP_MASTERS.format(most="max_norm"),
            ),
            "by-name": Case(
                "{op} receives the model's parameters, so the gradients of the {masters} float32 masters are not "
                "clipped.",
                "After backward the masters have the gradients; those of the half weights are None.",
                "torch.nn.utils.{op}(amp.master_params(optimizer), max_norm)",
            ),
        },
        supersedes=("diverging",),
    ),
)
