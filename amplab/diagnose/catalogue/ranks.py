"""What the catalogue says of several ranks."""

from __future__ import annotations

from amplab.diagnose.catalogue.entry import Case, CatalogueEntry
from amplab.diagnose.remedies.api_styles import by_scaling

__all__ = ["RANKS"]

_WRAPPED = "model = torch.nn.parallel.DistributedDataParallel(model)  # averages gradients in backward"

_FORGET = (
    "    for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):  # state: of register_comm_hook\n"
    "        kept.clear()"
)

RANKS = (
    CatalogueEntry(
        "ranks-skip-differently",
        "Some ranks skip a step that others take",
        ("error",),
        {
            "": Case(
                "Step {first_step} was skipped on {skipping} and taken on {taking}; {steps} of {all_steps} steps "
                "differ.",
                "Each rank checked gradients of its own, before they were averaged. From this step on the weights and "
                "the loss scales of the ranks differ.",
                _WRAPPED,
            )
        },
        supersedes=("scale-differs-by-rank", "weights-differ-by-rank"),
    ),
    CatalogueEntry(
        "scale-differs-by-rank",
        "The loss scales of the ranks differ",
        ("error",),
        {
            "": Case(
                "The ranks skipped the same steps, but from step {first_step} on their loss scales differ: {scales}.",
                "The gradients of the ranks are averaged while they are scaled, so they must have one scale. A scaler "
                "is updated or restored on some ranks only.",
                by_scaling(
                    "scaler.load_state_dict(saved['scaler'])  # on every rank, not only where rank == 0",
                    apex="amp.load_state_dict(saved['amp'])  # on every rank, not only where rank == 0",
                ),
            ),
            "now": Case("The loss scales of the ranks differ: {scales}."),
        },
        supersedes=("weights-differ-by-rank",),
    ),
    CatalogueEntry(
        "optimizer-differs-by-rank",
        "The ranks update their weights with different settings",
        ("error",),
        {
            "": Case(
                "{when} {settings}.",
                "The ranks make different updates of the same averaged gradients, so their weights differ.",
                "optimizer = torch.optim.SGD(model.parameters(), lr=lr)  # the same settings on every rank\n"
                "scheduler.step()  # on every rank, not only where rank == 0",
            )
        },
        supersedes=("weights-differ-by-rank",),
    ),
    CatalogueEntry(
        "weights-differ-by-rank",
        "The weights of the ranks differ",
        ("error",),
        {
            "": Case(
                "{when} the weights of {differing} differ from those of {usual}.",
                "DistributedDataParallel gives all ranks the same gradients and, when it wraps the model, the same "
                "weights. Something else changes the weights of some ranks, such as a checkpoint that one rank loads.",
                "for value in model.state_dict().values():  # after the last change of single ranks\n"
                "    torch.distributed.broadcast(value, src=0)",
            ),
            "unwrapped": Case(
                cause="No DistributedDataParallel was seen, which averages the gradients of all ranks. Without it each "
                "rank trains a model of its own. If the loop averages the weights itself, as local SGD does, they may "
                "differ until the next average, and nothing is wrong.",
                remedy=_WRAPPED,
            ),
        },
    ),
    CatalogueEntry(
        "rank-lost",
        "A rank ended or hung, and others did not",
        ("error", "note"),
        {
            "": Case(
                "{lost} ended without closing its log; the last step in it is {last_step}.{others}{raised}",
                "The process was killed, ran out of memory, or left by os._exit. The last quarter of a second before "
                "that may be missing from its log.",
                "# the output of this rank says why: torchrun --log-dir logs --redirects 3 ...\n"
                "# on its host: dmesg | grep -i 'out of memory'",
            ),
            "hung": Case(
                "{lost} still runs and writes nothing; the last step in its log is {last_step}.{others}{raised}",
                "The others waited for it until the timeout of the process group: it hangs, or runs code that the "
                "others do not.",
                "# which line this rank is in: py-spy dump --pid PID",
            ),
            "all": Case(
                "No rank has closed its log; the last step that all have is {last_step}.",
                "The processes were ended from outside, all of them or one by one.",
                "# keep the output of every rank: torchrun --log-dir logs --redirects 3 ...",
            ),
        },
        supersedes_as_error=(),
    ),
    CatalogueEntry(
        "gradient-missing-on-a-rank",
        "Parameters get a gradient on some ranks only",
        ("error", "note"),
        {
            "": Case(
                "On rank {rank} the backward did not reach {missing}, first {tensor}; on other ranks it did.",
                "DistributedDataParallel waits until every rank has a gradient of every parameter: training stops in "
                "this step, or fails in the next one.",
                "model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)",
            ),
            "unwrapped": Case(
                cause="The doctor was given a model without DistributedDataParallel. Around it, the wrapper needs "
                "find_unused_parameters=True; amp.initialize(combine_ddp=True) counts the gradient as zero.",
            ),
        },
    ),
    CatalogueEntry(
        "wrapped-before-initialize",
        "DistributedDataParallel wrapped the model before amp.initialize",
        ("error",),
        {
            "": Case(
                "{changed} had the dtype {before} when DistributedDataParallel wrapped the model, first {tensor}, and "
                "now {now}.",
                "The wrapper averages gradients by hooks that PyTorch drops when the dtype of a parameter changes: "
                "each rank now trains on its own gradients.",
                'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")  # first\n' + _WRAPPED,
            )
        },
        supersedes=("weights-differ-by-rank",),
    ),
    CatalogueEntry(
        "batchnorm-not-synchronized",
        "Each rank normalizes with statistics of its own",
        ("note", "warning"),
        {
            "": Case(
                "{counted} normalize with the statistics of one rank, each with {samples}; the first is {module}.",
                "The statistics of {ranks} ranks differ, and with few samples they are noisy. The running statistics "
                "are those of rank 0.",
                "model = amplab.parallel.convert_syncbn_model(model)\n"
                "model = amplab.parallel.DistributedDataParallel(model)  # torch's refuses SyncBatchNorm on the CPU",
            )
        },
    ),
    CatalogueEntry(
        "compression-keeps-nonfinite",
        "The compression of gradients adds NaN to every later step",
        ("error",),
        {
            "": Case(
                "The {state} holds NaN or inf of an earlier step in {kept}.",
                "{state} adds the error of earlier gradients to the next ones, and begins with their factors. After "
                "one overflow every gradient is NaN, and every step is skipped at any loss scale.",
                by_scaling(
                    f"if not amp.last_step(optimizer).stepped:  # of a scaler: scaler.last_step\n{_FORGET}",
                    apex=f"optimizer.step()\nif not amp.last_step(optimizer).stepped:\n{_FORGET}",
                    amplab=f"scaler.update()\nif not scaler.last_step.stepped:\n{_FORGET}",
                    torch=f"scale = scaler.get_scale()\nscaler.update()\nif scaler.get_scale() < scale:\n{_FORGET}",
                ),
            )
        },
    ),
)
