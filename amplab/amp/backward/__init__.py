"""The gradients around one backward of a scaled loss, for both APIs: set aside, unscale, clip, and report."""

__all__: list[str] = []
