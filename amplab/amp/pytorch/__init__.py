"""The names of ``torch.amp``: autocast, GradScaler, custom_fwd, custom_bwd; and checkpoint, which works with them."""

__all__: list[str] = []
