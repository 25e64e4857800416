"""Decode steps through the kernels of `dtgpt.ops.decode`, for stages that these can run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dtgpt.inference.cache import Cache, LayerCache, Rows
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import Context
from dtgpt.ops.attention.cached import HEAD_SIZES
from dtgpt.ops.decode.blocks import AllReduce, embed, run_blocks, run_head
from dtgpt.ops.fast import has_triton
from dtgpt.parallel.mesh import Mesh


class FusedStage:
    """One stage, called with rows of a decode step instead of a batch."""

    def __init__(self, stage: Decoder, layers: Sequence[LayerCache], all_reduce: AllReduce | None):
        self.config, self._stage, self._layers, self._all_reduce = stage.config, stage, layers, all_reduce
        modules: list[Any] = list(stage.blocks.values())
        self._blocks = [block.decode_weights() for block in modules]
        embedding: Any = stage.embedding
        whole = embedding is not None and all_reduce is None  # tensor-parallel ranks have parts of the table
        self._embedding = embedding.decode_weights() if whole else None
        head: Any = stage.head
        self._head = None if head is None else head.decode_weights()

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """Return activations `[1, B, H]`, or of the last stage logits fp32 `[1, B, V_local]`, of tokens `[1, B]` or
        activations."""
        if self._embedding is not None:
            x = embed(x[0], rows.positions, self._embedding)[None]
        elif self._stage.embedding is not None:
            x = self._stage.embedding(x, Context(positions=rows.positions[None]))
        keys, values = [layer.keys for layer in self._layers], [layer.values for layer in self._layers]
        stream = run_blocks(x[0], self._blocks, keys, values, *rows, self._all_reduce)
        return (stream.whole() if self._head is None else run_head(stream, self._head))[None]


def parts_of(stage: Decoder) -> list[Any]:
    """Return the embedding, the blocks and the head of a stage, as far as it has them."""
    return [module for module in (stage.embedding, *stage.blocks.values(), stage.head) if module is not None]


def fuse(stages: list[Decoder], mesh: Mesh, cache: Cache) -> list[FusedStage] | None:
    """Return the stages for decode steps, or None where kernels cannot run them: on CPUs, in fp32, with parameters that
    are cut for training, or with blocks of another kind."""
    modules = [module for stage in stages for module in parts_of(stage)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    usable = all(type(p.data) is Tensor and p.dtype.itemsize == 2 and has_triton(p) for p in parameters)
    sizes = {layer.keys.shape[-1] for layer in cache.layers}
    if not usable or not all(hasattr(m, "decode_weights") for m in modules) or not sizes <= set(HEAD_SIZES):
        return None
    all_reduce = None if mesh.tp_group is None else partial(dist.all_reduce, group=mesh.tp_group)
    layers = iter(cache.layers)
    return [FusedStage(stage, [next(layers) for _ in stage.blocks], all_reduce) for stage in stages]
