"""From the plain model to what this rank holds of it. The order is always the same:

model on meta -> cut into stages -> tensor table -> compile -> fully_shard -> memory -> initial weights into each shard
"""

from functools import partial

import torch
from torch import Tensor

from dtgpt.errors import UserError
from dtgpt.model import GPT, GPTConfig, allocate
from dtgpt.ops.cross_entropy import cross_entropy
from dtgpt.parallel.data import Accumulation, shard_over_data
from dtgpt.parallel.mesh import Mesh, chunk
from dtgpt.parallel.passes import LossFunction, Passes
from dtgpt.parallel.pipeline import Pipeline, keep_stage
from dtgpt.parallel.shards import Shards
from dtgpt.parallel.tensor import apply_table, make_table
from dtgpt.recipe import Recipe


def build_stages(
    config: GPTConfig, mesh: Mesh, dtype: torch.dtype, key: Tensor | None, compiled: bool = False
) -> tuple[list[GPT], Shards]:
    """The pipeline stages of this rank, one of them without a pipeline, and the shards that they consist of. No rank
    holds more than its shards at any time. No `key`: the memory is left as it is, for a checkpoint to fill."""
    stages = [lay_out_stage(config, mesh, dtype, stage, compiled) for stage in mesh.place.stages]
    for stage in stages:
        allocate(stage, mesh.device)
    shards = Shards(stages, mesh)
    if key is not None:
        shards.initialize(config, key)
    return stages, shards


def lay_out_stage(config: GPTConfig, mesh: Mesh, dtype: torch.dtype, stage: int, compiled: bool = False) -> GPT:
    """One stage on the meta device, cut as the plan says."""
    plan = mesh.plan
    with torch.device("meta"):
        part = keep_stage(GPT(config, dtype), stage, plan)
    if plan.tp > 1:
        apply_table(part, mesh.devices["tp"], make_table(config, plan))
    if compiled:
        compile_forward(part, whole=plan.tp == 1)
    if mesh.world > 1:
        shard_over_data(part, mesh, dtype)
    return part


def compile_forward(part: GPT, whole: bool) -> None:
    """Compile each block, and the ends where they are plain modules. It is the forward that is compiled, so that the
    hooks of `fully_shard` run around it, uncompiled. Blocks share their code: it is compiled once."""
    ends = [part.embedding, part.head] if whole else []
    for module in (*part.blocks.values(), *ends):
        if module is not None:
            module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)


def make_passes(stages: list[GPT], recipe: Recipe, mesh: Mesh, dtype: torch.dtype, compiled: bool = False) -> Passes:
    """What runs forward and backward under the plan."""
    config, plan = recipe.model, mesh.plan
    start = chunk(range(config.padded_vocab_size), plan.tp, mesh.place.tp).start
    loss: LossFunction = partial(
        cross_entropy, vocab_size=config.vocab_size, start=start, group=mesh.tp_group, fused=compiled
    )
    if plan.pp == 1:
        return Accumulation(stages[0], mesh, loss)
    return Pipeline(stages, mesh, loss, recipe.micro_batch_size, recipe.micro_batches(plan.dp), dtype)


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
