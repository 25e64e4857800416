"""What ranks do in tests/parallel/test_layout.py."""

from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dtgpt.parallel.shards
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.gradients import Sums
from dtgpt.parallel.layout import Region, slices
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from tests.support.bodies_shards import CPU, KEY, settings_of, whole_gradient


def shards_with_own_axis(
    config: ModelConfig, plan: ResolvedPlan, names: list[str], ranks: int
) -> tuple[list[tuple[str, Region, Tensor, int, Region]], float, dict[str, Tensor | None]]:
    """Let each of `ranks` neighbours among the ranks of data hold its matrices of the stacks `names` alone, as experts
    lie. Return of each shard (name, region, weights, replicas, what it writes), the norm of the gradient
    `whole_gradient`, and the whole weights on rank 0."""
    from dtgpt.compare.whole_tensors import gather_whole

    mesh = Mesh(plan, CPU)
    with torch.device("meta"):
        stage = Decoder(config)
    grid = init_device_mesh("cpu", (plan.world // ranks, ranks), mesh_dim_names=("others", "ep"))
    for name in names:
        module, key = stage.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        whole = module.get_parameter(key)
        setattr(module, key, nn.Parameter(distribute_tensor(whole, grid["ep"], [Shard(0)])))
    stage.allocate(CPU)
    shards = Shards([stage], mesh, sums=Sums(settings_of(config, plan)))  # every rank has the sum over replicas already
    shards.initialize(config, KEY)
    for shard in shards:
        gradient = whole_gradient(shard.name, tuple(shard.parameter.shape))[slices(shard.region)].contiguous()
        like = shard.parameter
        if isinstance(like, DTensor):
            gradient = DTensor.from_local(gradient, like.device_mesh, like.placements, run_check=False)
        like.grad = gradient
    shards.take_gradients()
    with mock.patch.object(dtgpt.parallel.shards, "SMALL", 100):  # replicas share the rows of all but norms
        held = [(s.name, s.region, s.local.clone(), s.replicas, s.own[0]) for s in shards]
    return held, shards.norm().item(), dict(gather_whole(shards, lambda shard: shard.local))
