"""One forward pass over flat tokens, each with a slot and a position, through the stages of all ranks.

Prefill, scoring and decode are the same pass. They differ in the rows that the head computes and in the use of the
logits. The stages may be those that `dtgpt.load` builds, or those of a run in training. Decode steps use the kernels of
`dtgpt.ops.decode` where these can run the stages (`dtgpt.inference.fused`).
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.inference.cache import Cache, Chunk, DecodeRows, PromptRows
from dtgpt.inference.fused import fuse
from dtgpt.inference.results import R, empty_packed, pack, unpack
from dtgpt.inference.slot_state import SlotState
from dtgpt.models.batch import Batch
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.decode.blocks import next_rows
from dtgpt.ops.pointwise.linear import split_sums
from dtgpt.ops.sampling.sample import sample
from dtgpt.ops.sampling.scores import Scores, as_in_training, token_scores
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.collectives import GroupCollectives
from dtgpt.parallel.coordinates import chunk
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.stages import run_in_turn
from dtgpt.util.errors import UserError

NO_KERNELS = (
    "exact=True has kernels for GPT-2 and LLaMA blocks, with tanh-GELU or SwiGLU, whose heads have 16, 32, 64 or 128 "
    "columns and see all earlier tokens, and this model has others; leave exact out"
)
SCORED_ROWS = 256  # rows of logits that are gathered and scored at once


class Step:
    """The passes over one cache. Every rank of the plan takes part in each, and has its results."""

    def __init__(
        self, stages: list[Decoder], mesh: Mesh, dtype: torch.dtype, cache: Cache, state: SlotState, vocab_size: int,
        exact: bool = False,
    ):  # fmt: skip
        """exact: compute log-probabilities with the bits of training's forward pass. Raise UserError where no kernels
        can."""
        self.stages, self.mesh, self.dtype = stages, mesh, dtype
        self.cache, self.state, self.vocab_size = cache, state, vocab_size
        self.exact, self._fused = exact, fuse(stages, mesh, cache, exact)
        if exact and self._fused is None:
            raise UserError(NO_KERNELS)
        self._head_rows = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self) -> None:
        """Give the stages the cache, and limit the head to the rows that a pass asks for."""
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
        self._chunk_logits(tokens, chunk, head_rows=1)  # a head may not take zero rows

    def prefill_padded(self, tokens: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Fill the cache of each of the slots `[B]` with the first tokens `[B, T]` of a prompt, padded to T from
        `lengths` int64 `[B]`. A CUDA graph can hold it."""
        positions = torch.arange(tokens.shape[1], device=self.mesh.device).expand(len(tokens), -1)
        self._batch_logits(Batch(tokens, positions=positions), PromptRows(slots, lengths), head_rows=1)

    def score(self, tokens: Tensor, targets: Tensor, chunk: Chunk, alternatives: int) -> Scores:
        """Fill the cache with a chunk, tokens `[T]`, and return the scores of `targets [T]`, the tokens after them."""
        logits = self._chunk_logits(tokens, chunk, head_rows=len(tokens))
        scores = None if logits is None else self._scores(logits, targets, alternatives)
        return self._from_last_stage(Scores, scores, len(tokens), alternatives)

    def decode(self, slots: Tensor, variant: Variant) -> Sampled:
        """Feed the next token of each of `slots`, int64 `[B]`, draw the one after it, and record that as the slot's
        next token.

        The slots are the only input, and nothing here waits for the device: a CUDA graph can hold it.
        """
        if self._fused is None:
            tokens, positions = self.state.token[slots], self.state.position[slots]
        else:
            tokens, positions = next_rows(slots, self.state.token, self.state.position)
        logits = self._row_logits(tokens, DecodeRows(slots, positions))
        drawn = None
        if logits is not None:
            columns = gather_columns(logits, self.mesh, self._config.padded_vocab_size)
            drawn = sample(columns, self.state.sequences, slots, self.vocab_size, variant, self._config.vocab_size)
            if self.exact:
                drawn = drawn._replace(**exact_scores(logits, drawn.tokens, drawn.top_ids, self.mesh, self._config))
        drawn = self._from_last_stage(Sampled, drawn, len(slots), variant.alternatives)
        self.state.record(slots, drawn.tokens)
        return drawn

    @property
    def _config(self) -> ModelConfig:
        return self.stages[0].config

    def _chunk_logits(self, tokens: Tensor, chunk: Chunk, head_rows: int) -> Tensor | None:
        """Return as `_logits` does for the tokens `[T]` of a chunk, padded where tp ranks share them evenly."""
        positions = torch.arange(chunk.first, chunk.first + chunk.length, device=self.mesh.device)
        plan = self.mesh.plan
        if plan.sequence_parallel and (padding := -len(tokens) % plan.tp):
            tokens, positions = (F.pad(flat, (0, padding)) for flat in (tokens, positions))
        return self._logits(tokens, positions, chunk, head_rows)

    def _logits(self, tokens: Tensor, positions: Tensor, work: Chunk | DecodeRows, head_rows: int) -> Tensor | None:
        """Return this rank's columns of the logits `[head_rows, V_local]` of the first rows of tokens `[M]`; None on a
        rank that does not hold the head."""
        return self._batch_logits(Batch(tokens[None], positions=positions[None]), work, head_rows)

    def _batch_logits(self, batch: Batch, work: Chunk | PromptRows | DecodeRows, head_rows: int) -> Tensor | None:
        """Return what `_logits` does, of the first sample of a batch."""
        self.cache.expect(work)
        self._head_rows = head_rows
        with nullcontext() if self.exact else split_sums():
            logits = run_in_turn(self.stages, self.mesh, batch, self.dtype)
        self.cache.expect(None)
        return None if logits is None else logits[0, :head_rows]

    def _row_logits(self, tokens: Tensor, rows: DecodeRows) -> Tensor | None:
        """Return this rank's columns of the logits `[B, V_local]` of a decode step, tokens `[B]`; None on a rank that
        does not hold the head."""
        if self._fused is None:
            return self._logits(tokens, rows.positions, rows, head_rows=len(tokens))
        logits = run_in_turn(self._fused, self.mesh, (tokens[None], rows), self.dtype)
        return None if logits is None else logits[0]

    def _select_rows(self, head: torch.nn.Module, inputs: tuple) -> tuple:
        x, *more = inputs
        return x[:1, : self._head_rows], *more

    def _scores(self, logits: Tensor, targets: Tensor, alternatives: int) -> Scores:
        pieces = []
        for first in range(0, len(targets), SCORED_ROWS):
            rows = slice(first, first + SCORED_ROWS)
            columns = gather_columns(logits[rows], self.mesh, self._config.padded_vocab_size)
            scores = token_scores(columns, targets[rows], self._config.vocab_size, alternatives)
            if self.exact:
                exact = exact_scores(logits[rows], targets[rows], scores.top_ids, self.mesh, self._config)
                scores = scores._replace(**exact)
            pieces.append(scores)
        return Scores(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))

    def _from_last_stage(self, kind: type[R], results: R | None, rows: int, alternatives: int) -> R:
        """Return the results of the last stage, which alone has some, on every stage."""
        mesh = self.mesh
        if mesh.plan.pp == 1 and results is not None:
            return results
        packed = empty_packed(rows, alternatives, mesh.device) if results is None else pack(results)
        return unpack(kind, mesh.from_last_stage(packed))


def gather_columns(logits: Tensor, mesh: Mesh, columns: int) -> Tensor:
    """Return logits `[M, V]` from the `[M, V_local]` of each tp rank, V = `columns`, or from `[M, V]`."""
    if mesh.tp_group is None or logits.shape[1] == columns:
        return logits
    if missing := -(-columns // mesh.plan.tp) - logits.shape[1]:  # the last rank may have fewer
        logits = F.pad(logits, (0, missing))
    return GroupCollectives(mesh.tp_group).gather(logits, 1)[:, :columns]


def exact_scores(logits: Tensor, ids: Tensor, top_ids: Tensor, mesh: Mesh, config: ModelConfig) -> dict[str, Tensor]:
    """Return what `as_in_training` does, from this rank's columns of the logits `[M, V_local]`."""
    first = chunk(range(config.padded_vocab_size), mesh.plan.tp, mesh.place.tp).start
    return as_in_training(logits, ids, top_ids, config.vocab_size, first, mesh.tp_group)
