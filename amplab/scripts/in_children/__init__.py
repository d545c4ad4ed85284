"""The folder that ``amplab run`` adds to PYTHONPATH: Python processes of a script run its ``sitecustomize``."""

__all__: list[str] = []
