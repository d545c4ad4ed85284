"""What the catalogue says of the first value that is not finite."""

from __future__ import annotations

from amplab.diagnose.catalogue.entry import Case, CatalogueEntry
from amplab.diagnose.catalogue.shared_texts import DYNAMIC_SCALE, OP_WROTE, around

__all__ = ["NONFINITE"]

_SMALLER_RATE_IN_FLOAT32 = (
    "for group in optimizer.param_groups: group['lr'] /= 10  # from the last good checkpoint, and clip"
)

_HELD = "{tensor_name} contained inf or NaN before the step began{first_at}; {not_finite} is not finite."


def _singular(symptom: str) -> dict[str, Case]:
    """What is said of an op that met a singular point, by what moved a value onto it."""
    causes = {
        "given": "The step is not finite in float32 either, so no dtype and no loss scale fixes this.",
        "bound": "The bound {number:.10g} of {by} is the cause: in {rounded_in} {effect}.",
        "factor": "The factor {number:.10g} in {by} is the cause: in {rounded_in} {effect}.",
        "eps": "The number {number:g} in {by} is the cause: in {rounded_in} {effect}.",
        "end": "The bound {number:g} of {by} is that value itself; it has to be inside.",
        "rounded": "The result of {by} rounds to {ends} in {rounded_in}; in float32 it does not. A .float() after it "
        "would come too late.",
        "unknown": "Its input is rounded to that value on its way; in float32 it is not. Which op rounds is not known.",
        "cast": "A cast to {rounded_in} rounded a float32 number to the value.",
        "saturated": "The result of {by} rounds to {ends} in float32 too, so no dtype and no loss scale fixes this.",
    }
    return {why: Case(symptom, cause, "{code}") for why, cause in causes.items()}


