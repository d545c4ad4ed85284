"""apex's ``multi_tensor_applier``, which reports that the kernels of ``amp_C`` are unavailable.

Scripts check ``multi_tensor_applier.available`` and otherwise use torch. amplab's own fused kernels take lists of
tensors; they are in `amplab.kernels`.
"""

from amplab.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
