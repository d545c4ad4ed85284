"""What the catalogue says of parameters, optimizers, masters and buffers."""

from __future__ import annotations

from amplab.diagnose.catalogue.entry import OF_THE_RUN, SYMPTOMS, Case, CatalogueEntry
from amplab.diagnose.catalogue.shared_texts import DYNAMIC_SCALE, SMALLER_RATE, around
from amplab.diagnose.remedies.api_styles import by_scaling

__all__ = ["PARAMETERS"]

_CAME_IN = "{tensor_name} contained inf or NaN before the step began; {not_finite} is not finite."

_OWN_STEP = by_scaling(
    "{name}.step()  # after the backward of its own loss",
    apex="with amp.scale_loss(loss, {name}) as scaled_loss:  # its own loss\n    scaled_loss.backward()\n{name}.step()",
    scaler="scaler.step({name})  # after the backward of its own loss, before scaler.update()",
)

PARAMETERS = (
    CatalogueEntry(
        "parameter-in-no-optimizer",
        "A parameter has a gradient, but no optimizer updates it",
        ("warning",),
        {
            "": Case(
                "{names} received a gradient, but no optimizer updates {them}.",
                "The optimizer was given other parameters, or was created before these parameters were.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "optimizer-of-another-model",
        "An optimizer has none of the model's parameters",
        ("error",),
        {
            "": Case(
                "Optimizer {optimizer} ({kind}) updates {parameters} parameters, but none belongs to this model.",
                "It was created for another object: a copy, or the model before .cuda(), .half() or a wrapper replaced "
                "its parameters.",
                "model = model.to(device)  # first\noptimizer = torch.optim.{kind}(model.parameters(), ...)  # then",
            )
        },
    ),
    CatalogueEntry(
        "optimizer-never-stepped",
        "An optimizer whose parameters have gradients is never stepped",
        ("error", "note"),
        {
            "": Case(
                "Optimizer {optimizer} was never stepped; {with_gradient} of its parameters have a gradient.",
                "Another optimizer is stepped instead, or the call of its step is missing. Its parameters keep their "
                "initial values.",
                _OWN_STEP,
            ),
            "not-named": Case(
                "",
                "The code of this step does not name the optimizer, so it may be stepped elsewhere. Its gradients add "
                "up unless they are set to zero; .detach() what this loss reads from its module.",
            ),
        },
    ),
    CatalogueEntry(
        "updates-rounded-away",
        "16-bit weights do not change: their updates are too small for the dtype",
        ("warning",),
        {
            "": Case(
                "{share:percent} of the {dtype} weights that optimizer {optimizer} updates do not change.",
                "{dtype} has {bits} significant bits. An update smaller than half of the last bit of a weight is "
                "rounded away; in float32 such updates add up.",
                'model, optimizer = amp.initialize(model.float(), optimizer, opt_level="O2")  # float32 masters\n'
                "# or float32 weights, model.float(), and torch.autocast around the forward",
            )
        },
    ),
    CatalogueEntry(
        "stale-half-weights",
        "Forward reads half copies of weights from before an optimizer step",
        ("error",),
        {
            "": Case(
                "Forward read half copies of {weights} weights that are older than the optimizer's step, and differ "
                "from the weights.",
                "torch.autocast keeps the half copies of weights until its region ends, and this region surrounds "
                "several steps.",
                "torch.clear_autocast_cache()  # after each optimizer step\n"
                "# or open the region in each step, around the forward and the loss alone",
            )
        },
        supersedes=("diverging",),
        explains=("scale-collapse", "nonfinite-loss"),
    ),
    CatalogueEntry(
        "average-in-half",
        "A 16-bit average of the weights does not follow them",
        ("warning",),
        {
            "": Case(
                "{share:percent} of the elements of the {dtype} average of {tensor} that this step should change do "
                "not change.",
                "An average moves by (1 - decay) of its distance to the weights. In {dtype} that is rounded away where "
                "it is smaller than half of the last bit, so the average stands still.",
                "average = copy.deepcopy(model).float()  # kept in float32; where it is used, round a copy of it",
            )
        },
    ),
    CatalogueEntry(
        "statistics-in-half",
        "Running statistics in 16 bits do not follow the batches",
        ("warning",),
        {
            "": Case(
                "The {dtype} running mean of {module} stops up to {deviations:.2g} standard deviations from the mean "
                "of this batch.",
                "It moves by {momentum:g} of its distance to the mean, which {dtype} rounds away where it is smaller "
                "than half of the last bit. Training uses the batch and is right; evaluation uses the running mean.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "adam-on-half",
        "Adam updates half weights directly",
        ("error",),
        {
            "": Case(
                "{kind} updates {half_parameters} half parameters; its eps of {eps:g} is 0 in float16.",
                "Second moments of gradients below 2.4e-4 are 0 in float16 as well, so the update is 0 / 0 or m / eps.",
                "model = model.float()  # instead of model.half()\n"
                'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")  # half weights, float32 masters\n'
                "# or keep half weights, with eps=1e-4",
            )
        },
        supersedes_as_error=(*SYMPTOMS, "diverging"),
    ),
    CatalogueEntry(
        "stale-masters",
        "The model's half weights differ from their float32 masters",
        ("error",),
        {
            "": Case(
                "{parameters} half parameters differ from their float32 masters rounded to float16.",
                "The model's weights were loaded or edited after the masters were created; the next step overwrites "
                "them.",
                "amp.initialize(model, optimizer, ...)  # again, after model.load_state_dict(...)",
            )
        },
    ),
    CatalogueEntry(
        "nonfinite-buffer",
        "A buffer contains inf or NaN",
        ("error",),
        {
            "": Case(
                "{names} {contain} inf or NaN.",
                "A forward pass wrote it, and skipping a step does not undo that.{eval}",
                "{code}  # or load the last good checkpoint\n"
                "# and before the model receives a batch: assert torch.isfinite(x).all()",
            ),
            "came-in": Case(
                _CAME_IN,
                "A forward pass wrote it: BatchNorm adds each batch to its statistics before a step can be skipped.",
                "model.get_submodule({module!r}).reset_running_stats()  # and check the batches",
            ),
        },
    ),
    CatalogueEntry(
        "nonfinite-parameter",
        "A weight contains inf or NaN",
        ("error",),
        {
            "": Case(
                _CAME_IN,
                "An earlier step made this value non-finite. The scaler checks gradients only, so either the update "
                "itself overflowed, or a step did not go through the scaler.",
                around("", SMALLER_RATE, "\n# always step through the scaler"),
            ),
            "unchecked": Case(
                "",
                "An earlier step made this value non-finite. Without a dynamic loss scale, a step is taken even if its "
                "gradients are not finite.",
                around("", DYNAMIC_SCALE, "\n# and load the last good checkpoint"),
            ),
            "no-half": Case(
                "",
                "An earlier step made this value non-finite. No float16 is in this step, so no loss scale fixes this: "
                "the cause is the data, the learning rate, or the gradient of an op.",
                "# from the last good checkpoint; between backward and step, to stop at the first bad batch:\n"
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n"
                "# and with that batch: print(amplab.first_nonfinite(model, batch, step=loss_of))",
            ),
        },
        supersedes_as_error=OF_THE_RUN,
    ),
)
