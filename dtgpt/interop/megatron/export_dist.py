"""Models written in Megatron-LM's format `torch_dist` (see `torch_dist.py`), by torch.distributed.checkpoint.

A folder is read under any plan. Both implementations of a transformer ask for the same names, but for the norm before
a router. A tensor of all layers, or of all experts, lies in the file matrix by matrix. common.pt is what all versions
read, those since 2026 as the older form.
"""

import io
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultSavePlanner,
    FileSystemWriter,
    SavePlan,
    save,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dtgpt.interop.foreign import check_dtype
from dtgpt.interop.marks import TRACKER
from dtgpt.interop.megatron.experts import CORRECTION
from dtgpt.interop.megatron.export import (
    VERSION,
    WITH_STATE,
    Target,
    architecture_of,
    args_of,
    check_sizes,
    folder_name,
    parameters_of,
    piece_of,
    save_file,
    table_of,
)
from dtgpt.interop.megatron.names import EXPERT, PLACES, Family, padded_rows
from dtgpt.interop.megatron.torch_dist import COMMON_FILE
from dtgpt.interop.megatron.tree import Rank
from dtgpt.interop.new_folder import new_folder
from dtgpt.models.inventory import Shape
from dtgpt.models.shared.foreign import has_vocabulary
from dtgpt.models.source import Ranges, Source
from dtgpt.util.storage import write_json

SETTINGS_FILE = "metadata.json"
SETTINGS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"} | {
    "common_backend_version": 1
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
STATE = "_extra_state"  # of modules: empty without 8-bit floats, and asked for by name
# Modules that have it with Transformer Engine alone.
OF_ENGINE = ("core_attention", "q_layernorm", "k_layernorm", "pre_mlp_layernorm", "final_layernorm")


class Piece(NamedTuple):
    """A rectangle of a tensor in the file, and what it is of dtgpt's parameter `name`."""

    key: str
    lead: Shape  # its layer and its expert, where the tensor has a dimension for these
    counts: Shape  # of layers and of experts
    row: int  # its first
    shape: Shape  # without `lead`
    dtype: torch.dtype
    name: str
    part: Ranges

    @property
    def offset(self) -> Shape:
        return (*self.lead, self.row, *[0] * (len(self.shape) - 1))


def save_torch_dist(
    source: Source,
    folder: Path,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype = torch.float32,
    iteration: int | None = None,
    consumed_samples: int = 0,
    family: Family = "transformer_engine",
) -> None:
    """Write the weights of `source` as the root of a new checkpoint, one matrix in memory at a time.

    `tensor_parallel_size`: ranks for which the vocabulary is padded; more or fewer may read it. `family`: the
    implementation that is to read it. Others as of `save_megatron`, as are the errors.
    """
    config = source.config
    architecture = architecture_of(config)
    check_sizes(architecture, config, tensor_parallel_size, 1, 1)
    check_dtype(dtype)
    architecture.check_export(config)
    target = Target(architecture, family, dtype, tensor_parallel_size, 1, 1)
    args = args_of(config, target, iteration, consumed_samples)
    vars(args).update(ckpt_format="torch_dist", no_save_optim=True, no_save_rng=True)
    stacked = not isinstance(getattr(args, "moe_layer_freq", 1), list)  # where all layers have the same tensors
    with new_folder(folder) as partial:
        place = partial / folder_name(iteration)
        place.mkdir()
        _write(_Planner(source, target, stacked), place)
        save_file({"args": args, "checkpoint_version": VERSION, "iteration": iteration or 0}, place / COMMON_FILE)
        write_json(place / SETTINGS_FILE, SETTINGS)
        (partial / TRACKER).write_text("release" if iteration is None else str(iteration))


