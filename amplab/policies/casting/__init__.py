"""Casts of the arguments of ops: the engine, its function mode and scopes, plans made of steps, the weight cache."""

__all__: list[str] = []
