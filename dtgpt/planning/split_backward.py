"""What a schedule that cuts backward in two keeps of a block: measured on the meta device, by torch's own halves.

The half for inputs keeps all activations, and the gradient of each operation with weights. The half for weights asks
autograd for the gradients of one operation after the other, and with full recomputation computes the whole block again
for each: what this operation does not use stays until the pass ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dtgpt.models.binding import bind
from dtgpt.models.layers import Context
from dtgpt.ops.serve import split_backward
from dtgpt.parallel.build import recomputed
from dtgpt.planning.alive import Alive
from dtgpt.planning.meta_block import BlockKind, make_block, make_input
from dtgpt.planning.torch_private import backward_of_inputs, backward_of_weights


@dataclass(frozen=True)
class SplitSizes:
    """Bytes of one block and a micro-batch, beside what its forward pass keeps."""

    after: float  # the half for inputs
    during: float  # the half for weights, at most
    left: float  # by the half for weights, until that of the last block ends

    def scaled(self, samples: int) -> "SplitSizes":
        return SplitSizes(*(samples * size for size in vars(self).values()))


@lru_cache(maxsize=64)
def halves_of(kind: BlockKind, again: bool) -> SplitSizes:
    """Return the sizes for one sample. again: whether the block is computed again in backward."""
    block = make_block(kind)
    weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    if again:
        bind(block, run=recomputed(block.compute))
    x, made = make_input(kind, 1).requires_grad_(), make_input(kind, 1)
    with split_backward(), Alive(weights) as alive:
        outputs = [block(x, Context())]
        before, chain = alive.now, outputs[0].grad_fn  # which the blocks that follow in a stage keep
        groups = backward_of_inputs(outputs, [made], [x], block.parameters())
        x.grad = None
        after = alive.now - before
        during = left = after
        for _ in _weights_in_turn(block.parameters(), groups):
            during, left = max(during, alive.peak - before), alive.now - before
            for parameter in block.parameters():
                parameter.grad = None
        del groups, chain
    return SplitSizes(after, during, left)


def _weights_in_turn(parameters: Iterator[Any], groups: list[dict[str, Any]]) -> Iterator[None]:
    every = list(parameters)
    for group in groups:
        backward_of_weights(iter(every), [group])
        yield
