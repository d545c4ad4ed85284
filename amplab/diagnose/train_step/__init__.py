"""A training step with everything around the model: rehearsed with all state restored, and read as code.

`rehearsal` runs a step and records what happens to gradients; `loop_state` restores optimizers, scalers and schedules.
"""

__all__: list[str] = []
