"""The catalogue of findings: for each id its title, severities, sentences and remedies, and what it supersedes.

A rule decides *whether* a finding applies and supplies the numbers. What the finding says, how severe it is, and which
other findings it replaces is written here, once:

    finding("window-too-short", api=run.api, evidence={...}, new_window="1000")

`CATALOGUE` is that table; `python -c "from amplab.diagnose import CATALOGUE; print(CATALOGUE)"` prints it. Fields in
braces are filled in as by `str.format`, from the evidence and from what the rule adds; `{share:percent}` is a share.
Where the code of a remedy depends on the op, the rule passes it as the field `code`; it comes from `remedies.float32`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

from amplab.diagnose.finding import Certainty, Finding, Number, Severity
from amplab.diagnose.remedies.api_styles import Api, PerApi, by_casting, by_scaling
from amplab.display.numbers import percent

__all__ = ["CATALOGUE", "Case", "Catalogue", "CatalogueEntry", "finding"]

# Symptoms without a specific cause: omitted if an error names the cause.
OF_THE_RUN = ("scale-collapse", "nonfinite-loss", "still-skipping")
SYMPTOMS = (*OF_THE_RUN, "nonfinite-parameter")


Text = str | PerApi


class Case(NamedTuple):
    """What a finding says in one situation. An empty text is that of the entry's first case.

    Args:
        symptom: what was observed, one sentence.
        cause: why, one or two sentences.
        remedy: code to paste.
    """

    symptom: Text = ""
    cause: Text = ""
    remedy: Text = ""


@dataclass(frozen=True)
class CatalogueEntry:
    """One kind of finding.

    Args:
        id: lower-case words joined by hyphens.
        title: what it means, in one line.
        severities: the usual one first; a rule may choose a later one where a run shows less harm.
        cases: situation -> what is said, the usual one first; its name is "" where it needs none.
        supersedes: ids that are omitted if this one is found.
        supersedes_as_error: ids that are left out where this one is an error.
        explains: ids that this one may be the cause of: their certainty becomes "possible".
        settles: as a note it needs no action: a report shows one such note, and shows it last.
    """

    id: str
    title: str
    severities: tuple[Severity, ...]
    cases: Mapping[str, Case]
    supersedes: tuple[str, ...] = ()
    supersedes_as_error: tuple[str, ...] = SYMPTOMS
    explains: tuple[str, ...] = ()
    settles: bool = False

    def texts(self, case: str) -> tuple[Text, Text, Text]:
        """Return symptom, cause and remedy of a case."""
        said, first = self.cases[case], next(iter(self.cases.values()))
        return said.symptom or first.symptom, said.cause or first.cause, said.remedy or first.remedy

    def __str__(self) -> str:
        lines = [f"{self.id} [{', '.join(self.severities)}]", f"  {self.title}"]
        if self.supersedes:
            lines.append(f"  supersedes: {', '.join(self.supersedes)}")
        if "error" in self.severities:
            lines.append(f"  as an error, supersedes: {', '.join(self.supersedes_as_error)}")
        if self.explains:
            lines.append(f"  may explain: {', '.join(self.explains)}")
        for name, case in self.cases.items():
            lines += [f"  case {name}:"] if len(self.cases) > 1 and name else []
            lines += [line for word, said in zip(_WORDS, case, strict=True) if said for line in _shown(word, said)]
        return "\n".join(lines)


class Catalogue(Mapping[str, CatalogueEntry]):
    """Id -> entry, in the order in which a person reads them; prints as text."""

    def __init__(self, entries: Iterable[CatalogueEntry]) -> None:
        self._entries = {each.id: each for each in entries}

    def __getitem__(self, name: str) -> CatalogueEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.values()))

    def __repr__(self) -> str:
        return f"<Catalogue: {len(self)} findings>"


_WORDS = ("seen", "because", "to do")


def _shown(word: str, said: Text) -> Iterator[str]:
    """A text as lines; one that differs between APIs once for each group of styles that share it."""
    if isinstance(said, str):
        groups = {said: ""}
    else:
        texts = list(dict.fromkeys(said.texts.values()))
        shared = {each: [style.name for style in said.texts if said.texts[style] == each] for each in texts}
        groups = {text: f" ({', '.join(names)})" for text, names in shared.items()}
        groups |= {said.otherwise: f" (other {said.by})"}
    for text, styles in groups.items():
        if "\n" not in text:
            yield f"    {word}{styles}: {text}"
            continue
        yield f"    {word}{styles}:"
        yield from (f"        {line}" for line in text.split("\n"))


def finding(
    name: str,
    case: str = "",
    /,
    *,
    api: Api | None = None,
    severity: Severity | None = None,
    certainty: Certainty = "certain",
    op: str = "",
    module: str = "",
    tensor: str = "",
    line: str = "",
    evidence: Mapping[str, Number] | None = None,
    **fields: Any,
) -> Finding:
    """Return a finding of the catalogue.

    Args:
        name: its id.
        case: the situation, a key of the entry's `cases`.
        api: what the training loop uses, for the remedy.
        severity: one of the entry's severities; None for the first.
        certainty, op, module, tensor, line, evidence: as in `Finding`.
        fields: what the sentences need in addition.

    Raises:
        KeyError: no entry has this id or case, or a field of its sentences is missing.
        ValueError: the entry does not have this severity.

    >>> finding("launch-bound", evidence={"ops": 12, "median_elements": 64.0}).severity
    'note'
    """
    entry = CATALOGUE[name]
    chosen = severity or entry.severities[0]
    if chosen not in entry.severities:
        raise ValueError(f"severity={chosen!r}: expected one of {', '.join(entry.severities)} for {name}.")
    known = {"op": op, "module": module, "tensor": tensor, "line": line, **(evidence or {}), **fields}
    symptom, cause, remedy = (
        _SENTENCES.vformat(said, (), known) if isinstance(said, str) else said.text(api or Api(), known)
        for said in entry.texts(case)
    )
    return Finding(
        name, chosen, symptom, cause, remedy, certainty,
        op=op, module=module, tensor=tensor, line=line, evidence=evidence or {},
    )  # fmt: skip


class _Sentences(Formatter):
    """Writes a field as `str.format` does, and a share as `{share:percent}`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return percent(value) if format_spec == "percent" else str(super().format_field(value, format_spec))