NONFINITE = (
    CatalogueEntry(
        "scale-too-large",
        "The scaled gradients overflow float16",
        ("error", "note"),
        {
            "": Case(
                "{not_finite} overflows at a loss scale of {scale} and is finite at {fits}.",
                "The scaled gradients are too large for float16; at a smaller loss scale they are not. A static loss "
                "scale lets them reach the weights.",
                around("", DYNAMIC_SCALE, "\n# or loss_scale={finite_at_loss_scale:.12g}"),
            ),
            "dynamic": Case(
                "",
                "The scaled gradients are too large for float16; at a smaller loss scale they are not. A dynamic loss "
                "scale adapts by itself.",
                "# no change is needed: the next steps use the smaller loss scale",
            ),
        },
        supersedes=("still-skipping",),
        settles=True,
    ),
    CatalogueEntry(
        "nonfinite-batch",
        "The batch contains inf or NaN",
        ("error",),
        {
            "": Case(
                _HELD,
                "The batch itself is the cause; no dtype and no loss scale fixes this.",
                "assert torch.isfinite(x).all(), 'bad sample'  # in the loader; then drop or repair the sample",
            )
        },
    ),
    CatalogueEntry(
        "nonfinite-input",
        "A tensor from outside the step contains inf or NaN",
        ("error",),
        {
            "": Case(
                _HELD,
                "The tensor itself is the cause; no dtype and no loss scale fixes this.",
                "assert torch.isfinite(x).all(), 'bad sample'  # where x is created; then drop or repair it",
            )
        },
    ),
    CatalogueEntry(
        "inf-given",
        "An op received inf from the code or as an input",
        ("error",),
        {
            "": Case(
                "{fn} received an inf that is written in the code or was passed to it, and wrote {counted}.",
                "inf stays inf in every dtype, and becomes NaN where it is multiplied by 0 or meets another inf. No "
                "loss scale fixes this.",
                "# put it before that line, for each input and weight x that it uses\n"
                "assert torch.isfinite(x).all(), 'inf given'",
            )
        },
    ),
    CatalogueEntry(
        "held-inf-in-half",
        "A buffer or weight of the model became inf in float16",
        ("error",),
        {
            "": Case(
                "{fn} received the {held_as} {held}, which holds inf in float16, and wrote {counted}.",
                "float16 has no number above 65504. A value such as -1e9 is finite in float32 and became -inf when the "
                "model was cast to half.",
                "# give {held} a value that float16 holds, before amp.initialize or model.half(), such as -1e4;\n"
                "# better, mask without it: scores = scores.masked_fill(mask == 0, -1e4)",
            )
        },
        supersedes=("inf-given", "nonfinite-parameter", "nonfinite-buffer"),
    ),
    CatalogueEntry(
        "masked-row",
        "A softmax received a row that is masked completely",
        ("error",),
        {
            "": Case(
                "{fn} received a row in which every element is masked with -inf, and wrote NaN.",
                "A softmax over no elements is 0 / 0 in every dtype.",
                "scores = scores.masked_fill(mask & ~mask.all(-1, keepdim=True), -torch.inf)",
            )
        },
    ),
    CatalogueEntry(
        "masks-added",
        "Adding masks filled with finfo.min gives -inf",
        ("error",),
        {
            "": Case(
                "{fn} received {least:.5g}, the most negative {dtype} number, and wrote {counted}.",
                "The masks contain torch.finfo(dtype).min. If another mask or a negative score is added, the result is "
                "-inf. A softmax of a row of -inf is NaN. The constants are the cause, not the learning rate.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "nonfinite-in-float32",
        "A value overflows in float32 as well",
        ("error",),
        {
            "": Case(
                OP_WROTE + " from finite inputs up to {input_absmax:.4g}, in float32 too.",
                "Neither the loss scale nor the dtype is the cause: the values themselves have become too large.",
                _SMALLER_RATE_IN_FLOAT32,
            ),
            "weights": Case(
                "",
                "Neither the loss scale nor the dtype is the cause: earlier steps made weights as large as "
                "{weights:.4g}.",
            ),
            "batch": Case(
                "",
                "Neither the loss scale nor the dtype is the cause: the batch contains numbers up to {batch:.4g}.",
                "x = (x - x.mean(0)) / x.std(0).clamp_min(1e-5)  # statistics of the training data, in the loader",
            ),
            "undefined": Case(
                "",
                "{fn} is not defined for its input, such as a mean over no elements; nothing overflowed.",
                "value = x.mean() if x.numel() else x.sum()  # where a selection may be empty",
            ),
            "constant": Case(
                "",
                "The number {constant:g} of {by} makes the values this large. The learning rate is not the cause.",
                "{code}",
            ),
            "power": Case(
                "",
                "The result of {fn} is larger than 3.4e+38, the largest float32 number. The weights are not the cause: "
                "they are at most {weights:.4g}.",
                "y = {fn}(x.clamp(-1e6, 1e6))  # or divide by the largest first: x / x.abs().amax()",
            ),
            **{
                follows: Case(
                    "",
                    "{fn} of a number above {limit:g} is larger than 3.4e+38, the largest float32 number: no dtype and "
                    "no loss scale fixes this.{weights_are_fine}",
                    remedy,
                )
                for follows, remedy in {
                    "exp": "y = {fn}(x.clamp(max={most:.0f}))  # torch.exp(x - x.amax(-1, keepdim=True)) for a ratio",
                    "exp-log1p": "y = F.softplus(x)  # log(1 + exp(x)) without computing exp(x)",
                    "exp-log": "y = torch.logsumexp(x, dim=-1)  # F.softplus(x) for log(1 + exp(x)): neither computes "
                    "exp(x)",
                    "exp-ratio": "y = torch.softmax(x, dim=-1)  # or torch.exp(x - x.amax(-1, keepdim=True))",
                }.items()
            },
        },
    ),
    CatalogueEntry(
        "nonfinite-once",
        "A repeated step is finite, so the cause cannot be tested",
        ("error",),
        {
            "": Case(
                OP_WROTE + " from inputs up to {input_absmax:.4g}; when the step is repeated, it is finite.",
                "The step depends on state that amplab does not restore: a list or tensor that forward changes in "
                "place, or a counter or generator outside the modules.",
                "self.register_buffer('count', torch.zeros(()))  # buffers are restored, and saved",
            )
        },
    ),
    CatalogueEntry(
        "log-of-zero",
        "A logarithm received 0",
        ("error",),
        {
            "": Case(
                "{fn} received {input_zeros} zeros and wrote {counted}.",
                "The input is 0 in {zero_dtype}{float32}.",
                "{code}",
            ),
            "softmax": Case(
                "{fn} received {input_zeros} zeros written by softmax, and wrote {counted}.",
                "The smallest probabilities round to 0 in {zero_dtype}; log_softmax does not compute them.",
            ),
        },
    ),
    CatalogueEntry(
        "infinite-value",
        "An op received a value at which it is infinite",
        ("error",),
        _singular("{fn} is infinite at {singular}. It received {received} and wrote {counted}."),
    ),
    CatalogueEntry(
        "division-by-zero",
        "A division by 0",
        ("error",),
        {
            "": Case(
                "{fn} divided by 0 and wrote {counted}.",
                "The divisor is 0 in {dtype}.",
                "y = x / divisor.clamp_min(1e-5)",
            )
        },
    ),
    CatalogueEntry(
        "gradient-undefined",
        "The slope of an op is infinite at a value that it received",
        ("error",),
        {
            **_singular(
                "The slope of {fn} is infinite at {singular}, and its input contains {received}: forward is finite, "
                "the gradient is not."
            ),
            "zero": Case(
                "The gradient of {fn} is not finite, although forward is.",
                "The gradient divides by a number that is 0 here.",
                "x = x.clamp_min(1e-6)  # the input of {fn}; a where after {fn} does not change its gradient",
            ),
        },
    ),
    CatalogueEntry(
        "outside-domain",
        "An op received a number for which it is not defined",
        ("error",),
        {
            "": Case(
                "{fn} is defined on {domain}. It received {beyond} and wrote {counted}.",
                "{fn} of a number outside of {domain} is NaN in every dtype.{float32}",
                "{code}",
            ),
            "gradient": Case(cause="A where after it hides the NaN in forward; in backward, 0 times NaN is NaN."),
        },
    ),
)
