"""Blocks in a step that observes values, by which 8-bit products get their scales: they are computed again in backward.

Such a step computes its products in 16 bits. Their activations would take more memory than any other step has.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.models.binding import BoundModule, bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import Linear
from dtgpt.parallel.build import Building, Entry
from dtgpt.parallel.recompute.blocks import recomputed
from dtgpt.parallel.recompute.rules import repeats, repeats_blocks


def observes_again(settings: Settings) -> bool:
    """Return whether a step that observes values computes blocks again in backward, which other steps do not."""
    repeats_all = repeats_blocks(settings) and settings.recompute_blocks is None
    return settings.products is not None and not repeats_all and not settings.plan.splits_backward


def repeat_observed_blocks(part: Decoder, building: Building) -> None:
    """Let the blocks that `recompute` does not name run again in backward while they observe."""
    settings = building.settings
    for index, block in enumerate(part.blocks.values()):
        if not (repeats_blocks(settings) and repeats(settings, index)):
            module = cast(BoundModule, block)
            bind(module, run=recomputed_while(partial(observes, module), module.compute))


def recomputed_while(condition: Callable[[], bool], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that is `recomputed` where the condition holds as it is called."""
    again = recomputed(function)
    return lambda *values: (again if condition() else function)(*values)


def observes(part: nn.Module) -> bool:
    """Return whether a pass through `part` takes the largest values of products that are quantised from the next step
    on."""
    linears = (module for module in part.modules() if isinstance(module, Linear))
    products: Iterable[Any] = (each.bound.quantised for each in linears)
    return any(each is not None and each.observes for each in products)


OBSERVED = Entry(
    "observed blocks",
    lambda made: made.masters and observes_again(made.settings),
    repeat_observed_blocks,
    before="ZeRO",
    runs=True,
)