class _Planner(DefaultSavePlanner):
    """Says what a folder holds, and gives each piece when it is written."""

    def __init__(self, source: Source, target: Target, stacked: bool):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._source, self._target = source, target
        self._pieces = {(piece.key, piece.offset): piece for piece in _pieces(source, target, stacked)}

    def create_local_plan(self) -> SavePlan:
        pieces = self._pieces.values()
        local = self._target.family == "local"
        with_state = WITH_STATE if local else (*WITH_STATE, *OF_ENGINE)
        states = sorted({state for piece in pieces for state in _states(piece, with_state)})
        rows = {piece.key: piece.row + piece.shape[0] for piece in pieces}  # of the last piece
        tensors = (
            WriteItem(
                MetadataIndex(piece.key, torch.Size(piece.offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(piece.offset), torch.Size((*[1] * len(piece.lead), *piece.shape))),
                    TensorProperties(dtype=piece.dtype),
                    torch.Size((*piece.counts, rows[piece.key], *piece.shape[1:])),
                ),
            )
            for piece in pieces
        )
        self.plan = SavePlan([*(WriteItem(MetadataIndex(s), WriteItemType.BYTE_IO) for s in states), *tensors])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index, ranks = write_item.index, self._target.tensor_parallel_size
        if index.offset is None:
            content = io.BytesIO()
            torch.save([None], content)  # what one rank has
            return content
        piece, config = self._pieces[index.fqn, tuple(index.offset)], self._source.config
        if has_vocabulary(piece.name, config):
            found = table_of(
                self._source, self._target, piece.row * ranks // padded_rows(config.vocab_size, ranks), piece.name
            )
        else:
            found = piece_of(self._source, self._target._replace(tensor_parallel_size=1), 0, piece.name, piece.part)
        return found[(None,) * len(piece.lead)]


def _pieces(source: Source, target: Target, stacked: bool) -> Iterator[Piece]:
    """Yield what the tensors of the file consist of."""
    config, ranks = source.config, target.tensor_parallel_size
    whole = target._replace(tensor_parallel_size=1, family="transformer_engine")
    for (key,), (name, part) in parameters_of(config, whole, Rank(0)).items():
        shape, dtype = tuple(map(len, part)), torch.float32 if name.endswith(CORRECTION) else target.dtype
        if has_vocabulary(name, config):
            rows = padded_rows(config.vocab_size, ranks) // ranks
            for rank in range(ranks):
                yield Piece(key, (), (), rank * rows, (rows, *shape[1:]), dtype, name, part)
            continue
        if target.family == "local":
            key = key.replace(PLACES["mlp_norm"].local, PLACES["mlp_norm"].transformer_engine)
        layer, expert = LAYER.fullmatch(key), EXPERT.fullmatch(key)
        lead, counts = [], []
        if layer and stacked:
            key = f"decoder.layers.{layer[2]}"
            lead, counts = [int(layer[1])], [config.num_layers]
        if expert:
            key, shape = key.replace(f"local_experts.{expert[2]}", "experts"), shape[1:]
            lead, counts = [*lead, int(expert[2])], [*counts, getattr(config, "num_experts", 0)]
        yield Piece(key, tuple(lead), tuple(counts), 0, shape, dtype, name, part)


def _states(piece: Piece, with_state: Collection[str]) -> Iterator[str]:
    """Yield the names of the objects that the modules of a parameter ask for, of those that have one."""
    module, _, kind = piece.key.rpartition(".")
    if kind != "weight":  # as that of a norm, which belongs to what follows
        return
    outer, _, last = module.rpartition(".")
    for own in (last, "core_attention") if last == "linear_qkv" else (last,):
        if own in with_state:
            at, of = (".".join(map(str, numbers)) for numbers in (piece.lead or (0,), piece.counts or (1,)))
            yield f"{outer}.{own}.{STATE}/shard_{at}_{of}"


def _write(planner: DefaultSavePlanner, folder: Path) -> None:
    """Write by torch.distributed.checkpoint. Raise OSError where the disk is full, as any other writer does."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = next(each for each, _ in error.failures.values())
        if isinstance(cause, RuntimeError):  # torch.save's words for a full disk
            raise OSError(str(cause).splitlines()[0]) from None
        raise cause from None
