"""How a part of a stage is computed again in backward: attention cores, blocks but for their attention, or whole
blocks."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtgpt.models.binding import BoundModule, bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import attention_cores
from dtgpt.ops.attention.core import ATTENTION
from dtgpt.ops.operation import load_kernels
from dtgpt.parallel.build import Building, Entry
from dtgpt.parallel.recompute.rules import repeats, repeats_blocks


def repeat_cores(part: Decoder, building: Building) -> None:
    """Let the attention cores of the blocks that are named run again in backward."""
    for index, block in enumerate(part.blocks.values()):
        for core in attention_cores(block) if repeats(building.settings, index) else ():
            bind(core, run=recomputed(core.runner))


def repeat_blocks(part: Decoder, building: Building) -> None:
    """Let the blocks that are named run again in backward."""
    settings = building.settings
    keeps = operations() if settings.recompute == "around_attention" else []
    for index, block in enumerate(cast(Iterable[BoundModule], part.blocks.values())):
        if repeats(settings, index):
            bind(block, run=recomputed(block.runner, keeps))


def recomputed(function: Callable[..., Tensor], keeps: Sequence[OpOverload] = ()) -> Callable[..., Tensor]:
    """Save the inputs alone, and what the operations `keeps` return, and run the rest of `function` again in backward
    (Chen et al. 2016; Li et al. 2023, DistFlashAttn, section 3.3, which keep attention's). There is no generator state
    to keep: masks are drawn again from their keys."""
    again = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return partial(again, context_fn=partial(create_selective_checkpoint_contexts, list(keeps))) if keeps else again


def operations() -> list[OpOverload]:
    """Return the operations, of kernels and of `sdpa`, that an attention core's output comes from."""
    aten = torch.ops.aten
    load_kernels(ATTENTION.name)
    return [
        *(each for kernel in ATTENTION.kernels for each in kernel.kept),
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]


# Before anything runs around a core, such as messages.
CORES = Entry(
    "recomputation of cores",
    when=lambda made: made.settings.recompute == "selective",
    deed=repeat_cores,
    after="added modules",
    runs=True,
)
BLOCKS = Entry(
    "recomputation",
    when=lambda made: made.masters and repeats_blocks(made.settings),
    deed=repeat_blocks,
    before="ZeRO",
    runs=True,
)
