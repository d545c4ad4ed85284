"""What the catalogue says of a step that raised, and of one that could not be explained."""

from __future__ import annotations

from amplab.diagnose.catalogue.entry import Case, CatalogueEntry
from amplab.diagnose.catalogue.shared_texts import STEP_RAISED

__all__ = ["RAISED"]

RAISED = (
    CatalogueEntry(
        "step-not-explained",
        "A watch could not run a step again",
        ("note",),
        {
            "": Case(
                "Step {step} was not explained, because the watch could not run it again: {failure}",
                "A watch runs a bad step again with its `step` or `loss`. That call failed; the training went on.",
                "loss_of(model, batch)  # what `step` calls must run after the step, and return the loss",
            ),
            "ranks": Case(
                cause="A watch runs a bad step again on its own rank. The others do not, so it would wait forever.",
                remedy="def print_if_bad(module, args, out):\n"
                "    if isinstance(out, torch.Tensor) and not torch.isfinite(out).all():\n"
                "        print(torch.distributed.get_rank(), module)\n"
                "for module in model.modules():  # on every rank, before the loop\n"
                "    module.register_forward_hook(print_if_bad)",
            ),
        },
    ),
    CatalogueEntry(
        "recomputed-without-casts",
        "torch.utils.checkpoint recomputes a block without amplab's casts",
        ("error",),
        {
            "raised": Case(
                STEP_RAISED,
                "torch.utils.checkpoint runs the block again in backward, where amplab's casts are not active, so its "
                "dtypes differ.",
                "hidden = amplab.checkpoint(block, hidden, use_reentrant=False)  # instead of torch.utils.checkpoint",
            )
        },
    ),
    CatalogueEntry(
        "step-raised",
        "The step raises an exception",
        ("error",),
        {
            "": Case(
                "The step raised {error}: {message}",
                "A step that raises cannot be examined further.",
                "{called}  # shows the traceback",
            )
        },
    ),
)
