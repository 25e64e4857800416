"""From the plain model to what this rank holds of it. The order is always the same:

model on meta -> cut into stages -> tensor table -> modules of capabilities -> recompute -> compile -> fully_shard
-> memory -> initial weights
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.binding import BoundModule, bind, on_meta
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import AttentionCore, Output, observes
from dtgpt.ops.attention.core import operations
from dtgpt.ops.attention.packed import keep_in_graphs
from dtgpt.ops.loss.head import CoupledLoss
from dtgpt.parallel.engine import SingleStageEngine, TrainingEngine
from dtgpt.parallel.fsdp import shard_over_data
from dtgpt.parallel.gradients import Buckets
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from dtgpt.parallel.stages import keep_stage
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.timers import NO_TIMERS, Timers

# What a plan alone needs is imported where the plan has it: DTensor, torch's pipelines and its compiler take a second.
if TYPE_CHECKING:
    from dtgpt.comm.collectives import KernelCollectives
    from dtgpt.parallel.tensor import Table


def build_stages(
    settings: Settings, mesh: Mesh, key: Tensor | None, masters: bool = True, table: "Table | None" = None
) -> tuple[list[Decoder], Shards]:
    """Return the pipeline stages of this rank, one without a pipeline, and their shards. No rank holds more than its
    shards at any time. Where other modules than the model's own are trained, the shards are theirs, and `frozen` those
    of the model.

    No `key`: the memory is left as it is, for a checkpoint to fill. No `masters`: for inference. `table`: styles of
    tensor parallelism; None: those of the plan."""
    peers = None
    if masters and mesh.tp_group is not None:
        from dtgpt.parallel.between import make_peers

        peers = make_peers(settings, mesh)
    if masters and mesh.cp_group is not None:
        from dtgpt.parallel.context import share_exchange

        share_exchange(settings, mesh)
    stages = [lay_out_stage(settings, mesh, stage, masters, table, peers) for stage in mesh.place.stages]
    gathered: dict[nn.Parameter, Tensor] = {}
    for stage in stages:
        stage.allocate(mesh.device)
        if settings.plan.zero and masters and not settings.freezes_weights:
            from dtgpt.parallel.pushed_shards import push_shards

            gathered |= push_shards(stage, mesh, settings.dtype, settings.scattered_dtype)
    shards = Shards(stages, mesh, masters, gathered, settings.reduce == "exact" and masters, settings.dtype)
    if settings.freezes_weights:
        shards.frozen = Shards(stages, mesh, masters=False, trained=False)
    if key is not None:
        (shards.frozen or shards).initialize(settings.model, key)
    return stages, shards


def lay_out_stage(
    settings: Settings, mesh: Mesh, stage: int, masters: bool = True, table: "Table | None" = None,
    peers: "KernelCollectives | None" = None,
) -> Decoder:  # fmt: skip
    """Return one stage on the meta device, cut as the plan says. `peers`: as of `make_table`."""
    plan, config = settings.plan, settings.model
    narrows = plan.narrows_weights or not masters or settings.freezes_weights
    dtype = settings.dtype if narrows else torch.float32
    with on_meta():
        part = keep_stage(Decoder(config, settings.dtype), stage, plan).to(dtype)
    if plan.tp > 1:
        from dtgpt.parallel.tensor import apply_table, make_table

        styles = make_table(config, plan, settings.local_length, peers) if table is None else table
        apply_table(part, mesh.devices["tp"], styles)
    if settings.freezes_weights:
        for add_modules in seams.listed("added_modules"):
            add_modules(part, settings, mesh.place, mesh.device)
    if plan.cp > 1:
        from dtgpt.parallel.context import place_dropout

        place_dropout(part, settings, mesh.place)
    set_execution(part, settings, mesh)
    if settings.compile:
        compile_forward(part, whole=plan.tp == 1)
    if plan.zero:
        shard_over_data(part, mesh, settings.dtype)
    return part


def set_execution(part: Decoder, settings: Settings, mesh: Mesh) -> None:
    """Give the attention cores their back end, and let what `recompute` names run again in backward. Steps that
    observe values compute all blocks again: their 16-bit activations would take more memory than any other step."""
    blocks = list(enumerate(cast(Iterable[BoundModule], part.blocks.values())))
    for index, block in blocks:
        for module in block.modules():
            if isinstance(module, AttentionCore):
                bind(module, backend=settings.attention)
                if settings.recompute == "selective" and settings.repeats(index):
                    bind(module, run=recomputed(module.compute))
    if mesh.cp_group is not None:  # around what selective recomputation repeats, so that no message is sent again
        from dtgpt.parallel.context import exchange_heads

        exchange_heads(part, mesh.cp_group, settings.plan)
    keeps = operations() if settings.recompute == "around_attention" else []
    for index, block in blocks:
        if settings.repeats_blocks and settings.repeats(index):
            bind(block, run=recomputed(block.compute, keeps))
        elif settings.observes_again:
            bind(block, run=recomputed_while(partial(observes, block), block.compute))


def recomputed_while(condition: Callable[[], bool], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that is `recomputed` where the condition holds as it is called."""
    again = recomputed(function)
    return lambda *values: (again if condition() else function)(*values)


