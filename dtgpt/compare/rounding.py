"""Which elements of a parameter, or of its gradient, are rounding alone.

Two right plans differ in them as in noise, and an optimizer that divides by the size of a gradient makes updates of
noise as large as any other. So they are not compared.
"""

import torch
from torch import Tensor

from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, inventory
from dtgpt.models.roles import Role, role_of
from dtgpt.models.shared.packed import pieces
from dtgpt.models.shared.positions import learns_positions


def comparable(config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Return the part of parameter `name`, or of its gradient, that is more than rounding; all of most.

    Where each token attends to itself alone, the softmax of one score is 1, and queries and keys have no gradient: of
    the weight and the bias of QKV the values remain. A bias of the keys that no rotation follows moves all scores of a
    query alike, which the softmax does not see: of the bias, queries and values remain, `[G, R + 1, D]`.
    """
    module, _, kind = name.rpartition(".")
    if role_of(module, config.roles) is not Role.QKV:
        return tensor
    block = int(name.split(".")[1])
    core = inventory(config).cores(block)[0]
    if core.sinks:  # another logit stands beside the scores
        return tensor
    if kind == "bias" and learns_positions(config):
        heads = tensor.reshape(-1, config.num_heads // core.kv_heads + 2, core.head_dim)
        return torch.cat([heads[:, :-2], heads[:, -1:]], dim=1)
    packed = pieces(config, Parameter(name, tuple(tensor.shape), Role.QKV, block))
    if core.window != 1 or len(packed) == 1:  # of an adapter
        return tensor
    return torch.cat([tensor[rows.start : rows.stop] for rows in packed[-1]])
