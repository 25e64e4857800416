"""What the device keeps of the sequences that are generated, by slot, so that a step needs no more than the slots it is
for: keys and values of each attention core, and the state of each sequence.

A slot is in one piece; there are no pages. Thus a sequence's positions are one range of memory, and the shapes of a
decode step never change, so that it can be captured as a CUDA graph. The price is memory for positions that a sequence
does not reach.

Keys and values have a place for every position of the model, or, of an attention core with a window, for the newest
positions alone that the window covers. The last slot is scratch: rows that pad a step write there. Models do not know
of the cache: `attach` binds it to their attention cores.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dtgpt.config.plan import Plan
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.options import Options
from dtgpt.inference.request import key_of
from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import attention_cores
from dtgpt.ops.attention.cached import attend_chunk, attend_rows
from dtgpt.ops.attention.core import AttentionRule, Backend
from dtgpt.ops.sampling.sample import record
from dtgpt.ops.sampling.sequences import PARAMETERS, Integers, Sequences
from dtgpt.parallel.cache_sizes import CoreSize, block_core_sizes
from dtgpt.util.hardware import to_device

KEY = Integers._fields.index("key_0")
ALL = -1  # a word of `allowed`, all of whose bits are set


class Chunk(NamedTuple):
    """Tokens of one sequence: `length` of them, from position `first` on."""

    slot: int
    first: int
    length: int

    def attend(self, layer: "LayerCache", q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Keep k and v `[1, T, N_kv, D]` of the tokens, and return their attention `[1, T, N, D]`. Tokens behind those
        of the chunk pad it: they get zeros."""
        end = self.length
        q, k, v, padding = q[:, :end], k[:, :end], v[:, :end], q[:, end:]
        attended = attend_chunk(q, k, v, layer.keys, layer.values, self.slot, self.first, layer.backend, rule)
        return torch.cat([attended, torch.zeros_like(padding)], dim=1) if padding.shape[1] else attended


class DecodeRows(NamedTuple):
    """One token each of several sequences."""

    slots: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]

    def attend(self, layer: "LayerCache", q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Keep k and v `[1, B, N_kv, D]` of the tokens, and return their attention `[1, B, N, D]`."""
        return attend_rows(q[0], k[0], v[0], layer.keys, layer.values, *self, rule=rule)[None]


class Work(Protocol):
    """Which tokens a pass has: a `Chunk`, `DecodeRows`, or what a capability reads prompts by."""

    def attend(self, layer: "LayerCache", q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Keep k and v `[B, M, N_kv, D]` of the tokens, and return their attention `[B, M, N, D]`, each over its own
        sequence."""


class Cache:
    """Keys and values of the attention cores of this rank's stages, and the state of the sequences."""

    def __init__(
        self,
        stages: list[Decoder],
        config: ModelConfig,
        plan: Plan,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Allocate `slots` slots and the scratch slot, uninitialised, of the heads that a rank holds under `plan`."""
        sizes = block_core_sizes(config, plan)
        blocks = [(int(index), block) for stage in stages for index, block in stage.blocks.items()]
        cores = [core for _, block in blocks for core in attention_cores(block)]
        self.layers = [
            LayerCache(core.bound.backend, *(_memory(slots, size, dtype, device) for _ in range(2)))
            for core, size in zip(cores, (size for index, _ in blocks for size in sizes[index]), strict=True)
        ]
        self._cores = list(zip(cores, self.layers, strict=True))
        self.state = SlotState(slots, config.seq_length, device)

    def attach(self) -> None:
        """Let the attention cores use this cache."""
        for core, layer in self._cores:
            bind(core, cache=layer)

    def detach(self) -> None:
        """Leave the attention cores without a cache, as they were before."""
        for core, _ in self._cores:
            bind(core, cache=None)

    def expect(self, work: Work | None) -> None:
        """Set which tokens the stages run next; None: none of a step of inference."""
        for layer in self.layers:
            layer.work = work

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions, and all of the state, of the slots `sources` to the slots `targets`. All
        are read before any is written, so that slots may change places."""
        read, written = self.state.rows([sources, targets])
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                kept[written, :, :length] = kept[read, :, :length]
        self.state.copy(read, written)


class LayerCache:
    """Keys and values `[slots + 1, N_kv, P, D]` of one attention core, P the positions that it keeps."""

    def __init__(self, backend: Backend, keys: Tensor, values: Tensor):
        self.backend, self.keys, self.values = backend, keys, values
        self.work: Work | None = None  # of the pass that runs

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Keep k and v `[B, M, N_kv, D]` of the tokens of a pass, and return their attention `[B, M, N, D]`."""
        if self.work is None:
            raise RuntimeError("the stages have a cache, but were not run by a step of inference")
        return self.work.attend(self, q, k, v, rule)


def _memory(slots: int, size: CoreSize, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(slots + 1, size.heads, size.positions, size.dim, dtype=dtype, device=device)


class SlotState:
    """Tensors of `slots` + 1 rows; the last row is scratch for rows that only pad a batch.

    token, position: int64 `[S]`; history: int64 `[S, P]`; parameters: int64, allowed: int32, in the layout of
    `dtgpt.ops.sampling.sequences`.
    """

    def __init__(self, slots: int, positions: int, device: torch.device | str):
        rows = slots + 1
        self.positions, self.device = positions, torch.device(device)
        self.token, self.position = self._zeros(rows), self._zeros(rows)
        self.history, self.parameters = self._zeros(rows, positions), self._zeros(rows, PARAMETERS)
        self.allowed = self._zeros(rows, 0).int()  # no words, until a sequence needs them

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    @property
    def sequences(self) -> Sequences:
        """What `dtgpt.ops.sampling.sample` reads."""
        return Sequences(self.token, self.position, self.history, self.parameters, self.allowed)

    @staticmethod
    def encode(ids: list[int], sampling: Options, special: SpecialIds, prompt_index: int, choice: int) -> Tensor:
        """Return all that `set` needs to start a sequence after the non-empty prompt `ids`: int64 on the CPU."""
        key_0, key_1 = key_of(sampling, prompt_index, choice)
        numbers = {"prompt_length": len(ids), "key_0": key_0, "key_1": key_1}
        return torch.cat([sampling.parameters(special, numbers), torch.tensor(ids)])

    def set(self, slot: int, payload: Tensor) -> None:
        """Start a sequence from what `encode` made."""
        ids = len(payload) - PARAMETERS
        uploaded = to_device(payload, self.device)
        self.parameters[slot] = uploaded[:PARAMETERS]
        self.history[slot, :ids] = uploaded[PARAMETERS:]
        self.token[slot] = uploaded[-1]
        self.allowed[slot].fill_(ALL)
        self.position[slot : slot + 1].fill_(ids - 1)  # the assignment of a number would wait for the device

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole rows, int64 `[B]` both; all are read before one is written."""
        for tensor in self.sequences:
            tensor[targets] = tensor[sources]

    def set_keys(self, slots: Sequence[int], keys: Sequence[Sequence[int]]) -> None:
        """Let the draws of each slot be those of a key of two words."""
        rows, *words = self.rows([slots, *zip(*keys, strict=True)])
        self.parameters[rows, KEY], self.parameters[rows, KEY + 1] = words

    def record(self, slots: Tensor, tokens: Tensor) -> None:
        """Append the tokens int64 `[B]` of a step to the sequences in slots int64 `[B]`. At the last position the
        position stays, and a further token overwrites the last."""
        record(self.sequences, slots, tokens)

    def rows(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        """Copy rows of whole numbers to the device."""
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.device)
