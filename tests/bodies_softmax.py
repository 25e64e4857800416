"""What the ranks of tests of the softmax do: functions importable by name, for `tests.ranks`."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtgpt.ops.softmax  # noqa: F401, registers the operation


def cut_over_ranks(scores: Tensor, mask: Tensor | None, key: Tensor | None, dim: int) -> tuple[Tensor, Tensor, bool]:
    """Whole probabilities and gradient of scores that are cut along `dim`, and whether both stayed cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    samples = Shard(0) if dim == 0 else Replicate()
    mine = distribute_tensor(scores, mesh, [Shard(dim)]).requires_grad_()
    mask, key = (None if t is None else distribute_tensor(t, mesh, [samples]) for t in (mask, key))
    result, _ = torch.ops.dtgpt.softmax_forward(mine, mask, key, 0.5, mask is None, 0.3, [0, 0, 0])
    result.backward(distribute_tensor(scores.detach().cos(), mesh, [Shard(dim)]))
    cut = result.placements == mine.grad.placements == (Shard(dim),)
    return result.full_tensor().detach(), mine.grad.full_tensor(), cut
