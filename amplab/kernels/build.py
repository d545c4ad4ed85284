"""Build the kernels beside their references, once per machine, and never in anybody's way.

What is built and cached is in ``cache.py``; the compiler is driven by ``compilation.py`` in a process of its own.
"""

__all__ = ["settle"]


def settle() -> None:
    """Take up a build that has finished. Sync: none."""
