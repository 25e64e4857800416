"""What the ranks of tests of shards and pipelines do: functions importable by name."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import dtgpt.models.decoder
import dtgpt.parallel.pipeline
from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.recipe import Recipe
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.ops.random.philox import fold, root_key, row_chunks
from dtgpt.parallel.build import build_stages, make_engine
from dtgpt.parallel.engine import Graphs
from dtgpt.parallel.gradients import Sums
from dtgpt.parallel.layout import Region, slices
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.parallel.shards import Shards
from dtgpt.parallel.stages import places_of_edge

if TYPE_CHECKING:
    from dtgpt.planning.parameters import LocalParameter

CPU = torch.device("cpu")
KEY = root_key(11)


@dataclass
class Piece:
    """A shard as the parent gets it."""

    name: str
    region: Region
    replicas: int
    is_tied_copy: bool
    is_owner: bool
    local: Tensor


def build(config: GPT2Config, plan: ResolvedPlan) -> tuple[list[Decoder], Shards, Mesh]:
    mesh = Mesh(plan, CPU)
    return *build_stages(settings_of(config, plan), mesh, KEY), mesh


def whole_gradient(name: str, shape: tuple[int, ...]) -> Tensor:
    """Of a parameter, the same wherever it is asked for."""
    seed = fold(KEY, name).sum().item() % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shards_of(
    config: GPT2Config, plan: ResolvedPlan
) -> tuple[list[Piece], list["LocalParameter"], dict[str, Tensor | None], float]:
    """(what this rank holds, what `parameters_of` says that it does, the whole initial weights on rank 0, the norm of
    `whole_gradient`)."""
    from dtgpt.compare.whole_tensors import gather_whole
    from dtgpt.planning.parameters import parameters_of

    _, shards, mesh = build(config, plan)
    owned = [s.replica == 0 and not s.is_tied_copy for s in shards]
    pieces = [
        Piece(s.name, s.region, s.replicas, s.is_tied_copy, mine, s.local.detach().clone())
        for s, mine in zip(shards, owned, strict=True)
    ]
    whole = dict(gather_whole(shards, lambda shard: shard.local))
    return pieces, parameters_of(config, plan, mesh.rank), whole, norm_of(config, plan, shards)


def norm_of(config: GPT2Config, plan: ResolvedPlan, shards: Shards) -> float:
    """The norm of a gradient of which each rank's modules are given their part, as backward does: half by each end of
    the model where two stages hold the table, and addends of several sizes by the tp ranks where they hold such."""
    for shard in shards:
        part = whole_gradient(shard.name, tuple(shard.parameter.shape))[slices(shard.region)].contiguous()
        if shard.name == TABLE and plan.num_stages > 1:
            part = part / 2
        if shard.partial:
            part = part * (2 * (shards.mesh.place.tp + 1) / (plan.tp * (plan.tp + 1)))
        like = shard.parameter
        if isinstance(like, DTensor):
            options = {"run_check": False, "shape": like.shape, "stride": like.stride()}
            part = DTensor.from_local(part, like.device_mesh, like.placements, **options)
        like.grad = part
    shards.sums = Sums(settings_of(config, plan))  # every rank has the sum over replicas already
    shards.take_gradients()
    return shards.norm().item()


def settings_of(config: GPT2Config, plan: ResolvedPlan) -> Settings:
    """Return settings with this model and plan, in fp32 on the CPU; the rest counts for nothing here."""
    return Settings(
        model=config,
        plan=plan,
        device=CPU,
        dtype=torch.float32,
        seq_length=config.seq_length,
        micro_batch_size=1,
        global_batch_size=plan.dp,
    )


class LargestMade(TorchDispatchMode):
    """Watches the largest tensor in real memory that any operation makes: its elements, and by which operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.by, self.operations = 0, "", 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or tensor.device.type == "meta":
                continue
            self.operations += 1
            if tensor.untyped_storage().size() > self.elements:
                self.elements, self.by = tensor.untyped_storage().size(), str(function)
        return output


def largest_made(config: GPT2Config, plan: ResolvedPlan, chunk: int) -> tuple[int, str, int, int]:
    """While the model is built: (bytes of the largest memory made, by which operation, operations seen, bytes of this
    rank's largest shard). Initial weights are drawn `chunk` elements at a time."""
    mesh = Mesh(plan, CPU)
    with (
        mock.patch.object(dtgpt.models.decoder, "row_chunks", partial(row_chunks, elements=chunk)),
        LargestMade() as watch,
    ):
        _, shards = build_stages(settings_of(config, plan), mesh, KEY)
    return watch.elements, watch.by, watch.operations, max(s.local.nbytes for s in shards)


def logits_of_stages(recipe: Recipe, plan: ResolvedPlan, batches: list[Tensor]) -> list[Tensor | None]:
    """For each batch of tokens: this rank's columns of the logits.
    Gradients in between, whose messages must not be taken for one another's."""
    mesh, config, settings = Mesh(plan, CPU), recipe.model, recipe.settings(plan, CPU)
    stages, shards = build_stages(settings, mesh, KEY)
    engine, results = make_engine(stages, shards, settings, Graphs()), []
    for tokens in batches:
        with torch.no_grad():
            results.append(engine.logits(tokens))
        count = settings.micro_batches
        windows = torch.arange(count * recipe.micro_batch_size * (config.seq_length + 1)) % config.vocab_size
        windows = windows.reshape(-1, config.seq_length + 1)
        engine.gradients(count, Batch(windows[:, :-1], targets=windows[:, 1:]))
        shards.drop_gradients()
    return results


def gradients_by_places(recipe: Recipe, plan: ResolvedPlan) -> list[tuple[Tensor, list[Tensor], set[int]]]:
    """Of two steps, each with as many places on an edge as the schedule needs, and then with one for each micro-batch:
    the loss, the gradients, and in how many places each stage receives."""
    found = []
    for places_of in (places_of_edge, lambda plan, micro_batches: micro_batches):
        mesh, config, settings = Mesh(plan, CPU), recipe.model, recipe.settings(plan, CPU)
        stages, shards = build_stages(settings, mesh, KEY)
        with mock.patch.object(dtgpt.parallel.pipeline, "places_of_edge", places_of):
            engine: Any = make_engine(stages, shards, settings, Graphs())
        windows = torch.arange(settings.global_batch_size // plan.dp * (config.seq_length + 1)) ** 2 % config.vocab_size
        windows = windows.reshape(-1, config.seq_length + 1)
        for _ in range(2):
            loss = engine.gradients(settings.micro_batches, Batch(windows[:, :-1], targets=windows[:, 1:]))
            gradients = [shards.gradient(shard).clone() for shard in shards]
            shards.drop_gradients()
            ends = getattr(engine.schedule, "_stages", None) or [engine.schedule._stage]
            received = [(infos, beside) for end in ends for infos, beside in (
                (end.args_recv_info, end.stage_index - 1), (end.grad_recv_info, end.stage_index + 1))
                if RankCoordinates(plan, mesh.rank).rank_of(beside) is not None]  # fmt: skip
            places = {len({info.buffer.data_ptr() for (info,) in infos.values()}) for infos, _ in received}
            found.append((loss.clone(), gradients, places))
    return found
