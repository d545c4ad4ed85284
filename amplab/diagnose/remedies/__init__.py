"""The code that a finding suggests, for each API that a training loop may use."""

__all__: list[str] = []
