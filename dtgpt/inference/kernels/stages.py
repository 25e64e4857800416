"""Stages whose decode steps are kernels of `dtgpt.ops.kernels.decode`."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.inference.cache import DecodeRows, LayerCache
from dtgpt.inference.kernels.weights import decode_weights
from dtgpt.models.binding import bound_of
from dtgpt.models.decoder import Decoder
from dtgpt.models.layers import Context
from dtgpt.ops.kernels.decode import exact as exact_blocks
from dtgpt.ops.kernels.decode.blocks import embed, kernels_of_few_rows, run_blocks, run_head
from dtgpt.ops.kernels.decode.exchange import MOST_RANKS, Exchange
from dtgpt.parallel.collectives import transport
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh

_exchanges: dict[int, Exchange | None] = {}  # by tp, for good: kernels that are under way may still use their memory


class FusedStage:
    """One stage, called with rows of a decode step instead of a batch."""

    def __init__(self, stage: Decoder, layers: Sequence[LayerCache], mesh: Mesh):
        self.config, self._stage, self._mesh = stage.config, stage, mesh
        self._keys, self._values = [layer.keys for layer in layers], [layer.values for layer in layers]
        self._blocks = [decode_weights(block) for block in stage.blocks.values()]
        self._embedding = None if stage.embedding is None else decode_weights(stage.embedding)
        self._head = None if stage.head is None else decode_weights(stage.head)
        self._exchange: Exchange | None = None

    def __call__(self, x: Tensor, rows: DecodeRows) -> Tensor:
        """Return activations `[1, B, H]`, or of the last stage logits fp32 `[1, B, V]` or `[1, B, V_local]`, of tokens
        `[1, B]` or activations."""
        if self._embedding is not None:
            x = self._embed(x, rows)
        all_reduce = None if self._mesh.tp_group is None else self._all_reduce
        stream = run_blocks(x[0], self._blocks, self._keys, self._values, *rows, all_reduce, self._exchange)
        if self._head is None:
            return stream.whole()[None]
        logits = run_head(stream, self._head)
        whole = None if self._exchange is None else self._exchange.gather(logits, self.config.padded_vocab_size)
        return (logits if whole is None else whole)[None]

    def share_exchange(self) -> None:
        """Let tensor-parallel ranks exchange numbers by kernels, where they can. All ranks of the mesh take part."""
        mesh = self._mesh
        if mesh.tp_group is None or mesh.plan.tp > MOST_RANKS:
            return
        allowed = transport().serves()
        few = allowed and self._has_few_rows()
        votes = mesh.gather((allowed, few))
        if not allowed or len(set(votes)) > 1:  # ranks where a build failed would wait for others
            return
        if mesh.plan.tp not in _exchanges:
            _exchanges[mesh.plan.tp] = transport().open_exchange(mesh, mesh.tp_group)
        self._exchange = _exchanges[mesh.plan.tp]

    def _has_few_rows(self) -> bool:
        return kernels_of_few_rows(self._blocks, self._keys, self._mesh.plan.tp) is not None

    def _embed(self, tokens: Tensor, rows: DecodeRows) -> Tensor:
        """Return activations `[1, B, H]` of tokens `[1, B]`."""
        weights, mesh = self._embedding, self._mesh
        assert weights is not None
        if mesh.tp_group is None:
            return embed(tokens[0], rows.positions, weights)[None]
        first = chunk(range(self.config.padded_vocab_size), mesh.plan.tp, mesh.place.tp).start
        found = None if self._exchange is None else self._exchange.look_up(tokens[0], weights.tokens, first)
        if found is None:
            embedding: Any = self._stage.embedding
            return embedding(tokens, Context(positions=rows.positions[None]))
        order = torch.arange(len(found), device=found.device)
        return embed(order, rows.positions, weights._replace(tokens=found))[None]

    def _all_reduce(self, parts: Tensor) -> Tensor:
        """Return the sum `[1, B, H]` over groups and tensor-parallel ranks of fp32 `[G, B, H]`."""
        total = None if self._exchange is None else self._exchange.sum(parts)
        if total is None:
            total = parts if len(parts) == 1 else parts.sum(0, keepdim=True)
            dist.all_reduce(total, group=self._mesh.tp_group)
        return total


class ExactStage(FusedStage):
    """One stage, with the bits of training's forward pass."""

    def __init__(self, stage: Decoder, layers: Sequence[LayerCache], mesh: Mesh):
        super().__init__(stage, layers, mesh)
        bindings = [(module, bound_of(module)) for module in stage.modules()]
        self._pieces = {id(module.weight): bound.pieces for module, bound in bindings if bound.pieces > 1}
        self._over_ranks = next((bound.over_ranks for _, bound in bindings if bound.over_ranks), None)

    def __call__(self, x: Tensor, rows: DecodeRows) -> Tensor:
        """Return what a `FusedStage` does, but logits `[1, B, V_local]` in the type of the activations."""
        if self._embedding is not None:
            x = self._embed(x, rows)
        add = None if self._mesh.tp_group is None else self._add
        stream = exact_blocks.run_blocks(x[0], self._blocks, self._keys, self._values, *rows, add, self._pieces)
        return (stream.whole() if self._head is None else exact_blocks.run_head(stream, self._head))[None]

    def _has_few_rows(self) -> bool:
        return False  # that are exact

    def _add(self, part: Tensor) -> Tensor:
        """Return the sum over tensor-parallel ranks of addends `[M, H]`, in their type: as training adds more than two.
        A sum of two 16-bit numbers that is rounded to fp32 first has the bits of one that is rounded once."""
        if self._over_ranks is not None:
            return self._over_ranks(part)
        return self._all_reduce(part.float()[None])[0].to(part.dtype)


def parts_of(stage: Decoder) -> list[Any]:
    """Return the embedding, the blocks and the head of a stage, as far as it has them."""
    return [module for module in (stage.embedding, *stage.blocks.values(), stage.head) if module is not None]
