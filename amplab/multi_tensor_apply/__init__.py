"""apex's ``multi_tensor_applier``, and its compiled modules ``amp_C`` and ``apex_C`` over amplab's kernels.

    multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [grads, masters], 1.0 / scale)

``amp_c.py`` and ``apex_c.py`` are what ``import amp_C`` and ``import apex_C`` find while amplab is in place of apex.
"""

from amplab.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
