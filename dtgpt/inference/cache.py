"""Keys and values of sequences, by slot: one for each sequence, with a place for every position of the model, or, of an
attention core with a window, for the newest positions alone that the window covers.

The last slot of a cache is scratch: rows that pad a decode step write there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.config.plan import Plan
from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import attention_cores
from dtgpt.ops.attention.cached import attend_chunk, attend_rows, write_prompts, write_rings
from dtgpt.ops.attention.core import AttentionRule, Backend, causal_attention
from dtgpt.parallel.cache_sizes import CoreSize, block_core_sizes


class Chunk(NamedTuple):
    """Tokens of one sequence: `length` of them, from position `first` on."""

    slot: int
    first: int
    length: int


class PromptRows(NamedTuple):
    """The first tokens of several sequences, perhaps with others behind them that pad them to one length: what the
    cache keeps of these is overwritten before it is read. The scratch slot alone may occur more than once."""

    slots: Tensor  # int64 [B]
    lengths: Tensor  # int64 [B]: tokens without those that pad


class DecodeRows(NamedTuple):
    """One token each of several sequences."""

    slots: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]


class Cache:
    """Keys and values of the attention cores of this rank's stages."""

    def __init__(
        self, stages: list[Decoder], config: ModelConfig, plan: Plan, slots: int, dtype: torch.dtype,
        device: torch.device,
    ):  # fmt: skip
        """Allocate `slots` slots and the scratch slot, uninitialised, of the heads that a rank holds under `plan`."""
        sizes = block_core_sizes(config, plan)
        blocks = [(int(index), block) for stage in stages for index, block in stage.blocks.items()]
        cores = [core for _, block in blocks for core in attention_cores(block)]
        self.layers = [
            LayerCache(core.bound.backend, *(_memory(slots, size, dtype, device) for _ in range(2)))
            for core, size in zip(cores, (size for index, _ in blocks for size in sizes[index]), strict=True)
        ]
        self._cores = list(zip(cores, self.layers, strict=True))

    def attach(self) -> None:
        """Let the attention cores use this cache."""
        for core, layer in self._cores:
            bind(core, cache=layer)

    def detach(self) -> None:
        """Leave the attention cores without a cache, as they were before."""
        for core, _ in self._cores:
            bind(core, cache=None)

    def expect(self, work: Chunk | PromptRows | DecodeRows | None) -> None:
        """Set which tokens the stages run next; None: none of a step of inference."""
        for layer in self.layers:
            layer.work = work

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` positions of the slots `sources` to the slots `targets`, int64 `[B]` both. All are
        read before any is written, so that slots may change places."""
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                kept[targets, :, :length] = kept[sources, :, :length]


class LayerCache:
    """Keys and values `[slots + 1, N_kv, P, D]` of one attention core, P as of `CoreSize`."""

    def __init__(self, backend: Backend, keys: Tensor, values: Tensor):
        self.backend, self.keys, self.values = backend, keys, values
        self.work: Chunk | PromptRows | DecodeRows | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Keep k and v `[B, M, N_kv, D]` of the tokens of `work`, and return their attention `[B, M, N, D]`, each
        over its own sequence; B is 1, but for prompts. Tokens after those of a chunk pad it: they get zeros."""
        work = self.work
        if isinstance(work, DecodeRows):
            return attend_rows(q[0], k[0], v[0], self.keys, self.values, *work, rule=rule)[None]
        if isinstance(work, PromptRows):
            if rule.window is None:
                write_prompts(k, v, self.keys, self.values, work.slots)
            else:
                write_rings(k, v, self.keys, self.values, *work)
            return causal_attention(q, k, v, backend=self.backend, rule=rule)
        if work is None:
            raise RuntimeError("the stages have a cache, but were not run by a step of inference")
        q, k, v, padding = q[:, : work.length], k[:, : work.length], v[:, : work.length], q[:, work.length :]
        attended = attend_chunk(q, k, v, self.keys, self.values, work.slot, work.first, self.backend, rule)
        return torch.cat([attended, torch.zeros_like(padding)], dim=1) if padding.shape[1] else attended


def _memory(slots: int, size: CoreSize, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(slots + 1, size.heads, size.positions, size.dim, dtype=dtype, device=device)
