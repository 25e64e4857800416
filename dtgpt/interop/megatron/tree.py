"""The folders and files of a Megatron-LM checkpoint in the `torch` format, one file for each model-parallel rank.

root/latest_checkpointed_iteration.txt      decimal, or `release`
root/iter_0000100/ or root/release/
    mp_rank_00/ or, in a pipeline, mp_rank_00_000/, and with expert parallelism a further _000
        model_optim_rng.pt                  (model_rng.pt for a while, where the optimizer was distributed)
"""

import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, pairwise, product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.data.library_tokenizers.unpickler import StandIn
from dtgpt.interop.distcp import METADATA
from dtgpt.interop.foreign import check_stored, reading
from dtgpt.interop.keys import Key, Keys, among, check_keys
from dtgpt.interop.marks import TRACKER
from dtgpt.interop.megatron.architecture import MegatronArchitecture, Order
from dtgpt.interop.megatron.config import STRUCTURE, choose_architecture, count_layers, name_tensor
from dtgpt.interop.megatron.experts import apart, expert_parallel_size
from dtgpt.interop.megatron.names import ANGLES, TIED_COPIES, UNTIED, is_matrix_of_expert, is_mcore
from dtgpt.interop.pickles import Checksums, check_distinct, open_pickle
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.storage import read_regular

FILE_NAMES = ("model_optim_rng.pt", "model_rng.pt")
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
DEEPEST = 8  # dictionaries in dictionaries
LARGEST_COUNT = 1 << 62  # of iterations and samples
# How the fused QKV of plain attention lies along its output, by checkpoint_version; the later order is dtgpt's.
QKV_ORDERS = {0: "(three n d) ... -> (n three d) ...", 1: "(n d three) ... -> (n three d) ...", 2: None, 3: None}
VERSIONS: Keys = {"checkpoint_version": Key(among(QKV_ORDERS), "; dtgpt knows 0, 1.0, 2.0 and 3.0", 0)}
PLAIN = (type(None), bool, int, float, str, torch.dtype, StandIn)


class Rank(NamedTuple):
    """Which part of the model a rank has."""

    tensor: int
    pipeline: int = 0
    expert: int = 0


@dataclass
class RankFile:
    """What one rank wrote. `chunks`: its parts of the model, more than one in an interleaved pipeline, each dtgpt's
    names, with layers numbered from 0, to tensors that lie mapped in the file. `untied`: it has an output layer of its
    own. `copies` of the tied table."""

    path: Path
    args: Namespace | None
    architecture: MegatronArchitecture
    version: int
    iteration: int
    order: Order
    untied: bool
    chunks: list[dict[str, Tensor]]
    copies: list[Tensor]
    checksums: Checksums  # of what lies mapped

    @property
    def common(self) -> dict[str, Any]:
        """What all ranks of one checkpoint agree on."""
        own = {
            "checkpoint_version": self.version,
            "iteration": self.iteration,
            "chunks": len(self.chunks),
            "architecture": self.architecture.TITLE,
        }
        return own | {name: getattr(self.args, name, None) for name in STRUCTURE}

    @property
    def has_experts(self) -> bool:
        return any(is_matrix_of_expert(name) for chunk in self.chunks for name in chunk)

    def layers(self, chunk: int) -> int:
        """Return the number of layers in a chunk. Raise UserError where they are not numbered 0, 1, ..."""
        return count_layers(self.chunks[chunk], self.path)


def open_ranks(folder: Path) -> dict[Rank, RankFile]:
    """Open the files of all ranks. Raise UserError where one is missing."""
    paths = _rank_paths(checkpoint_folder(folder))
    first = open_rank(paths[min(paths)])
    if max(rank.expert for rank in paths) == 0 and _numbers_experts(first.args):
        paths = {Rank(rank.tensor, 0, rank.pipeline): path for rank, path in paths.items()}
    ends = (1 + max(numbers) for numbers in zip(*paths, strict=True))
    for rank in (Rank(*numbers) for numbers in product(*map(range, ends))):
        if rank not in paths:
            raise _missing(expected_path(first, rank))
    return {rank: first if rank == min(paths) else open_rank(paths[rank]) for rank in sorted(paths)}


def _numbers_experts(args: Namespace | None) -> bool:
    """Return whether the second number of a folder is that of an expert-parallel rank: where there is no pipeline, it
    stands alone."""
    return getattr(args, "pipeline_model_parallel_size", 1) == 1 and expert_parallel_size(vars(args or Namespace())) > 1


