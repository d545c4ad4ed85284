"""apex's ``multi_tensor_applier``, which says that the kernels of ``amp_C`` are not there.

Scripts ask ``multi_tensor_applier.available`` and otherwise take their own way in torch. amplab's fused kernels take a
list of tensors by themselves: `amplab.kernels`.
"""

from amplab.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
