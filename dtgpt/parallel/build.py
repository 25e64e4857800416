"""From the plain model to what this rank holds of it. The order is always the same:

model on meta -> cut into stages -> tensor table -> recompute -> compile -> fully_shard -> memory -> initial weights
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dtgpt.errors import UserError
from dtgpt.model import GPT, GPTConfig, allocate
from dtgpt.ops.attention import causal_attention
from dtgpt.parallel.cost import keeps_totals
from dtgpt.parallel.data import Accumulation, shard_over_data
from dtgpt.parallel.gradients import Buckets
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.passes import Passes
from dtgpt.parallel.pipeline import Pipeline, keep_stage
from dtgpt.parallel.plan import Plan
from dtgpt.parallel.shards import Shards
from dtgpt.parallel.tensor import apply_table, make_table
from dtgpt.recipe import Recipe


def build_stages(
    recipe: Recipe, mesh: Mesh, dtype: torch.dtype, key: Tensor | None, compiled: bool = False, masters: bool = True
) -> tuple[list[GPT], Shards]:
    """The pipeline stages of this rank, one of them without a pipeline, and the shards that they consist of. No rank
    holds more than its shards at any time. No `key`: the memory is left as it is, for a checkpoint to fill. No
    `masters`: nothing is to be trained."""
    stages = [lay_out_stage(recipe, mesh, dtype, stage, compiled, masters) for stage in mesh.place.stages]
    for stage in stages:
        allocate(stage, mesh.device)
    shards = Shards(stages, mesh, masters)
    if key is not None:
        shards.initialize(recipe.model, key)
    return stages, shards


def lay_out_stage(
    recipe: Recipe, mesh: Mesh, dtype: torch.dtype, stage: int, compiled: bool, masters: bool = True
) -> GPT:
    """One stage on the meta device, cut as the plan says."""
    plan, config = mesh.plan, recipe.model
    with torch.device("meta"):
        part = keep_stage(GPT(config, dtype), stage, plan).to(
            dtype if plan.narrows_weights or not masters else torch.float32
        )
    if plan.tp > 1:
        apply_table(part, mesh.devices["tp"], make_table(config, plan))
    for block in part.blocks.values():
        block.attn.core = partial(causal_attention, backend=recipe.attention)
        if recipe.recompute == "selective":
            block.attn.core = recomputed(block.attn.core)
        elif recipe.recompute == "full":
            block.forward = recomputed(block.forward)
    if compiled:
        compile_forward(part, whole=plan.tp == 1)
    if plan.zero:
        shard_over_data(part, mesh, dtype)
    return part


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Save the inputs alone and run `function` once more in backward (Chen et al. 2016). There is no generator state to
    keep: masks are drawn again from their keys."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def compile_forward(part: GPT, whole: bool) -> None:
    """Compile each block, and the embedding where it is a plain module. It is the forward that is compiled, so that the
    hooks of `fully_shard` run around it, uncompiled. Blocks share their code: it is compiled once."""
    ends = [part.embedding] if whole else []
    for module in (*part.blocks.values(), *ends):
        if module is not None:
            module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)


def make_passes(stages: list[GPT], shards: Shards, recipe: Recipe, graphs: Graphs, dtype: torch.dtype) -> Passes:
    """What runs forward and backward under the plan."""
    mesh = shards.mesh
    plan, count = mesh.plan, recipe.micro_batches(mesh.plan.dp)
    if keeps_totals(plan, count, dtype.itemsize):
        shards.buckets = Buckets(stages, mesh.dp_group, count, hooks=not plan.splits_backward)
    if plan.pp == 1:
        return Accumulation(stages[0], shards, graphs)
    return Pipeline(stages, shards, graphs, recipe.micro_batch_size, count, dtype)


def scale_gradients(stages: list[GPT], scale: Tensor) -> None:
    """Let the output layer multiply the gradient of its loss by the scalar `scale`, whatever it holds at the time."""
    for stage in stages:
        if stage.head is not None:
            stage.head.lm_head.gradient_scale = scale


def gradient_share(micro_batches: int, plan: Plan) -> float:
    """Return what the gradient of one micro-batch's mean loss counts in the sum over all: the same under every plan, so
    that 16-bit gradients are of the same size, too."""
    return 1 / (micro_batches * plan.dp)


@torch.no_grad()
def try_table(passes: Passes, config: GPTConfig, device: torch.device) -> None:
    """Run the model once, where a recipe changed the plan's table; raises UserError where its styles do not fit."""
    tokens = torch.zeros(1, config.seq_length, dtype=torch.int64, device=device)
    try:
        passes.logits(tokens)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the modules of the plan's table do not fit each other ({reason}); give a pair such as mlp.fc and "
            "mlp.proj styles that belong together, or leave both out"
        ) from None
