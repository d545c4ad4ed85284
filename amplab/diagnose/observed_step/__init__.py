"""One step with the values of every op: how large each tensor was, which op wrote it, and where inf and NaN began."""

__all__: list[str] = []
