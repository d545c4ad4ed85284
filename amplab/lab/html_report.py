"""`report`: one HTML file about a run that opens anywhere: no kernel, no network, no script.

It holds the charts as SVG, the figures, the findings, the skipped steps with their reasons, the changes, the op dtypes
of one step, and the config that repeats the run, all of it unfolded and without scroll boxes, so that it prints. It
holds no path of this machine, and lines of code only if they are asked for.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch

from amplab import __version__
from amplab.amp.run_state.file_format import write_atomically
from amplab.amp.run_state.paths import given_path
from amplab.diagnose import Finding, Findings
from amplab.diagnose.finding_html import finding_html
from amplab.display.html import Markup, dtype_chips, figures, html_table, markup, name, page
from amplab.display.numbers import count, power, size
from amplab.display.run_drawings import run_chart
from amplab.display.text import escape
from amplab.lab.config import ExperimentConfig
from amplab.lab.history import History
from amplab.lab.run_log import Run, create_free
from amplab.lab.tasks import score_named
from amplab.lab.trainer import Trainer
from amplab.lab.watch import Watch
from amplab.lab.watched_run import NO_LEVEL
from amplab.trace import OpRecord, Trace
from amplab.trace.records import folded

__all__ = ["report", "report_html"]

_POINTS = 800
_MOST_SKIPS = 200
_PATH = re.compile(r"(?<![\w<:/.])(?:/|[A-Za-z]:\\)(?:[\w.+@-]+[/\\])+(?=[\w.+@-]+)")

_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>
body {{ margin: 24px auto; max-width: 1000px; padding: 0 16px; font-family: system-ui, sans-serif; }}
:root {{ color-scheme: light dark; background: Canvas; color: CanvasText; }}
h1 {{ font-size: 20px; }}
h2 {{ font-size: 15px; margin: 26px 0 6px; break-after: avoid; }}
main .amplab-plain :is(.scroll, .folds) {{ max-height: none; }}
@media print {{
  body {{ margin: 0; max-width: none; }}
  main .amplab-plain :is(.scroll, .folds) {{ overflow: visible; }}
  tr, svg, pre {{ break-inside: avoid; }}
}}
</style></head>
<body><main><h1>{title}</h1>{body}</main></body></html>
"""


def report(
    run: Trainer | Watch | Run,
    path: str | PathLike[str] = "run.html",
    *,
    trace: Trace | None = None,
    source_lines: bool = False,
) -> Path:
    """Write a report of a run as one HTML file and return where it is.

    Args:
        run: the lab's experiment (`dashboard.trainer`), a `Watch` around a loop of your own, or a `Run` of `load_run`.
        path: the file; if it exists, the report is written beside it as name-2.html, name-3.html, …
        trace: the op dtypes to show, such as `amplab.xray(model, batch).trace`; None for those of the experiment's next
            step, or of the last step that a watch has looked at; a log has none.
        source_lines: whether the report holds lines of code and where they are.

    Raises:
        TypeError: `run` is something else.
        OSError: the file cannot be written.

    Sync: one for a `Watch` or a `Trainer`.
    """
    if not isinstance(run, Trainer | Watch | Run):
        raise TypeError(f"report({run!r}): expected a Trainer, a Watch, or a Run from load_run.")
    text = report_html(run, trace, source_lines=source_lines)
    with create_free(given_path(path), lambda free: free.open("xb")) as file:
        target = Path(file.name)
    try:
        write_atomically(target, lambda file: file.write(text.encode()))
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def report_html(run: Trainer | Watch | Run, trace: Trace | None = None, *, source_lines: bool = False) -> str:
    """Return the report as text; see `report`."""
    trace = _trace_of(run) if trace is None else trace
    config = run.last_config if isinstance(run, Run) else run.config
    history = run.history
    parts = [
        figures(_figures(history, config)),
        *(_section("Ranks", run.rank_table().html()) if isinstance(run, Run) and run.ranks else ()),
        *_section("Charts", _charts(history)),
        *_section("Findings", _findings(run.findings(), source_lines=source_lines)),
        *_section("Skipped steps", _skips(history, source_lines=source_lines)),
        *_section("What was changed", _changes(history)),
        *_section("Op dtypes of one step", _ops(trace, source_lines=source_lines)),
        *_section("Configuration", _config(config)),
    ]
    body = page("", *(_without_paths(part) for part in parts))
    return _FRAME.format(title=f"amplab: {count(len(history), 'step')} of {escape(_what(config))}", body=body)


def _section(title: str, *parts: str) -> tuple[str, ...]:
    return (f"<h2>{title}</h2>", *parts)


def _what(config: object) -> str:
    if isinstance(config, ExperimentConfig):
        return f"{config.model} on {config.task} at {config.opt_level}"
    return str(getattr(config, "model", config))


