"""One forward pass over flat tokens, each with a slot and a position, through the stages of all ranks.

Prefill, scoring and decode are the same pass; they differ in the rows that the head sees and in what becomes of the
logits. The passes run over the stages that `dtgpt.load` builds, and over those of a run in training, as they are.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtgpt.inference.cache import Cache, Chunk, Rows
from dtgpt.inference.slot_state import SlotState
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.ops.sampling.sample import sample
from dtgpt.ops.sampling.scores import token_scores
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.pipeline import run_in_turn

SCORED_ROWS = 256  # rows of logits that are gathered and scored at once


class Step:
    """The passes of one cache. Every rank of the plan takes part in each.

    Results are packed as float64, which holds ids and fp32 numbers alike: `[M, 2 + 2 n]`, see `pack`.
    """

    def __init__(
        self, stages: list[Decoder], mesh: Mesh, dtype: torch.dtype, cache: Cache, state: SlotState, vocab_size: int
    ):
        self.stages, self.mesh, self.dtype = stages, mesh, dtype
        self.cache, self.state, self.vocab_size = cache, state, vocab_size
        self._head_rows = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self) -> None:
        """Give the stages the cache, and let the head see the rows that a pass asks for."""
        self.cache.attach()
        for stage in self.stages:
            if stage.head is not None and not self.mesh.plan.sequence_parallel:  # a rank has a part of the rows there
                self._hooks.append(stage.head.register_forward_pre_hook(self._select_rows, prepend=True))

    def detach(self) -> None:
        """Leave the stages as they were before `attach`."""
        self.cache.detach()
        while self._hooks:
            self._hooks.pop().remove()

    def prefill(self, tokens: Tensor, chunk: Chunk) -> None:
        """Fill the cache with a chunk, tokens `[T]`."""
        self._logits(tokens, self._positions(chunk), chunk, head_rows=1)  # no architecture must know an empty head

    def score(self, tokens: Tensor, targets: Tensor, chunk: Chunk, alternatives: int) -> Tensor:
        """Fill the cache with a chunk, tokens `[T]`, and return the packed scores `[T, 2 + 2 alternatives]` of the
        `targets [T]`, the tokens after them."""
        logits = self._logits(tokens, self._positions(chunk), chunk, head_rows=len(tokens))
        packed = self._empty(len(tokens), alternatives)
        if logits is not None:
            for first in range(0, len(tokens), SCORED_ROWS):
                rows = slice(first, first + SCORED_ROWS)
                columns = gather_columns(logits[rows], self.mesh, self._padded_vocab_size)
                scores = token_scores(columns, targets[rows], self.vocab_size, alternatives)
                packed[rows] = pack(scores.greedy, scores.logprobs, scores.top_ids, scores.top_logprobs)
        return self._from_last_stage(packed)

    def decode(self, slots: Tensor, variant: Variant) -> Tensor:
        """Feed the next token of each of `slots`, int64 `[B]`, draw the one after it, and record it as the slot's next
        token. Returns the packed draws `[B, 2 + 2 variant.alternatives]`.

        The slots are its only input, and it does not wait for the device: a CUDA graph can hold it.
        """
        positions = self.state.position[slots]
        logits = self._logits(self.state.token[slots], positions, Rows(slots, positions), head_rows=len(slots))
        packed = self._empty(len(slots), variant.alternatives)
        if logits is not None:
            columns = gather_columns(logits, self.mesh, self._padded_vocab_size)
            packed = pack(*sample(columns, self.state.sequences, slots, self.vocab_size, variant))
        packed = self._from_last_stage(packed)
        self.state.record(slots, Sampled(*unpack(packed)))
        return packed

    @property
    def _padded_vocab_size(self) -> int:
        return self.stages[0].config.padded_vocab_size

    def _logits(self, tokens: Tensor, positions: Tensor, work: Chunk | Rows, head_rows: int) -> Tensor | None:
        """Return this rank's columns of the logits `[head_rows, V_local]` of the first rows of tokens `[M]`; None on a
        rank that does not hold the head."""
        self.cache.work, self._head_rows = work, head_rows
        plan = self.mesh.plan
        padding = -len(tokens) % plan.tp if plan.sequence_parallel else 0
        tokens, positions = (F.pad(flat, (0, padding))[None] for flat in (tokens, positions))
        logits = run_in_turn(self.stages, self.mesh, Batch(tokens, positions=positions), self.dtype)
        self.cache.work = None
        return None if logits is None else logits[0, :head_rows]

    def _select_rows(self, head: torch.nn.Module, inputs: tuple) -> tuple:
        x, *more = inputs
        return x[:, : self._head_rows], *more

    def _positions(self, chunk: Chunk) -> Tensor:
        return torch.arange(chunk.first, chunk.first + chunk.length, device=self.mesh.device)

    def _empty(self, rows: int, alternatives: int) -> Tensor:
        return torch.empty(rows, 2 + 2 * alternatives, dtype=torch.float64, device=self.mesh.device)

    def _from_last_stage(self, packed: Tensor) -> Tensor:
        """Return what the last stage has, on every stage."""
        mesh, plan = self.mesh, self.mesh.plan
        if plan.pp > 1:
            dist.broadcast(packed, mesh.place.neighbour(plan.stage_rank(plan.num_stages - 1)), group=mesh.pp_group)
        return packed


def gather_columns(logits: Tensor, mesh: Mesh, columns: int) -> Tensor:
    """Return logits `[M, V]` from the `[M, V_local]` of each tp rank, V = `columns`."""
    if mesh.tp_group is None:
        return logits
    widest = -(-columns // mesh.plan.tp)
    local = F.pad(logits, (0, widest - logits.shape[1])).contiguous()
    parts = local.new_empty(mesh.plan.tp, *local.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1), local, group=mesh.tp_group)
    return parts.transpose(0, 1).flatten(1)[:, :columns]


def pack(first: Tensor, logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """Return `[M, 2 + 2 n]` in float64 of two `[M]` and two `[M, n]`. `first`: tokens, or greedy flags."""
    columns = (first[:, None], logprobs[:, None], top_ids, top_logprobs)
    return torch.cat([column.double() for column in columns], dim=1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `pack` was given, of packed `[..., 2 + 2 n]`."""
    alternatives = packed.shape[-1] // 2 - 1
    top_ids, top_logprobs = packed[..., 2 : 2 + alternatives], packed[..., 2 + alternatives :]
    return packed[..., 0].long(), packed[..., 1].float(), top_ids.long(), top_logprobs.float()