_SENTENCES = _Sentences()


# -- remedies that several findings share ------------------------------------------------------------------------------

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

_DYNAMIC_SCALE = by_casting(
    'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", loss_scale="dynamic")',
    amplab="scaler = amplab.GradScaler(x.device.type)  # scaler.scale(loss).backward(), scaler.step(optimizer)",
    torch="scaler = torch.amp.GradScaler(x.device.type)  # scaler.scale(loss).backward(), scaler.step(optimizer)",
    half='model, optimizer = amp.initialize(model.float(), optimizer, opt_level="O2")  # dynamic loss scale, masters',
)
_SCALER_STEP = "scaler.step(optimizer)\nscaler.update()"
_WRAPPED = "model = torch.nn.parallel.DistributedDataParallel(model)  # averages gradients in backward"
_SCALED_LOSS = by_scaling(
    "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()\noptimizer.step()",
    scaler=f"scaler.scale(loss).backward()  # instead of loss.backward()\n{_SCALER_STEP}",
)
_SCHEDULER_AFTER_STEP = by_scaling(
    "if amp.last_step(optimizer).stepped:  # amplab.GradScaler: if scaler.last_step.stepped\n    scheduler.step()",
    apex="if amp.last_step(optimizer).stepped:\n    scheduler.step()",
    amplab="if scaler.last_step.stepped:  # after scaler.update()\n    scheduler.step()",
    torch="scale = scaler.get_scale()\nscaler.update()\nif scaler.get_scale() >= scale:\n    scheduler.step()",
    plain="optimizer.step()\nscheduler.step()",
)
_RATE = "for group in optimizer.param_groups:\n    group['lr'] = {rate}  # from the last good checkpoint\n"
_CLIP_MODEL = "torch.nn.utils.clip_grad_norm_(model.parameters(), {most})"
_CLIP_MASTERS = "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), {most})"
_CLIP_UNSCALED = f"scaler.unscale_(optimizer)\n{_CLIP_MODEL}"
_SMALLER_RATE = by_scaling(
    _RATE + _CLIP_MODEL.format(most=1.0) + "  # unscaled; after amp.initialize: amp.master_params",
    apex=_RATE + _CLIP_MASTERS.format(most=1.0),
    scaler=_RATE + _CLIP_UNSCALED.format(most=1.0),
    plain=_RATE + _CLIP_MODEL.format(most=1.0),
)
_SMALLER_RATE_IN_FLOAT32 = (
    "for group in optimizer.param_groups: group['lr'] /= 10  # from the last good checkpoint, and clip"
)
_BCE_WITH_LOGITS = (
    "loss = F.binary_cross_entropy_with_logits(logits.float(), target)  # and remove the sigmoid before it"
)
_UPDATE_ONCE = "scaler.update()  # once per optimizer step, after it; not after each backward"

_RAISED = "The step raised: {message}"
_CAME_IN = "{tensor_name} contained inf or NaN before the step began; {not_finite} is not finite."
_HELD = "{tensor_name} contained inf or NaN before the step began{first_at}; {not_finite} is not finite."
_WROTE = "{fn} wrote {counted}"
_ELEVEN_BITS = (
    "float16 has 11 significant bits. Where E[x^2] and E[x]^2 are nearly equal, their difference is mostly rounding "
    "error."
)
_TOO_LARGE_FORWARD = (
    "The result is larger than 65504. A number divided by this inf becomes 0, and the loss may look normal."
)


