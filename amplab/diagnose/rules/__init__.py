"""The rules: each file looks at one kind of evidence and says which findings of the catalogue apply.

A rule is a pure function. The package `amplab.diagnose` documents what a user calls.
"""

__all__: list[str] = []
