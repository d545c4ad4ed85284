"""The same advice in the words of each face: code to paste, by who scales the loss.

    face      who scales the loss       its settings
    "apex"    amp.initialize            dynamic_init_scale, scale_window
    "amplab"  amplab.GradScaler         init_scale, growth_interval
    "torch"   torch.amp.GradScaler      init_scale, growth_interval
    "none"    nobody                    a learning rate, a batch, a model
    ""        it is not known           apex's words, the scalers' in a comment

Where something is to be computed in float32 the words go by what casts, not by what scales: `remedies.float32`.
"""

from __future__ import annotations

import torch

from amplab.amp import GradScaler, Session

__all__ = [
    "at_first_scale",
    "clip_unscaled",
    "face_of",
    "look_at_step",
    "look_while_it_happens",
    "scaled_loss",
    "scheduler_after_step",
    "smaller_rate",
    "step_before_scheduler",
    "step_of",
    "unscaled_once",
    "unscaled_step",
    "with_window",
]


def face_of(amp: Session | torch.amp.GradScaler | None) -> str:
    """Return the face of a session or scaler; a scaler that is not enabled scales nothing.

    >>> face_of(GradScaler("cpu")), face_of(torch.amp.GradScaler("cpu")), face_of(None)
    ('amplab', 'torch', 'none')
    """
    if isinstance(amp, Session):
        return "apex"
    if amp is None or not amp.is_enabled():
        return "none"
    return "amplab" if isinstance(amp, GradScaler) else "torch"


def with_window(face: str, window: int, level: str = "") -> str:
    """Return the code that lets a scale grow after `window` clean steps.

    >>> with_window("torch", 1000)
    'scaler = torch.amp.GradScaler(x.device.type, growth_interval=1000)'
    """
    return _setting(face, f"scale_window={window}", f"growth_interval={window}", level)


def at_first_scale(face: str, scale: float, level: str = "") -> str:
    """Return the code that begins with another scale.

    >>> at_first_scale("apex", 1024.0, "O2")
    'model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dynamic_init_scale=1024)'
    """
    return _setting(face, f"dynamic_init_scale={scale:.12g}", f"init_scale={scale:.12g}", level)


def _setting(face: str, of_apex: str, of_scaler: str, level: str) -> str:
    if face in _MODULES:
        return f"scaler = {_MODULES[face]}.GradScaler(x.device.type, {of_scaler})"
    given = f'opt_level="{level}", ' if level[:1] == "O" else ""
    other = "" if face else f"  # GradScaler: {of_scaler}"
    return f"model, optimizer = amp.initialize(model, optimizer, {given}{of_apex}){other}"


def scheduler_after_step(face: str) -> str:
    """Return the lines that move a schedule only where the optimizer has stepped."""
    if face == "torch":
        return "scale = scaler.get_scale()\nscaler.update()\nif scaler.get_scale() >= scale:\n    scheduler.step()"
    if face == "amplab":
        return "if scaler.last_step.stepped:  # after scaler.update()\n    scheduler.step()"
    if face == "none":
        return "optimizer.step()\nscheduler.step()"
    other = "" if face else "  # amplab.GradScaler: if scaler.last_step.stepped"
    return f"if amp.last_step(optimizer).stepped:{other}\n    scheduler.step()"


def step_before_scheduler(face: str) -> str:
    """Return the lines that step an optimizer, and then move its schedule."""
    return f"{_STEPS.get(face, 'optimizer.step()')}\nscheduler.step()"


def step_of(optimizer: str, face: str) -> str:
    """Return the lines that step an optimizer, named as in the code, for a loss of its own."""
    if face in _STEPS:
        return f"scaler.step({optimizer})  # after the backward of its own loss, before scaler.update()"
    if face == "apex":
        block = f"with amp.scale_loss(loss, {optimizer}) as scaled_loss:  # its own loss\n    scaled_loss.backward()"
        return f"{block}\n{optimizer}.step()"
    return f"{optimizer}.step()  # after the backward of its own loss"


def unscaled_step(face: str) -> tuple[str, str]:
    """Return why an optimizer was stepped with scaled gradients, and the lines of a step that is not."""
    if face in _STEPS:
        cause = "optimizer.step() was called itself: it is scaler.step(optimizer) that divides by the scale, and skips."
        return cause, f"{_STEPS[face]}  # in place of optimizer.step()"
    return (
        "The step lies inside the block of scale_loss, or this optimizer was not passed to it (to scaler.step).",
        "with amp.scale_loss(loss, [optimizer_a, optimizer_b]) as scaled_loss:  # all that this backward reaches\n"
        "    scaled_loss.backward()\noptimizer_a.step(); optimizer_b.step()  # after the block",
    )


def scaled_loss(face: str) -> str:
    """Return the lines of a backward of the scaled loss, and its step."""
    if face in _STEPS:
        return f"scaler.scale(loss).backward()  # in place of loss.backward()\n{_STEPS[face]}"
    return "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()\noptimizer.step()"


def unscaled_once(face: str) -> tuple[str, str]:
    """Return why gradients were divided by the scale twice, and what to write in place of the division."""
    by = "scaler.step" if face in _STEPS else "scale_loss" if face else "scale_loss or scaler.step"
    instead = "scaler.unscale_(optimizer)  # in place of the division; scaler.step then divides no more"
    if face == "apex":
        instead = "# leave the division out: after the block of scale_loss gradients are unscaled"
    return f"They were unscaled by hand, and once more by {by}.", instead


def clip_unscaled(face: str) -> str:
    """Return the lines that clip gradients of their true size."""
    if face in _STEPS:
        return "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
    if face == "none":
        return "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
    before = "" if face else "scaler.unscale_(optimizer)  # of a GradScaler; with scale_loss: clip after its block,\n"
    after = "  # after the block of scale_loss" if face else ""
    return f"{before}torch.nn.utils.clip_grad_norm_({_CLIPPABLE[bool(face)]}, max_norm){after}"


def smaller_rate(face: str, rate: float | None) -> str:
    """Return the lines that divide a learning rate by ten, and clip, as that is done under a face."""
    lines = "for group in optimizer.param_groups:\n    group['lr'] = "
    lines += "group['lr'] / 10" if rate is None else f"{rate / 10:.2g}"
    return f"{lines}  # from the last good checkpoint\n{_CLIPPED[face]}"


def look_while_it_happens(face: str) -> str:
    """Return the line of a watch that looks at a bad step before it is taken; later its weights are gone."""
    given = {"apex": ", scaler=amp", "none": "", "": ""}.get(face, ", scaler=scaler")
    return f"amplab.watch(model, optimizer{given}, step=lambda batch: loss_of(model, batch))  # and w.batches(loader)"


def look_at_step(face: str) -> str:
    """Return the line that says which op of a step made inf or NaN."""
    given = ", scaler=scaler" if face in _MODULES else ""
    return f"print(amplab.first_nonfinite(model, step=loss_of{given}))"


_MODULES = {"amplab": "amplab", "torch": "torch.amp"}
_STEPS = dict.fromkeys(_MODULES, "scaler.step(optimizer)\nscaler.update()")

_CLIPPABLE = {True: "amp.master_params(optimizer)", False: "model.parameters()"}  # of apex, of a face not known

_CLIPPED = {
    "": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # unscaled; after amp.initialize: amp.master_params",
    "apex": "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)",
    "none": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "amplab": "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "torch": "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
}