def _setting(of_apex: str, of_scaler: str) -> PerApi:
    """The code that sets an argument of the loss scale."""
    initialize = f"model, optimizer = amp.initialize(model, optimizer, {{level_argument}}{of_apex})"
    return by_scaling(
        f"{initialize}  # GradScaler: {of_scaler}",
        apex=initialize,
        amplab=f"scaler = amplab.GradScaler(x.device.type, {of_scaler})",
        torch=f"scaler = torch.amp.GradScaler(x.device.type, {of_scaler})",
        plain=initialize,
    )


def _with(before: str, code: PerApi, after: str = "") -> PerApi:
    """The same code with text around it."""
    texts = {style: f"{before}{text}{after}" for style, text in code.texts.items()}
    return PerApi(code.by, texts, f"{before}{code.otherwise}{after}")


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


_OWN_STEP = by_scaling(
    "{name}.step()  # after the backward of its own loss",
    apex="with amp.scale_loss(loss, {name}) as scaled_loss:  # its own loss\n    scaled_loss.backward()\n{name}.step()",
    scaler="scaler.step({name})  # after the backward of its own loss, before scaler.update()",
)
_WINDOW = _setting("scale_window={new_window}", "growth_interval={new_window}")
_FORGET = (
    "    for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):  # state: of register_comm_hook\n"
    "        kept.clear()"
)

# -- the table ---------------------------------------------------------------------------------------------------------

_RUN = (
    CatalogueEntry(
        "diverging",
        "The loss grows: the update steps are too large",
        ("error",),
        {
            "": Case(
                "The loss went from {first_loss:.4g} to {loss_now:.4g} in {steps_taken} steps that were taken, "
                "{until}.",
                "The update steps are too large. Later overflows are a consequence.",
                _SMALLER_RATE,
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
                _with("", _FIRST_NONFINITE, "  # names the op"),
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
                _with("", _FIRST_NONFINITE, "  # with the batch of that step: names the op"),
            ),
            "taken": Case(remedy=_WATCH),
            "static-scale": Case(
                "",
                "With a static loss scale, here {scale}, a step is taken even if its gradients overflow. From then on "
                "the weights and every loss are NaN.",
                _DYNAMIC_SCALE,
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
                _setting(
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
                    scaler=f"{_SCALER_STEP}\nscheduler.step()",
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
            )
        },
        supersedes=("still-skipping",),
    ),
)

_GRADIENTS = (
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
                    + _CLIP_MODEL.format(most="max_norm"),
                    apex=_CLIP_MASTERS.format(most="max_norm") + "  # after the block of scale_loss",
                    scaler=_CLIP_UNSCALED.format(most="max_norm"),
                    plain=_CLIP_MODEL.format(most="max_norm"),
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
                _RAISED,
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
                _with("# without float16 no loss scale is needed; to use one:\n", _SCALED_LOSS),
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
                _RAISED,
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
                + _SCALER_STEP,
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
                _CLIP_MASTERS.format(most="max_norm"),
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

_PARAMETERS = (
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
                _with("", _SMALLER_RATE, "\n# always step through the scaler"),
            ),
            "unchecked": Case(
                "",
                "An earlier step made this value non-finite. Without a dynamic loss scale, a step is taken even if its "
                "gradients are not finite.",
                _with("", _DYNAMIC_SCALE, "\n# and load the last good checkpoint"),
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

_NONFINITE = (
    CatalogueEntry(
        "scale-too-large",
        "The scaled gradients overflow float16",
        ("error", "note"),
        {
            "": Case(
                "{not_finite} overflows at a loss scale of {scale} and is finite at {fits}.",
                "The scaled gradients are too large for float16; at a smaller loss scale they are not. A static loss "
                "scale lets them reach the weights.",
                _with("", _DYNAMIC_SCALE, "\n# or loss_scale={finite_at_loss_scale:.12g}"),
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
                _WROTE + " from finite inputs up to {input_absmax:.4g}, in float32 too.",
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
                _WROTE + " from inputs up to {input_absmax:.4g}; when the step is repeated, it is finite.",
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

_VALUES = (
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
                _WROTE + " in {dtype} from inputs up to {input_absmax:.4g}.",
                "A number in the code{number} is beyond 65504, the largest float16 number.",
            ),
            "raised": Case(
                _RAISED,
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
                _WROTE + " in {dtype} from inputs up to {input_absmax:.4g}.",
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
                _WROTE + " in {dtype} from inputs up to {input_absmax:.4g}.",
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
                _WROTE + " in {dtype} from inputs up to {input_absmax:.4g}.",
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
                _RAISED,
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
                _DYNAMIC_SCALE,
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
                _setting("dynamic_init_scale={fits:.12g}", "init_scale={fits:.12g}"),
            ),
        },
    ),
)

_SPEED = (
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

_RAISING = (
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
                _RAISED,
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

_RANKS = (
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

CATALOGUE = Catalogue((*_RUN, *_RANKS, *_GRADIENTS, *_PARAMETERS, *_NONFINITE, *_VALUES, *_SPEED, *_RAISING))
"""Every finding of amplab by its id."""
