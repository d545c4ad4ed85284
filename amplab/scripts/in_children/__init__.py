"""The folder that ``amplab run`` puts into PYTHONPATH: each Python process that a script starts runs its one file."""

__all__: list[str] = []
