"""Reading a checkpoint: into the shards of any plan, or tensor by tensor.

A run may go on under another plan than the one that wrote, so nothing here knows the ranks of then: each rank looks up
which rectangles of a tensor are in which files, and reads the slices that it holds and nothing else. No rank holds more
than its own part and, for a moment, the pages of one piece of one tensor.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from dtgpt.checkpoint.manifest import READERS, Checkpoint, list_checkpoints, step_of
from dtgpt.checkpoint.shard_file import Damaged, copy_overlap, verification
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.models.source import Ranges, Source, parameter_shapes
from dtgpt.ops.optim.optimizer import Optimizer
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shard, Shards
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown_name

FREE = {"dropout", "init_std"}  # what may differ between the checkpoint's model and the recipe's


class Saved(Source):
    """The weights of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.config = checkpoint, replace(checkpoint.config, dropout=0.0)
        self.iteration, self.consumed_samples = checkpoint.state["step"], checkpoint.state["consumed_samples"]
        self.recipe = checkpoint.state.get("recipe", {})
        last = self.config.num_layers - 1
        name = next(inventory(self.config).of_block(last)).name
        if not checkpoint.pieces(name):  # before a model of that many blocks is laid out
            raise Damaged(checkpoint.folder, f"it has no block {last}")
        self._shapes = parameter_shapes(self.config)

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        whole = tuple(map(range, self._shapes[name]))
        target = torch.empty([len(r) for r in part or whole])
        self.read_into(name, tuple(part or whole), target)
        return target

    def read_into(self, name: str, part: Ranges, target: Tensor) -> None:
        read_part(self.checkpoint, name, self._shapes[name], part, target)


def read_part(checkpoint: Checkpoint, tensor: str, shape: tuple[int, ...], part: Ranges, target: Tensor) -> None:
    """Fill `target` with the elements `part` of a saved tensor, whose whole shape must be `shape`; raises Damaged."""
    found, wanted, used = 0, math.prod(map(len, part)), []
    for file, piece, position in checkpoint.pieces(tensor):
        if piece.shape != tuple(shape):
            raise Damaged(checkpoint.folder / file, f"its {tensor} is of shape {piece.shape}, the model's {shape}")
        count = copy_overlap(checkpoint.folder / file, piece, position, tuple(part), target)
        found += count
        used += [piece.part] if count else []
    if found != wanted or not verification().are_disjoint(used):
        raise Damaged(checkpoint.folder, f"of {tensor} {found} elements are there, where {wanted} are needed")


def load_training(checkpoint: Checkpoint, shards: Shards, optimizer: Optimizer) -> None:
    """Give this rank's shards their weights and `optimizer` its state, whatever plan wrote them. Raise UserError where
    there is no state, or that of an optimizer from which this one takes none."""
    if not checkpoint.has_optimizer:
        raise UserError(
            f"{checkpoint.folder} holds weights alone; begin a new run with --init_from {checkpoint.folder}"
        )
    saved = checkpoint.state["optimizer"]
    check_optimizer(checkpoint.folder, saved, optimizer.kind, optimizer.takes)

    def load(shard: Shard) -> None:
        read_part(checkpoint, shard.name, *shard.place_of(shard.local), shard.local)
        for source, tensor in states_to_fill(optimizer, shard, saved):
            read_part(checkpoint, f"{shard.name}.{source}", *shard.place_of(tensor), tensor)

    fill_shards(shards, load)