def check_places(ranks: Mapping[Rank, RankFile]) -> None:
    """Raise UserError where the files of two ranks changed places, or one stands in the place of another: they hold the
    same tensors; or the process that wrote them, whose number grows with the tensor, then the expert and then the
    pipeline rank, says so. Tools that convert trees write all files in one process."""
    seen: dict[frozenset[tuple[int, int]], Path] = {}
    # Of a stage without experts, the ranks of an expert-parallel group do hold the same.
    own = [file for rank, file in ranks.items() if rank.expert == 0 or file.has_experts]
    for file in own:
        first = seen.setdefault(file.checksums.mark, file.path) if file.checksums.mark else file.path
        if first != file.path:
            raise UserError(f"{first} and {file.path} hold the same tensors; copy the file of each rank")
    check_distinct(file.path for file in own)
    said: dict[Rank, Any] = {rank: getattr(file.args, "rank", None) for rank, file in ranks.items()}
    if len(said) == 1 or set(said.values()) == {0} or not all(type(rank) is int for rank in said.values()):
        return
    for before, place in pairwise(sorted(said, key=lambda rank: (rank.pipeline, rank.expert, rank.tensor))):
        if said[place] <= said[before]:
            one, other = (ranks[rank].path for rank in (before, place))
            raise UserError(
                f"{other} was written by rank {said[place]}, and {one} by rank {said[before]}; copy the file of each "
                "rank into its own folder"
            )


def expected_path(first: RankFile, rank: Rank) -> Path:
    """Return where the file of a rank should be, if `first` is that of another one."""
    numbers = first.path.parent.name.count("_") - 1  # mp_rank_00_000 has two
    experts = expert_parallel_size(vars(first.args or Namespace())) > 1
    pipeline = numbers > 1 + experts or rank.pipeline > 0
    return first.path.parents[1] / rank_folder(rank, pipeline, experts or rank.expert > 0) / first.path.name


def rank_folder(rank: Rank, pipeline: bool, experts: bool) -> str:
    """Return the name of a rank's folder, in a pipeline and with expert parallelism or not."""
    further = [rank.pipeline] * pipeline + [rank.expert] * experts
    return f"mp_rank_{rank.tensor:02d}" + "".join(f"_{number:03d}" for number in further)


