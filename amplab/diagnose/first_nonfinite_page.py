"""`FirstNonfinite` as text and as HTML: the result and the cause, then the ops from the first one to the result."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from amplab.display.html import Markup, dtype_chips, figures, markup, name, page
from amplab.display.numbers import number
from amplab.display.text import labelled
from amplab.trace import OpRecord

if TYPE_CHECKING:
    from amplab.diagnose.first_nonfinite import FirstNonfinite

__all__ = ["html", "sentence", "text"]

_CAUSES = {
    "scale": "it is finite at a smaller loss scale",
    "format": "it is finite in float32",
    "model": "it is not finite in float32 either",
    "state": "a second run of the same step was finite: it depends on state that is not restored",
    "batch": "it is in the batch",
    "buffer": "it is in a buffer",
    "parameter": "it is in a parameter",
    "input": "it is in a tensor without a name",
}
_MOST = 12  # ops to show


def sentence(found: FirstNonfinite) -> str:
    """Return the result and the cause in one line."""
    return f"{found.result} is not finite: the {found.cause}"


def text(found: FirstNonfinite) -> str:
    """Return the finding as a few lines."""
    record = found.record
    where = f"{record.op} in {record.module or 'no module'} ({found.phase})" if record else found.tensor
    line = f", {record.line}" if record and record.line else ""
    way = " -> ".join(f"{op}{f' in {module}' if module else ''}" for op, module, _ in _way(found))
    labels = {
        "began at": f"{where}{line}",
        "read": "; ".join(map(str, found.inputs)),
        "wrote": str(found.output),
        "led on": way,
        "because": _CAUSES[found.cause],
    }
    return "\n".join([sentence(found), *(labelled(*each) for each in labels.items())])


def html(found: FirstNonfinite) -> str:
    """Return the finding as a piece of a page."""
    way = _way(found)
    steps = [f"<li>{_op(op, module)}{_phase(phase, found.phase)}</li>" for op, module, phase in way[1:_MOST]]
    if len(way) > _MOST:
        steps.append(f'<li class="faint">{len(way) - _MOST:,} more ops</li>')
    steps.append(f"<li><strong>{markup(found.result)}</strong> is not finite</li>")
    return page(
        f"{found.result} is not finite because of the {found.cause}: {_CAUSES[found.cause]}",
        _trials(found),
        f'<ol class="way">{_origin(found)}{"".join(steps)}</ol>',
    )


def _origin(found: FirstNonfinite) -> str:
    """The first op whose output is not finite, with its inputs and output; or the tensor that was passed in."""
    record = found.record
    if record is None:
        begin: str = name(found.tensor)
    else:
        begin = _op(record.op, record.module) + _phase(record.phase, "") + _line(record)
    read = "".join(f'<p><span class="faint">read</span> {dtype_chips(str(each))}</p>' for each in found.inputs)
    wrote = f'<p><span class="faint">wrote</span> {dtype_chips(str(found.output))}</p>'
    return f'<li class="origin"><strong>{begin}</strong>{read}{wrote}</li>'


def _line(record: OpRecord) -> str:
    if record.line is None:
        return ""
    source = f"<pre><code>{markup(record.line.source)}</code></pre>" if record.line.source else ""
    return f' <span class="faint">{name(str(record.line))}</span>{source}'


def _op(op: str, module: str) -> str:
    return name(op) + (f' <span class="faint">in</span> {name(module)}' if module else "")


def _phase(phase: str, before: str) -> str:
    return "" if phase == before else f' <span class="faint">({markup(phase)})</span>'


def _way(found: FirstNonfinite) -> list[tuple[str, str, str]]:
    """The ops from the first one to the result as (op, module, phase), without consecutive repetitions."""
    return [key for key, _ in groupby((each.op, each.module, each.phase) for each in found.chain)]


def _trials(found: FirstNonfinite) -> Markup:
    """The results under other conditions."""
    tried = {"loss scale": number(float(found.setting.loss_scale))}
    if found.fitting_scale is not None:
        tried["finite at"] = number(float(found.fitting_scale))
    if found.in_bfloat16 is not None:
        tried["in bfloat16"] = "finite" if found.in_bfloat16 else "not finite"
    if found.in_float32 is not None:
        finite = found.in_float32.is_finite
        tried["in float32"] = f"finite, loss {number(found.in_float32.loss)}" if finite else "not finite"
    return figures(tried)
