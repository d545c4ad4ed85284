"""What surrounds the model in a training step: its code, its schedulers, the updates that rounding loses."""

__all__: list[str] = []
