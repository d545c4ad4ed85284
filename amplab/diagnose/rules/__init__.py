"""The rules: each file looks at one kind of evidence and says which findings of the catalogue apply.

A rule is a pure function. Two places run the rules: `amplab.diagnose.examination`, which is `doctor`, and `amplab.lab`:
`run_log` and `watch` on the steps of a run, `step_rerun` on one skipped step. `amplab.diagnose.ranking` then drops the
findings that others supersede. The package `amplab.diagnose` documents what a user calls.
"""

__all__: list[str] = []
