"""Write the shards of a run folder, and compute the checksums of their files."""

from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from amplab.amp.run_state.folder_checksums import checksum

__all__ = ["ShardWriter"]


class ShardWriter(FileSystemWriter):
    """Writes a state of tensors as ``torch.distributed.checkpoint`` does.

    torch.distributed.checkpoint calls both methods, so an error or an interrupt of one rank is raised on every rank.

    Attributes:
        checksums: of the files that this rank has written, by name.

    Sync: many.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.checksums: dict[str, int] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the shards of this rank."""
        written = super().write_data(plan, planner)
        self._add({result.storage_data.relative_path for result in written.wait()})
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the places of all shards; only rank 0 calls it."""
        super().finish(metadata, results)
        self._add({".metadata"})

    def _add(self, names: set[str]) -> None:
        self.checksums |= {name: checksum(Path(self.path) / name) for name in names}
