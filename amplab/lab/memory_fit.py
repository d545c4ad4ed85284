"""What one training step keeps in memory at each opt_level, counted on a fresh model for any batch size.

    total(batch) = parameters + gradients + masters + optimizer state + buffers + 16-bit weights + activations(batch)

The sum is an upper bound of what these tensors take: activations are freed while gradients appear. Not counted is what
is no tensor of the step, see `NOT_COUNTED`. `memory_count.py` counts.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CARDS", "NOT_COUNTED", "LevelMemory"]

NOT_COUNTED = (
    "Not counted: the CUDA context (about 0.5 GB), workspaces of cuBLAS and cuDNN, temporary tensors inside an op, and "
    "memory that the allocator cannot use because it is fragmented. Leave a tenth of the card free."
)

CARDS: tuple[tuple[str, float], ...] = (
    ("RTX 4060", 8),
    ("RTX 3060", 12),
    ("T4", 16),
    ("RTX 4090, L4, A10", 24),
    ("RTX 5090, V100", 32),
    ("A100, 40 GB", 40),
    ("L40S, A6000", 48),
    ("A100, H100, 80 GB", 80),
    ("H200", 141),
)
"""Names of common cards, and their GB."""


@dataclass(frozen=True)
class LevelMemory:
    """Bytes of one experiment at one opt_level.

    Attributes:
        opt_level: As in the config.
        label: Its name in the dashboard.
        parameters: The model's parameters, in their dtypes.
        gradients: Gradients of the parameters and of the masters.
        masters: float32 copies of 16-bit parameters.
        optimizer_state: Momenta, moments, step counts.
        buffers: The model's buffers, such as the running statistics of BatchNorm.
        weight_casts: 16-bit copies of weights that the forward keeps for its backward.
        activations: What the forward keeps for its backward at `batch_size`, without `weight_casts`; None if it cannot
            be counted, because the model calls `torch.func`.
        per_example: Bytes of activations that one more example in the batch adds.
        batch_size: Examples in the batch that was counted.
    """

    opt_level: str
    label: str
    parameters: int
    gradients: int
    masters: int
    optimizer_state: int
    buffers: int
    weight_casts: int
    activations: int | None
    per_example: float
    batch_size: int

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        own = self.parameters + self.gradients + self.masters + self.optimizer_state
        return own + self.buffers + self.weight_casts

    def activations_of(self, batch_size: int) -> int:
        """Return the bytes of activations of a batch of this size."""
        counted = self.activations or 0
        return max(0, round(counted + self.per_example * (batch_size - self.batch_size)))

    def total(self, batch_size: int) -> int:
        """Return all bytes for a batch of this size."""
        return self.fixed + self.activations_of(batch_size)

    def largest_batch(self, nbytes: float) -> int | None:
        """Return the largest batch that fits into so many bytes, 0 for none; None if no batch size matters."""
        if self.per_example <= 0:
            return None
        left = nbytes - self.fixed - (self.activations or 0)
        return max(0, int(left // self.per_example) + self.batch_size)
