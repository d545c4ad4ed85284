"""The applier says that its kernels are not there, so that scripts take their other way."""

import pytest

from amplab.multi_tensor_apply import MultiTensorApply, multi_tensor_applier


def test_it_is_not_available_and_says_what_to_use():
    assert isinstance(multi_tensor_applier, MultiTensorApply)
    assert (multi_tensor_applier.available, multi_tensor_applier.chunk_size) == (False, 65536)
    with pytest.raises(RuntimeError, match=r"amp_C.*torch\._foreach"):
        multi_tensor_applier(None, None, [[]], 1.0)
