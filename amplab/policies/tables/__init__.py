"""The op tables: which op is on which list, and why. Rows are data; a table finds the row of a function."""

__all__: list[str] = []
