"""What a rank writes to a checkpoint, file by file, and its copy in the memory of the host."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dtgpt.checkpoint.manifest import file_name
from dtgpt.checkpoint.shard_file import Piece, Written, by_size, write_file
from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.parallel.shards import Shards

# Bytes of data, so that several files are hashed and written at a time. Pinned memory comes in powers of two.
FILE_LIMIT = 1 << 29


class StagedFile:
    """One file of this rank: its pieces, where their values are in training, and their copy on the host."""

    def __init__(self, name: str, pieces: list[Piece], values: list[Tensor]):
        self.name, self.pieces, self.values = name, pieces, values
        self.data: Tensor | None = None  # staging buffer, fp32, all pieces one after another

    def reserve(self, pinned: bool = False) -> Tensor:
        """Allocate the staging buffer once, and return it. A GPU copies to pinned memory beside other work."""
        if self.data is None:
            self.data = torch.empty(sum(v.numel() for v in self.values), pin_memory=pinned)
        return self.data

    def copy(self) -> None:
        """Queue copies of all values to the host."""
        for place, value in zip(self.reserve().split([v.numel() for v in self.values]), self.values, strict=True):
            place.view(value.shape).copy_(value, non_blocking=True)

    def write(self, folder: Path) -> Written:
        return write_file(folder / self.name, self.pieces, self.reserve())

    def write_at_once(self, folder: Path) -> Written:
        """Write with a staging buffer for this file alone, which is freed afterwards."""
        self.copy()
        if self.values[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        try:
            return self.write(folder)
        finally:
            self.data = None


def files_of(shards: Shards, optimizer: Optimizer) -> Iterator[StagedFile]:
    """Yield the files that this rank writes: of each shard the rows that this rank owns among its replicas."""
    weights = {"": {shard.index: shard.local for shard in shards}}  # suffix of the names -> tensors by index of shard
    states: dict[str, dict[int, Tensor]] = {}
    for shard in shards:
        for name, tensor in optimizer.state(shard.index).items():
            states.setdefault(f".{name}", {})[shard.index] = tensor
    for kind, tensors in (("weights", weights), ("optimizer", states)):
        values: dict[str, Tensor] = {}
        pieces = []
        for suffix, by_index in tensors.items():
            for index, tensor in by_index.items():
                shard = shards.all[index]
                shape, region = shard.place_of(tensor)
                part, rows = shard.own if region == shard.region else (region, slice(None))
                if all(map(len, part)):
                    offset, size = tuple(r.start for r in part), tuple(map(len, part))
                    pieces.append(Piece(shard.name + suffix, shape, offset, size))
                    values[pieces[-1].name] = tensor[rows]
        for number, group in enumerate(by_size(pieces, FILE_LIMIT)):
            name = file_name(kind, shards.mesh.rank, number)
            yield StagedFile(name, group, [values[p.name] for p in group])