def checkpoint_folder(folder: Path) -> Path:
    """Return the folder with rank folders: `folder` itself, or the one that its tracker names. Raise UserError for
    none."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the root of a Megatron-LM checkpoint or its iter_... folder")
    if any(folder.glob("mp_rank_*")):
        return folder
    chosen = _tracked(folder) if (folder / TRACKER).is_file() else folder
    if any(chosen.glob("*.distcp")):
        raise UserError(f"{chosen} has no .metadata, which says what its files hold; copy the whole checkpoint")
    if not any(chosen.glob("mp_rank_*")):
        raise UserError(f"{chosen} has no mp_rank_... folders; give the root of a Megatron-LM checkpoint")
    return chosen


def distributed_folder(folder: Path) -> Path | None:
    """Return the folder of the format `torch_dist`: `folder` itself, or the one that its tracker names; None for a
    checkpoint of the format `torch`. Raises UserError as `checkpoint_folder` does."""
    if any(folder.glob("mp_rank_*")):
        return None
    chosen = _tracked(folder) if (folder / TRACKER).is_file() and not (folder / METADATA).is_file() else folder
    return chosen if (chosen / METADATA).is_file() else None


def _tracked(root: Path) -> Path:
    path = root / TRACKER
    with reading(path, "give the iter_... folder itself"):
        text = read_regular(path, 1000).decode("utf-8").strip()
    if text == "release":
        return root / text
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UserError(f"{path} says {shown(text)}, neither an iteration nor release; give the iter_... folder itself")
    return root / f"iter_{int(text):07d}"


def _missing(path: Path) -> UserError:
    return UserError(f"{path} is missing; copy the files of all ranks")


def _rank_paths(folder: Path) -> dict[Rank, Path]:
    """Return the model's file of every rank, as its folder numbers it. A folder with an optimizer's part alone is left
    out."""
    found: dict[Rank, Path] = {}
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        if not (match := RANK.fullmatch(place.name)):
            continue
        path = next((place / name for name in FILE_NAMES if (place / name).is_file()), None)
        if path is None and (place / "optim.pt").is_file():
            continue
        if path is None:
            raise _missing(place / FILE_NAMES[0])
        rank = Rank(*(int(number or 0) for number in match.groups()))
        if rank in found:
            raise UserError(f"{found[rank]} and {path} are of the same rank; give a folder with one checkpoint in it")
        found[rank] = path
    if not found:
        raise _missing(folder / rank_folder(Rank(0), False, False) / FILE_NAMES[0])
    return found


def open_rank(path: Path) -> RankFile:
    """Open the file of one rank. Raise UserError where it is broken, holds no model, or has parameters that its
    architecture does not have."""
    checksums = Checksums(path)
    content = open_pickle(path, checksums)
    args, version = read_args(content.get("args"), path), content.get("checkpoint_version", 0)
    check_keys(content, VERSIONS, path)
    architecture = choose_architecture(args, path)
    given = vars(args or Namespace())
    chunks = [apart(dict(_flat(chunk, path, set())), given, path) for chunk in _chunks(content, path)]
    keys = {key for chunk in chunks for key in chunk}
    iteration = content.get("iteration", 0)
    # mcore gives an untied output layer the name of the last stage's copy of the tied table.
    untied = UNTIED in keys or (
        "output_layer.weight" in keys and bool(getattr(args, "untie_embeddings_and_output_weights", True))
    )
    copies = [] if untied else [tensor for chunk in chunks for key, tensor in chunk.items() if key in TIED_COPIES]
    return RankFile(
        path=path,
        args=args,
        architecture=architecture,
        version=int(version),
        iteration=iteration if type(iteration) is int and 0 <= iteration < LARGEST_COUNT else 0,
        order=Order(
            qkv=None if any(map(is_mcore, keys)) else QKV_ORDERS[int(version)],
            rotary_interleaved=getattr(args, "rotary_interleaved", None) is True,
        ),
        untied=untied,
        chunks=[_ours(chunk, () if untied else TIED_COPIES, architecture, path) for chunk in chunks],
        copies=copies,
        checksums=checksums,
    )


def read_args(stored: Any, path: Path) -> Namespace | None:
    """Return Megatron-LM's arguments from a Namespace or another class, with plain values only: others, which may be
    nested without end, become stand-ins that compare and print in no time."""
    if stored is None:
        return None
    values = stored.state if isinstance(stored, StandIn) else vars(stored) if isinstance(stored, Namespace) else stored
    if not isinstance(values, dict):
        raise UserError(f"{path} has args of type {shown(stored)}; give a file that Megatron-LM wrote")
    return Namespace(**{name: _plain(value) for name, value in values.items() if isinstance(name, str)})


def _plain(value: Any) -> Any:
    flat = isinstance(value, list | tuple) and all(isinstance(item, PLAIN) for item in value)
    return value if flat or isinstance(value, PLAIN) else StandIn(type(value).__name__)


def _chunks(content: Mapping[str, Any], path: Path) -> list[Any]:
    if "model" in content:
        return [content["model"]]
    chunks = [content[name] for name in takewhile(content.__contains__, (f"model{i}" for i in count()))]
    if not chunks:
        raise UserError(f"{path} holds no model; give a checkpoint that Megatron-LM wrote")
    return chunks


def _flat(tree: Any, path: Path, seen: set[int], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, with keys joined by dots, except `_extra_state`, which holds no
    weight. `seen`: dictionaries met so far; one that stands in many places could give any number of names."""
    if not isinstance(tree, Mapping) or depth > DEEPEST or id(tree) in seen:
        kind = tree if isinstance(tree, StandIn) else type(tree).__name__
        where = shown_name(prefix) or "the top"
        raise UserError(f"{path} has a {kind} in its model at {where}; give a checkpoint of a GPT")
    seen.add(id(tree))
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name.endswith("_extra_state") or value is None:
            continue
        if isinstance(value, Tensor):
            check_stored(name, value.dtype, path)
            yield name, value
        else:
            yield from _flat(value, path, seen, f"{name}.", depth + 1)


def _ours(
    chunk: Mapping[str, Tensor], left_out: Collection[str], architecture: MegatronArchitecture, path: Path
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, tensor in chunk.items():
        if key in left_out or ANGLES.fullmatch(key):
            continue
        tensors[name_tensor(key, architecture, tensors, path)] = tensor
    return tensors


def consumed_samples(args: Any) -> int:
    """Return the training samples that Megatron-LM's arguments say the run has seen; 0 where they do not."""
    count = getattr(args, "consumed_train_samples", 0)
    return count if type(count) is int and 0 <= count < LARGEST_COUNT else 0
