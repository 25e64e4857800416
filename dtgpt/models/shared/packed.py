"""Matrices that lie together in one weight."""

from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, inventory
from dtgpt.models.roles import Role

Rows = tuple[range, ...]  # of a matrix that lies among others in one weight
GATED = ("mlp.gate_up.weight", ".mlp.shared.gate_up.weight")  # whose rows are gate 0, up 0, gate 1, up 1, ...


def pieces(config: ModelConfig, parameter: Parameter, per_head: bool = False) -> list[Rows]:
    """Return the rows of each matrix that a weight `[rows, columns]` packs: queries, keys and values, or gate and up,
    or the whole weight. per_head: one matrix for each head of queries, keys and values. The rows of a stack of matrices
    `[E, rows, columns]` are counted from its first one on; gate and up of an expert are two."""
    rows = parameter.shape[0]
    if len(parameter.shape) == 3:
        size = parameter.shape[1]
        parts = 2 if parameter.role is Role.COLUMN_STACK and getattr(config, "gated_stacks", False) else 1
        firsts = range(0, rows * size, size)
        return [(range(first + part, first + size, parts),) for first in firsts for part in range(parts)]
    if parameter.name.endswith(GATED):
        from dtgpt.models.rotary import RotaryConfig  # here: not every architecture has rows of gates

        if isinstance(config, RotaryConfig):
            return [(range(first, rows, 2),) for first in (0, 1)]
    if parameter.role is not Role.QKV or parameter.block is None:
        return [(range(rows),)]
    for core in inventory(config).cores(parameter.block):  # heads are stored by group: queries, a key, a value
        parts, size = config.num_heads // core.kv_heads + 2, core.head_dim
        if rows == core.kv_heads * parts * size:
            heads = [range(start, start + size) for start in range(0, rows, size)]
            if per_head:
                return [(head,) for head in heads]
            queries = tuple(head for i, head in enumerate(heads) if i % parts < parts - 2)
            return [queries, tuple(heads[parts - 2 :: parts]), tuple(heads[parts - 1 :: parts])]
    return [(range(rows),)]
