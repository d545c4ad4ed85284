"""Data parallel training under apex's names, over ``torch.distributed``."""

from torch.distributed import ReduceOp

from amplab.parallel.distributed import DistributedDataParallel, Reducer
from amplab.parallel.joined_state import JoinedState
from amplab.parallel.LARC import LARC
from amplab.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "JoinedState",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
