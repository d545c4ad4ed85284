"""What the catalogue says of finite values at the limits of float16: range, digits and underflow."""

from __future__ import annotations

from amplab.diagnose.catalogue.entry import Case, CatalogueEntry
from amplab.diagnose.catalogue.shared_texts import DYNAMIC_SCALE, OP_WROTE, STEP_RAISED, scale_setting

__all__ = ["VALUES"]

_BCE_WITH_LOGITS = (
    "loss = F.binary_cross_entropy_with_logits(logits.float(), target)  # and remove the sigmoid before it"
)

_ELEVEN_BITS = (
    "float16 has 11 significant bits. Where E[x^2] and E[x]^2 are nearly equal, their difference is mostly rounding "
    "error."
)

_TOO_LARGE_FORWARD = (
    "The result is larger than 65504. A number divided by this inf becomes 0, and the loss may look normal."
)

VALUES = (
    CatalogueEntry(
        "constant-underflows-half",
        "A constant, such as an eps, is 0 in float16",
        ("error", "warning", "note"),
        {
            "": Case(
                "{op} received {constant:g}, which is 0 in float16{then}.",
                "float16 rounds magnitudes up to 2^-25 = 2.98e-08 to 0.",
                "{code}",
            ),
            "nonfinite": Case(
                "{fn} received 0: the constant {constant:g} of {op} before it is 0 in float16.",
                "float16 rounds magnitudes up to 2^-25 = 2.98e-08 to 0; its smallest number is 5.96e-08.",
            ),
        },
    ),
    CatalogueEntry(
        "constant-overflows-half",
        "A constant, such as a mask of -1e9, is inf in float16",
        ("error", "note"),
        {
            "": Case(
                "{op} received {constant:g} and wrote {infs:,} inf.",
                "The largest float16 number is 65504.",
                "{code}",
            ),
            "nonfinite": Case(
                OP_WROTE + " in {dtype} from inputs up to {input_absmax:.4g}.",
                "A number in the code{number} is beyond 65504, the largest float16 number.",
            ),
            "raised": Case(
                STEP_RAISED,
                "A number in the code is larger than 65504, the largest float16 number, and is written into a float16 "
                "tensor.",
            ),
        },
    ),
    CatalogueEntry(
        "cast-overflows-half",
        "A cast to float16 overflows",
        ("note",),
        {
            "": Case(
                "A cast to float16 turned {lost:,} finite values into inf.",
                "The largest of them is {input_absmax:.4g}; the largest float16 number is 65504.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "norm-of-constant",
        "A norm layer receives groups whose elements are all equal",
        ("warning",),
        {
            "": Case(
                "Every group that {op} received has a variance of 0, so its output is its bias alone.",
                "Nothing of the input passes, and the gradient of the input is multiplied by 1 / sqrt(eps) = "
                "{gain:.4g}, so that it overflows at loss scales that fit elsewhere.",
                "assert (x.flatten(1).std(1) > 0).all(), 'constant sample'  # x is what the model receives",
            ),
            "single": Case(
                "Every group that {op} received has a single element, so its output is its bias alone.",
                "",
                "model.get_submodule({module!r}).num_groups = 1  # or another number that leaves several elements each",
            ),
        },
        supersedes=("scale-too-large",),
    ),
    CatalogueEntry(
        "square-underflows-half",
        "Squares of small numbers are 0 in float16",
        ("warning",),
        {
            "": Case(
                "{lost:,} of {nonzero:,} non-zero numbers have a square that is 0 in float16.",
                "Squares of numbers below 2.4e-4 are smaller than the smallest float16 number; squares of numbers from "
                "256 on overflow.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "overflow-in-half",
        "A result is larger than 65504, the largest float16 number",
        ("error", "warning", "note"),
        {
            "": Case(
                "{op} wrote {infs:,} inf in float16 from inputs up to {input_absmax:.4g}.",
                _TOO_LARGE_FORWARD,
                "{code}",
            ),
            "nonfinite": Case(
                OP_WROTE + " in {dtype} from inputs up to {input_absmax:.4g}.",
                "The result is larger than 65504; the same step is finite in float32 {bfloat16}.",
            ),
        },
    ),
    CatalogueEntry(
        "logits-overflow-half",
        "The scores that a softmax reads overflow float16",
        ("error",),
        {
            "nonfinite": Case(
                OP_WROTE + " in {dtype} from inputs up to {input_absmax:.4g}.",
                "The result is larger than 65504; the same step is finite in float32 {bfloat16}. A softmax reads it.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "reduction-overflows-half",
        "A sum, mean or norm overflows float16",
        ("error", "warning"),
        {
            "": Case(
                "{op} wrote {infs:,} inf in float16 from inputs up to {input_absmax:.4g}.",
                _TOO_LARGE_FORWARD,
                "{code}",
            ),
            "nonfinite": Case(
                OP_WROTE + " in {dtype} from inputs up to {input_absmax:.4g}.",
                "The result is larger than 65504; the same step is finite in float32 {bfloat16}.",
            ),
        },
    ),
    CatalogueEntry(
        "reduction-near-overflow",
        "A sum, mean or norm is close to the largest float16 number",
        ("note",),
        {
            "": Case(
                "{op} over {reduced:,} elements is {result:.4g} in float16.",
                "The largest float16 number is 65504; a longer row or larger values would overflow.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "variance-in-half",
        "A variance by E[x^2] - E[x]^2 in float16 is rounding error",
        ("error", "warning"),
        {
            "": Case(
                "{op} of float16 numbers up to {input_absmax:.4g} gave a variance of at most {left:.4g}.",
                _ELEVEN_BITS,
                "{code}",
            ),
            "nonfinite": Case(
                "{fn} received a difference of float16 numbers that is negative, down to {lowest:.4g}, and wrote "
                "{counted}.",
                f"{_ELEVEN_BITS} In float32 the step is finite.",
            ),
        },
    ),
    CatalogueEntry(
        "digits-lost-in-half",
        "Large numbers, such as times and positions, lose the digits that an op needs",
        ("warning",),
        {
            "": Case(
                "{op} received float16 numbers up to {input_absmax:.5g}, where neighbors are {spacing:g} apart.",
                "The phase of {op} is lost: its period is 6.28.{origin}",
                "{code}",
            ),
            "difference": Case(
                "{op} of float16 numbers up to {input_absmax:.5g}, which are up to {spacing:g} apart, is at most "
                "{left:.4g}.",
                "The difference is mostly rounding error.{origin}",
            ),
            "index": Case(
                "float16 numbers up to {input_absmax:.5g} were converted to integers.",
                "From 2048 on float16 does not hold every integer; here its neighbors are up to {spacing:g} "
                "apart.{origin}",
            ),
            "target": Case(
                "{op} writes float16 predictions for targets up to {target_absmax:.6g} that differ by {spread:.3g}.",
                "float16 numbers of that size are {spacing:g} apart, so predictions cannot follow the targets.{origin} "
                "Or subtract the mean from the targets and divide by their deviation.",
            ),
        },
    ),
    CatalogueEntry(
        "exponential-in-half",
        "An exponential or power comes close to an end of the float16 range",
        ("note",),
        {
            "": Case(
                "{op} in float16 {what} among {elements:,} elements.",
                "float16 reaches from 6e-08, which is exp(-16.6), to 65504, which is exp(11.1).",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "logarithm-in-half",
        "A logarithm received float16 numbers with few bits",
        ("note",),
        {
            "": Case(
                "{op} received float16 numbers down to {smallest:.4g}.",
                "Below 6.1e-05 float16 has fewer than 11 significant bits. Magnitudes up to 2.98e-08 are 0, and the "
                "logarithm of 0 is -inf.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "softmax-in-half",
        "A softmax in float16 rounds small probabilities to 0",
        ("note",),
        {
            "": Case(
                "softmax in float16 wrote {zeros:,} zeros among {elements:,} probabilities.",
                "Probabilities up to 2^-25 are 0 in float16; the logarithm of 0 is -inf.",
                "{code}",
            )
        },
    ),
    CatalogueEntry(
        "bce-after-sigmoid",
        "binary_cross_entropy reads a sigmoid, whose results round to 0 and 1",
        ("error", "warning", "note"),
        {
            "": Case(
                "binary_cross_entropy reads a sigmoid in {dtype}{saturated}.",
                "float16 rounds probabilities to 1 from a logit of 8.3 on, float32 from 17 on. The loss is then "
                "clamped and its gradient is 0.",
                _BCE_WITH_LOGITS,
            ),
            "nonfinite": Case(
                "The gradient of binary_cross_entropy overflows: {fn} wrote {counted}.",
                "Where a probability rounds to 0 or 1, the gradient is about 1 / 1e-12.",
            ),
            "raised": Case(
                STEP_RAISED,
                "Probabilities round to 0 and 1 in float16. The loss is then clamped and has no gradient.",
            ),
        },
    ),
    CatalogueEntry(
        "gradients-underflow",
        "Gradients become 0 in float16",
        ("warning", "note", "error"),
        {
            "": Case(
                "{share:percent} of the non-zero gradient elements are 0 in float16 at a loss scale of {scale}.",
                "Even scaled they are not larger than 2^-25, which rounds to 0.",
                DYNAMIC_SCALE,
            ),
            "downstream": Case(
                "The gradients of {lost} of {parameters} parameters are lost at a loss scale of {scale}; at {larger} "
                "they are as in float32.",
                "An op of backward rounds results up to 2^-25 to 0 in float16, and what is computed from them is 0 "
                "as well.",
            ),
            "disabled": Case(
                "The GradScaler is disabled, and the gradients of {lost} of {parameters} parameters are lost in "
                "float16; at a loss scale of {larger} they are as in float32.",
                "A GradScaler with enabled=False does not scale the loss, so an op of backward rounds results up to "
                "2^-25 to 0, and what is computed from them is 0 as well.",
                "scaler = {made}.GradScaler(x.device.type)  # not enabled=torch.cuda.is_available(): the CPU needs it "
                "too",
            ),
            "dynamic": Case(
                "The gradients of {lost} of {parameters} parameters are lost at a loss scale of {scale}; at {larger} "
                "they are as in float32.",
                "An op of backward rounds results up to 2^-25 to 0 in float16. A dynamic loss scale grows by itself.",
                scale_setting("dynamic_init_scale={fits:.12g}", "init_scale={fits:.12g}"),
            ),
        },
    ),
)
