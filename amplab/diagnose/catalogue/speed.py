"""What the catalogue says of speed: shapes, launches and casts."""

from __future__ import annotations

from amplab.diagnose.catalogue.entry import Case, CatalogueEntry
from amplab.diagnose.remedies.api_styles import by_casting

__all__ = ["SPEED"]

SPEED = (
    CatalogueEntry(
        "shapes-not-multiple-of-8",
        "16-bit products have sizes that tensor cores handle slowly",
        ("note",),
        {
            "": Case(
                "{share:percent} of the 16-bit multiply-adds are in products with a size that is not a multiple of 8.",
                "Tensor cores read eight 16-bit numbers at a time; other shapes are padded or do not use tensor cores.",
                "# pad the vocabulary, the batch or the width: size = -(-size // 8) * 8",
            )
        },
    ),
    CatalogueEntry(
        "launch-bound",
        "The step is launch-bound: its ops are too small for their dtype to matter",
        ("note",),
        {
            "": Case(
                "The median of the {ops:,} ops of a step writes {median_elements:,.0f} elements.",
                "On a GPU, launching such an op takes longer than computing it in any dtype, and casts add ops.",
                "# use a larger batch, CUDA graphs or torch.compile; a 16-bit dtype does not make this step faster",
            )
        },
    ),
    CatalogueEntry(
        "cast-traffic",
        "Casts move many bytes compared with the ops",
        ("note",),
        {
            "": Case(
                "Casts move {cast_bytes:,} bytes, {share:percent} of what the ops move.",
                "Each change of dtype reads and writes the whole tensor; half weights (O2) need fewer casts.",
                by_casting(
                    'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")',
                    apex_half="# keep x in float16 between the ops: remove .float() and .to(...) where they are not "
                    "needed",
                    half="# keep x in float16 between the ops: remove .float() and .to(...) where they are not needed",
                    amplab="with amplab.autocast(x.device.type, torch.float16):  # around the whole forward\n"
                    "    loss = criterion(model(x), target)",
                    torch="with torch.autocast(x.device.type, torch.float16):  # around the whole forward\n"
                    "    loss = criterion(model(x), target)",
                ),
            ),
            "weights": Case(
                cause="Each weight is cast once in a step, however small the batch. Half weights (O2) need no casts.",
                remedy="# use a larger batch, or half weights:\n"
                'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")',
            ),
        },
    ),
)
