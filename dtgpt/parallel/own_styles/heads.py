"""Which matrices a plan's own table leaves a rank a part of."""

from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
)

from dtgpt.config.plan import Plan
from dtgpt.models.config import ModelConfig
from dtgpt.models.roles import Role, patterns_of
from dtgpt.parallel.local_weights.dims import dims_of
from dtgpt.parallel.tensor import make_table, style_of


def leaves_a_part(style: ParallelStyle | None) -> bool:
    """Return whether a linear map of this style leaves each rank its own part of the output's features."""
    whole = isinstance(style, ColwiseParallel) and any(layout.is_replicate() for layout in style.output_layouts)
    return dims_of(style).get("weight") == 0 and not whole


def degrees_of_heads(config: ModelConfig, plan: Plan) -> list[int]:
    """Return for each block the number of tp ranks that its heads are cut over, under a plan with a table."""
    table, patterns = make_table(config, plan), patterns_of(Role.QKV, config.roles)

    def cut(block: int) -> bool:
        names = [pattern.replace("*", str(block), 1) for pattern in patterns]
        return any(leaves_a_part(style_of(name, table)) for name in names)

    return [plan.tp if cut(block) else 1 for block in range(config.num_layers)]