def recomputed(function: Callable[..., Tensor], keeps: Sequence[OpOverload] = ()) -> Callable[..., Tensor]:
    """Save the inputs alone, and what the operations `keeps` return, and run the rest of `function` again in backward
    (Chen et al. 2016; Li et al. 2023, DistFlashAttn, section 3.3, which keep attention's). There is no generator state
    to keep: masks are drawn again from their keys."""
    again = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return partial(again, context_fn=partial(create_selective_checkpoint_contexts, list(keeps))) if keeps else again


def compile_forward(part: Decoder, whole: bool) -> None:
    """Compile what each block computes, and the embedding where it is a plain module; the hooks of `fully_shard` run
    around it, uncompiled. Blocks of one class and shape share their code: it is compiled once."""
    keep_in_graphs()
    ends = [part.embedding] if whole and part.embedding is not None else []
    for module in cast(Iterable[BoundModule], (*part.blocks.values(), *ends)):
        bind(module, run=torch.compile(module.runner, fullgraph=True, dynamic=False))


def make_engine(
    stages: list[Decoder], shards: Shards, settings: Settings, graphs: Graphs, timers: Timers = NO_TIMERS
) -> TrainingEngine:
    """Return what runs forward and backward under the plan. Without graphs, `timers` measure them."""
    if settings.reduce == "exact":
        from dtgpt.parallel.exact import ExactBuckets

        shards.buckets = ExactBuckets(stages, shards.mesh, settings)
    elif settings.sums_gradients:
        hooks = not settings.plan.splits_backward
        mesh = shards.mesh
        narrow = settings.plan.narrows_weights and settings.dtype.itemsize == 2
        shards.buckets = Buckets(stages, mesh.data_group, settings.micro_batches, hooks, mesh if narrow else None)
    if settings.plan.pp == 1:
        return SingleStageEngine(stages[0], shards, graphs, timers)
    from dtgpt.parallel.pipeline import PipelineEngine

    return PipelineEngine(stages, shards, graphs, settings, timers)


def scale_gradients(stages: list[Decoder], scale: Tensor | None) -> None:
    """Let the output layer multiply the gradient of its loss by the scalar `scale`, read at each pass; None: by 1."""
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, Output):
            bind(module, gradient_scale=scale)


def set_loss(stages: list[Decoder], coupled: CoupledLoss) -> None:
    """Let the output layer compute the loss by `coupled`, in place of the mean over tokens."""
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, Output):
            bind(module, coupled=coupled)


def micro_batch_weight(micro_batches: int, plan: ResolvedPlan) -> float:
    """Return what the gradient of one micro-batch's mean loss counts in the sum over all: the same under every plan, so
    that 16-bit gradients are of the same size, too."""
    return 1 / (micro_batches * plan.data_ranks)


@torch.no_grad()
def smoke_test_table(engine: TrainingEngine, settings: Settings) -> None:
    """Run the model once where a recipe changed the plan's table; raises UserError where its styles do not fit."""
    tokens = torch.zeros(1, settings.local_length, dtype=torch.int64, device=settings.device)
    try:
        engine.logits(tokens)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the modules of the plan's table do not fit each other ({reason}); give a COLUMN and a ROW module that "
            "follow each other styles that belong together, or leave both out"
        ) from None
