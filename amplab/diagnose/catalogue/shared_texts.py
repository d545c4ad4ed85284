"""Code and sentences that the entries of several subjects share."""

from __future__ import annotations

from amplab.diagnose.remedies.api_styles import PerApi, by_casting, by_scaling

__all__ = [
    "DYNAMIC_SCALE",
    "SCALER_STEP",
    "CLIP_MODEL",
    "CLIP_MASTERS",
    "CLIP_UNSCALED",
    "SMALLER_RATE",
    "STEP_RAISED",
    "OP_WROTE",
    "scale_setting",
    "around",
]

DYNAMIC_SCALE = by_casting(
    'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", loss_scale="dynamic")',
    amplab="scaler = amplab.GradScaler(x.device.type)  # scaler.scale(loss).backward(), scaler.step(optimizer)",
    torch="scaler = torch.amp.GradScaler(x.device.type)  # scaler.scale(loss).backward(), scaler.step(optimizer)",
    half='model, optimizer = amp.initialize(model.float(), optimizer, opt_level="O2")  # dynamic loss scale, masters',
)
SCALER_STEP = "scaler.step(optimizer)\nscaler.update()"
_RATE = "for group in optimizer.param_groups:\n    group['lr'] = {rate}  # from the last good checkpoint\n"
CLIP_MODEL = "torch.nn.utils.clip_grad_norm_(model.parameters(), {most})"
CLIP_MASTERS = "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), {most})"
CLIP_UNSCALED = f"scaler.unscale_(optimizer)\n{CLIP_MODEL}"
SMALLER_RATE = by_scaling(
    _RATE + CLIP_MODEL.format(most=1.0) + "  # unscaled; after amp.initialize: amp.master_params",
    apex=_RATE + CLIP_MASTERS.format(most=1.0),
    scaler=_RATE + CLIP_UNSCALED.format(most=1.0),
    plain=_RATE + CLIP_MODEL.format(most=1.0),
)

STEP_RAISED = "The step raised: {message}"
OP_WROTE = "{fn} wrote {counted}"


def scale_setting(of_apex: str, of_scaler: str) -> PerApi:
    """Return the code that sets an argument of the loss scale, of amp.initialize or of a GradScaler."""
    initialize = f"model, optimizer = amp.initialize(model, optimizer, {{level_argument}}{of_apex})"
    return by_scaling(
        f"{initialize}  # GradScaler: {of_scaler}",
        apex=initialize,
        amplab=f"scaler = amplab.GradScaler(x.device.type, {of_scaler})",
        torch=f"scaler = torch.amp.GradScaler(x.device.type, {of_scaler})",
        plain=initialize,
    )


def around(before: str, code: PerApi, after: str = "") -> PerApi:
    """Return the same code with text around it, for every API."""
    texts = {style: f"{before}{text}{after}" for style, text in code.texts.items()}
    return PerApi(code.by, texts, f"{before}{code.otherwise}{after}")
