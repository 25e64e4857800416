"""Dimensions that styles of tensor parallelism cut."""

from collections.abc import Mapping

from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)

from dtgpt.parallel.tensor import OUTPUTS, Partition, VocabularyRows

INPUTS: Mapping[str, int] = {"weight": 1}


def dims_of(style: ParallelStyle | None) -> Mapping[str, int]:
    """Return the dimension of each parameter, by its name in the module, that a style cuts. Styles of torch are known
    by their class."""
    if isinstance(style, Partition):
        return style.dims
    if isinstance(style, ColwiseParallel | VocabularyRows):
        return OUTPUTS
    return INPUTS if isinstance(style, RowwiseParallel) else {}
