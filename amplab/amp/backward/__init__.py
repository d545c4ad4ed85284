"""What both faces do around one backward: set gradients aside, unscale new ones, return found_inf, decide."""

__all__: list[str] = []
