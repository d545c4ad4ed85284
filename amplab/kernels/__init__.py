"""Fused operators beside their references, and the build that makes them fast."""

from amplab.kernels.unscale import unscale_, unscale_add, unscale_copy

__all__ = ["unscale_", "unscale_add", "unscale_copy"]
