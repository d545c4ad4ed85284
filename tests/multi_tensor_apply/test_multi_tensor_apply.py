"""The applier calls functions of amp_C with its chunk size, as apex's does."""

import torch

from amplab.multi_tensor_apply import MultiTensorApply, multi_tensor_applier


def test_it_passes_its_chunk_size_and_the_arguments_on():
    calls = []
    flag, lists = torch.zeros(1, dtype=torch.int32), [[torch.ones(1)]]
    assert isinstance(multi_tensor_applier, MultiTensorApply)
    assert multi_tensor_applier.available
    multi_tensor_applier.check_avail()
    assert multi_tensor_applier(lambda *given: calls.append(given) or 7, flag, lists, 0.5, 3) == 7
    assert calls == [(65536, flag, lists, 0.5, 3)]
