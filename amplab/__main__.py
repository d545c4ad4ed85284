"""``python -m amplab``: the same as the ``amplab`` command."""

import sys

from amplab.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