def _figures(history: History, config: object) -> dict[str, str]:
    last = history.last
    score = score_named(config.task) if isinstance(config, ExperimentConfig) else None
    memory = history.memory[-1][1].total if history.memory else None
    shown = {
        "steps": f"{len(history):,}",
        "skipped": f"{history.skip_count:,}",
        "loss scale": power(last.next_loss_scale, raised=True) if last else "",
        "last loss": "" if (loss := history.loss(-1)) is None else f"{loss:.4g}",
        (score.name if score else ""): score.text(history.last_score)
        if score and history.last_score is not None
        else "",
        "memory": size(memory) if memory else "",
    }
    return {title: value for title, value in shown.items() if title and value}


def _charts(history: History) -> str:
    if not len(history):
        return "<p>No step yet.</p>"
    thinned = history.thinned(["loss", "loss_scale"], _POINTS)
    steps = thinned["step"].tolist()
    changes = [(each.step, each.label) for each in history.changes if each.label != NO_LEVEL]
    skips = [record.step for record in history.skips()[:_MOST_SKIPS]]
    loss = run_chart(steps, thinned["loss"].tolist(), title="Training loss", changes=changes)
    scale = run_chart(
        steps, thinned["loss_scale"].tolist(), title="Loss scale", binary=True, changes=changes, skips=skips
    )
    return f'{loss}{scale}<p class="faint">▼ marks skipped steps and values that are not finite.</p>'


def _findings(found: Findings, *, source_lines: bool) -> str:
    if not found:
        return '<p><span class="good">✓</span> nothing found</p>'
    shown = found if source_lines else [_without_line(each) for each in found]
    return "".join(finding_html(each, is_open=True) for each in shown)


def _without_line(finding: Finding) -> Finding:
    """Leave out the line of code; a remedy may quote it."""
    if not finding.line:
        return finding
    hint = "# The remedy quotes a line of code: write the report with source_lines=True."
    return replace(finding, line="", remedy=hint)


def _skips(history: History, *, source_lines: bool) -> str:
    explanations, skips = history.explanations, history.skips()
    if not skips:
        return "<p>No step was skipped.</p>"
    lines = []
    for record in skips[:_MOST_SKIPS]:
        why = explanations.get(record.step)
        lines.append(
            (
                f"{record.step:,}",
                f"{power(record.loss_scale, raised=True)} → {power(record.next_loss_scale, raised=True)}",
                name(record.first_nonfinite or ""),
                why.sentence if why else (f"injected {record.injected}" if record.injected else "not explained"),
                *((why.line if why else "",) if source_lines else ()),
            )
        )
    heads = ("step", "loss scale", "first gradient that is not finite", "why", *(("line",) if source_lines else ()))
    rest = len(skips) - _MOST_SKIPS
    more = f"<p>… and {rest:,} more.</p>" if rest > 0 else ""
    return html_table(heads, lines, right={0}, caption="Skipped steps") + more


def _changes(history: History) -> str:
    lines = [(f"{each.step:,}", each.text) for each in history.changes]
    return html_table(("step", "change"), lines, right={0}, caption="Changes") if lines else "<p>Nothing.</p>"


def _trace_of(run: Trainer | Watch | Run) -> Trace | None:
    """Return the ops of a run's next step, or of the last one that a watch has looked at; None if there are none."""
    if isinstance(run, Trainer):
        return run.trace()
    return run.traced[1] if isinstance(run, Watch) and run.traced is not None else None


def _ops(trace: Trace | None, *, source_lines: bool) -> str:
    if trace is None:
        return (
            "<p>Not recorded: a log holds no op, and a watch sees them in <code>w.batches(loader)</code> only. Pass "
            "<code>trace=amplab.xray(model, batch, loss=…).trace</code> to show them.</p>"
        )
    groups = [*folded(trace)]
    heads = ("op", "module", "dtypes", "why", *(("line",) if source_lines else ()))
    table = html_table(
        heads,
        [tuple(_op(group, source_lines=source_lines)) for group in groups],
        caption="Op dtypes of one step",
        groups=[group[0].phase for group in groups],
    )
    casts = f"{count(len(trace.casts), 'cast')}, {size(trace.cast_bytes)}" if trace.casts else "no casts"
    return f"<p>{count(sum(map(len, groups)), 'op')}, {casts}</p>{table}"


def _op(group: list[OpRecord], *, source_lines: bool) -> Iterator[str]:
    record = group[0]
    yield name(record.op, len(group))
    yield name(record.module)
    sides = (", ".join(info.dtype_name for info in side) for side in (record.inputs, record.outputs))
    yield dtype_chips(" → ".join(sides))
    yield record.reason
    if source_lines:
        yield f"{record.line}: {record.line.source}" if record.line else ""


def _config(config: object) -> str:
    versions = f"amplab {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    code = f'amplab.lab.open("{config}")' if isinstance(config, ExperimentConfig) else str(config)
    return f'<pre><code>{markup(code)}</code></pre><p class="faint">{escape(versions)}</p>'


def _without_paths(text: str) -> Markup:
    """Leave the last part of each absolute path.

    >>> _without_paths("in /data/nets/unet.py:12, and/or 1/2")
    'in unet.py:12, and/or 1/2'
    """
    return Markup(_PATH.sub("", text))
