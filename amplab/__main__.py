"""``python -m amplab``: the same as the ``amplab`` command.

By Python's rule for ``-m``, it imports from the working folder first; ``python -P -m amplab``, as ``amplab``, does not.
"""

import sys

from amplab.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
