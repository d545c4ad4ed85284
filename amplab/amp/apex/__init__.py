"""The functions, levels and names that scripts know from ``apex.amp``.

Reading order: opt_levels (what O0 to O3 mean), session (one experiment), functions (the session of the program), then
what a session puts on models (hooked_model, forward_hooks) and on optimizers (hooked_optimizer).
"""

__all__: list[str] = []
