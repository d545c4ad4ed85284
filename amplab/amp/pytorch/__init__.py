"""What scripts know from ``torch.amp``: autocast, GradScaler, custom_fwd and custom_bwd, and checkpoint beside them."""

__all__: list[str] = []
