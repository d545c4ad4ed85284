"""The functions, levels and names of ``apex.amp``.

Reading order: opt_levels (what O0 to O3 mean), session (one experiment), functions (the session of the program), then
the hooks of a session on models (hooks, forward_hooks) and on optimizers (hooked_optimizer).
"""

__all__: list[str] = []
