"""A precision policy: a table, a compute dtype, and the user's rules for ops and modules."""

__all__: list[str] = []
