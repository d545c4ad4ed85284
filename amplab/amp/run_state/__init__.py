"""A whole training run in one file: models, optimizers, loss scale, random generators, position."""

__all__: list[str] = []