def states_to_fill(optimizer: Optimizer, shard: Shard, saved: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each state of the shard that the state of a `saved` kind of optimizer fills, with its name there."""
    names = optimizer.takes.get(saved, {})
    for name, tensor in optimizer.state(shard.index).items():
        source = names.get(name, name)
        if source is not None:
            yield source, tensor


def load_weights(source: Source, shards: Shards) -> None:
    """Give this rank's shards the weights of any source, a tensor at a time."""
    if isinstance(source, Saved):
        fill_shards(shards, lambda shard: source.read_into(shard.name, shard.region, shard.local))
    else:
        fill_shards(shards, lambda shard: shard.local.copy_(source.read(shard.name, shard.region)), threads=1)


@torch.no_grad()
def fill_shards(shards: Shards, load: Callable[[Shard], object], threads: int = READERS) -> None:
    """Let `load` give every shard its values, several at a time, then give them to the modules."""

    def one(shard: Shard) -> None:
        with torch.no_grad():  # a thread has a mode of its own
            load(shard)

    cuda = shards.mesh.device.type == "cuda"  # where threads queue on another stream than the run
    if cuda:
        torch.cuda.synchronize(shards.mesh.device)
    # Several at a time, where a capability has threads: a disk answers the slower, the fewer ask it.
    pool = next(iter(seams.listed("executors")), None)
    with nullcontext() if pool is None else pool(threads) as several:
        list((map if several is None else several.map)(one, shards))
    if cuda:
        torch.cuda.synchronize(shards.mesh.device)
    shards.publish()


def find_checkpoint(
    mesh: Mesh,
    run: Path,
    chosen: Path | None = None,
    weights_alone: bool = False,
    own: type[ModelConfig] | None = None,
) -> Checkpoint:
    """Return the newest whole checkpoint of a run, or the one `chosen`: the same on every rank, every file what was
    written. `weights_alone`: but for those of the optimizer. `own`:
    class of the model of a recipe.

    The ranks share the work of reading all files. Says so where a newer checkpoint is damaged; raises UserError where
    none is left.
    """
    tried: list[Path] = []
    problem = None

    def newest() -> Path | None:
        """List the folders anew each time: a run that is being trained removes checkpoints while they are read."""
        folders = [chosen] if chosen else list_checkpoints(run / "checkpoints")[::-1]
        return next((folder for folder in folders if folder not in tried), None)

    # The newest first. One that any rank finds damaged gives way to the one before it, on all ranks together.
    while folder := mesh.on_rank_0(newest):
        if problem and tried[-1].is_dir():
            say(f"{problem}; going on from the checkpoint before it, {folder.name}", warning=True)
        tried.append(folder)
        checkpoint, problem = None, None
        try:
            checkpoint = Checkpoint(folder, weights_alone, own)
            problem = checkpoint.problem(mesh.rank, mesh.world)
            if not chosen and checkpoint.state["step"] != step_of(folder):
                problem = f"{folder} is of step {checkpoint.state['step']}; give it back its name"
        except Damaged as damage:
            problem = str(damage)
        problems, digests = zip(*mesh.gather((problem, checkpoint and checkpoint.digest)), strict=True)
        problem = next(filter(None, problems), None)
        if problem is None and len(set(digests)) > 1:
            raise UserError(f"the nodes see different files in {folder}; let --runs name a folder that they share")
        if problem is None and checkpoint is not None:
            checkpoint.share_headers(mesh)
            return checkpoint
    if problem is None:
        raise UserError(f"{run} has no checkpoint; give a run folder that holds checkpoints/step_...")
    left = "resume from another one" if chosen else "no other checkpoint is left: begin again"
    raise UserError(f"{problem}; {left}, or restore the file")


def check_same_model(where: Path, saved: ModelConfig, wanted: ModelConfig) -> None:
    """Raise UserError, field by field, where the model of a checkpoint has another shape. Dropout may change."""
    check_same_architecture(where, saved, wanted)
    differences = [f"{k} {getattr(saved, k)} there, {getattr(wanted, k)} here" for k in differing(saved, wanted)]
    if differences:
        raise UserError(f"{where} holds another model: {'; '.join(differences)}; give the same --model values")


def differing(saved: ModelConfig, wanted: ModelConfig) -> list[str]:
    """Return the fields by which two models of one architecture differ. Windows that hide nothing at these positions
    are no difference: older versions left them out of what they read from Hugging Face's folders."""
    there, here = asdict(saved), asdict(wanted)
    kinds = [[config.block_kind(index) for index in range(config.num_layers)] for config in (saved, wanted)]
    free = FREE | {"window", "window_pattern"} if kinds[0] == kinds[1] else FREE
    return [name for name in here if name not in free and there[name] != here[name]]


def check_same_samples(checkpoint: Checkpoint, seq_length: int) -> None:
    """Raise UserError where the run of a checkpoint has samples of another length than `seq_length`, by which the order
    of its data and its count of tokens go."""
    saved = checkpoint.state.get("recipe", {}).get("seq_length") or checkpoint.config.seq_length
    if saved != seq_length:
        raise UserError(
            f"{checkpoint.folder} was trained on samples of {saved} tokens, not {seq_length}; leave --seq_length out, "
            f"or begin a new run with its weights: --init_from {checkpoint.folder}"
        )


def check_optimizer(where: Path, saved: str, wanted: str, takes: Collection[str]) -> None:
    """Raise UserError where the state at `where` is of the kind `saved`, with which the recipe's optimizer, `wanted`,
    cannot go on. takes: the other kinds with which it can."""
    if saved != wanted and saved not in takes:
        raise UserError(
            f"{where} was trained with optimizer.kind={shown_name(saved)}, and the recipe has {wanted}; give a recipe "
            f"with that optimizer, or begin a new run with the weights: --init_from {where}"
        )


def check_same_architecture(where: Path, saved: ModelConfig, wanted: ModelConfig) -> None:
    """Raise UserError where the recipe's model is of another architecture than that at `where`."""
    if type(saved) is not type(wanted):
        same = saved.architecture == wanted.architecture  # by name: a class of a user's own
        there, here = (type(one).__name__ if same else one.architecture for one in (saved, wanted))
        raise UserError(
            f"{where} holds a {there}, and the recipe's model is a {here}; give another model, or a recipe with a "
            f"{type(saved).__name__}"
        )
