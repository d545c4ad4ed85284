"""A precision policy: a table, a compute dtype, and the user's own rules by op and by module."""

__all__: list[str] = []
