"""How blocks are compiled."""

from collections.abc import Iterable
from typing import cast

import torch

from dtgpt.models.binding import BoundModule, bind
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.build import Entry
from dtgpt.parallel.compiled.torch_private import unmark_attention


def compile_forward(part: Decoder, whole: bool) -> None:
    """Compile what each block computes, and the embedding where it is a plain module; the hooks of `fully_shard` run
    around it, uncompiled. Blocks of one class and shape share their code: it is compiled once."""
    unmark_attention()
    ends = [part.embedding] if whole and part.embedding is not None else []
    for module in cast(Iterable[BoundModule], (*part.blocks.values(), *ends)):
        bind(module, run=torch.compile(module.runner, fullgraph=True, dynamic=False))


COMPILATION = Entry(
    "compilation",
    when=lambda made: made.settings.compile,
    deed=lambda part, made: compile_forward(part, whole=made.settings.plan.tp == 1),
    before="ZeRO",
)
