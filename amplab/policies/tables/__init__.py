"""The op tables: which op is on which list, and why."""

__all__: list[str] = []
