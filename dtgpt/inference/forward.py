"""One pass of tokens through the stages of all ranks, and what its logits are used for.

Filling the cache with a prompt, scoring one, and decoding are the same pass, over flat tokens that each have a slot and
a position. They differ in the rows that the head computes and in the use of the logits. The stages may be those that
`dtgpt.load` builds, or those of a run in training. A pass is the same on every rank, and each rank has its results.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.config.plan import ResolvedPlan
from dtgpt.inference.cache import Cache, Chunk, DecodeRows, PromptRows
from dtgpt.models.batch import Batch
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.linear import split_sums
from dtgpt.ops.sampling.sample import sample
from dtgpt.ops.sampling.scores import Scores, token_scores
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.collectives import GroupCollectives
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.stages import run_in_turn
from dtgpt.util import seams
from dtgpt.util.errors import UserError

SCORED_ROWS = 256  # rows of logits that are gathered and scored at once
DTYPES = {
    Sampled: (torch.int64, torch.float32, torch.int64, torch.float32),
    Scores: (torch.float32, torch.bool, torch.int64, torch.float32),
}
R = TypeVar("R", Sampled, Scores)


class Decoders(NamedTuple):
    """What serves the decode steps of the stages of a rank in their place."""

    stages: Sequence[Callable[..., Tensor]]  # called with ids or activations `[1, B]`, and `DecodeRows`
    next_rows: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (slots, tokens, positions) -> those of slots


class DecodeKernels(Protocol):
    """What a capability has for decode steps, at the seam `decoders`."""

    def serve(self, stages: list[Decoder], mesh: Mesh, cache: Cache, exact: bool) -> Decoders | None:
        """Return what serves these stages; None: their modules do. All ranks of the mesh take part. exact: for steps
        with the bits of training's forward pass. Raise UserError where these cannot be."""

    def check_exact(self, device: torch.device, plan: ResolvedPlan, dtype: torch.dtype) -> None:
        """Raise UserError where generation cannot have the bits of training's forward pass."""

    def check_blocks(self, config: ModelConfig) -> None:
        """Raise UserError for a model whose blocks cannot have them."""

    def exact_scores(
        self, logits: Tensor, ids: Tensor, top_ids: Tensor, mesh: Mesh, config: ModelConfig
    ) -> dict[str, Tensor]:
        """Return "logprobs" of ids `[M]` and "top_logprobs" of top_ids `[M, n]` with those bits, from this rank's
        columns of the logits `[M, V_local]`."""


def decode_kernels() -> DecodeKernels:
    """Return what there is for decode steps. Raise UserError where there is nothing."""
    for found in seams.listed("decoders"):
        return found
    raise UserError("exact=True needs kernels of its own, and this dtgpt has none; leave exact out")


class Forward:
    """The passes over one cache. Every rank of the plan takes part in each."""

    def __init__(
        self, stages: list[Decoder], mesh: Mesh, dtype: torch.dtype, cache: Cache, vocab_size: int, exact: bool = False
    ):
        """vocab_size: ids that may be drawn. exact: compute log-probabilities with the bits of training's forward pass.
        Raise UserError where nothing can."""
        self.stages, self.mesh, self.dtype = stages, mesh, dtype
        self.cache, self.vocab_size, self.exact = cache, vocab_size, exact
        self._config, self._state = stages[0].config, cache.state
        self._decoders: Decoders | None = None
        if exact or (mesh.device.type == "cuda" and seams.listed("decoders")):
            self._decoders = decode_kernels().serve(stages, mesh, cache, exact)
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

    def fill(self, tokens: Tensor, chunk: Chunk) -> None:
        """Fill the cache with a chunk, tokens `[T]`."""
        self._chunk_logits(tokens, chunk, head_rows=1)  # a head may not take zero rows

    def fill_padded(self, tokens: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Fill the cache of each of the slots `[B]` with the first tokens `[B, T]` of a prompt, padded to T from
        `lengths` int64 `[B]`. A CUDA graph can hold it."""
        positions = torch.arange(tokens.shape[1], device=self.mesh.device).expand(len(tokens), -1)
        self._logits(Batch(tokens, positions=positions), PromptRows(slots, lengths), head_rows=1)

    def score(self, tokens: Tensor, targets: Tensor, chunk: Chunk, alternatives: int) -> Scores:
        """Fill the cache with a chunk, tokens `[T]`, and return the scores of `targets [T]`, the tokens after them."""
        logits = self._chunk_logits(tokens, chunk, head_rows=len(tokens))
        scores = None if logits is None else self._scores(logits, targets, alternatives)
        return self._from_last_stage(Scores, scores, len(tokens), alternatives)

    def draw(self, slots: Tensor, variant: Variant) -> Sampled:
        """Feed the next token of each of `slots`, int64 `[B]`, draw the one after it, and record that as the slot's
        next token.

        The slots are the only input, and nothing here waits for the device: a CUDA graph can hold it.
        """
        state, config = self._state, self._config
        logits = self._row_logits(slots)
        drawn = None
        if logits is not None:
            columns = gather_columns(logits, self.mesh, config.padded_vocab_size)
            drawn = sample(columns, state.sequences, slots, self.vocab_size, variant, config.vocab_size)
            if self.exact:
                drawn = drawn._replace(**self._exact_scores(logits, drawn.tokens, drawn.top_ids))
        drawn = self._from_last_stage(Sampled, drawn, len(slots), variant.alternatives)
        state.record(slots, drawn.tokens)
        return drawn

    def _row_logits(self, slots: Tensor) -> Tensor | None:
        """Return this rank's columns of the logits `[B, V_local]` after the next token of each slot; None on a rank
        that does not hold the head."""
        state, decoders = self._state, self._decoders
        if decoders is None:
            tokens, positions = state.token[slots], state.position[slots]
            rows = DecodeRows(slots, positions)
            return self._logits(Batch(tokens[None], positions=positions[None]), rows, len(slots))
        tokens, positions = decoders.next_rows(slots, state.token, state.position)
        logits = run_in_turn(decoders.stages, self.mesh, (tokens[None], DecodeRows(slots, positions)), self.dtype)
        return None if logits is None else logits[0]

    def _chunk_logits(self, tokens: Tensor, chunk: Chunk, head_rows: int) -> Tensor | None:
        """Return what `_logits` does for the tokens `[T]` of a chunk, padded where tp ranks share them evenly."""
        positions = torch.arange(chunk.first, chunk.first + chunk.length, device=self.mesh.device)
        plan = self.mesh.plan
        if plan.sequence_parallel and (padding := -len(tokens) % plan.tp):
            tokens, positions = (F.pad(flat, (0, padding)) for flat in (tokens, positions))
        return self._logits(Batch(tokens[None], positions=positions[None]), chunk, head_rows)

    def _logits(self, batch: Batch, work: Chunk | PromptRows | DecodeRows, head_rows: int) -> Tensor | None:
        """Return this rank's columns of the logits `[head_rows, V_local]` of the first rows of a batch's first sample;
        None on a rank that does not hold the head."""
        self.cache.expect(work)
        self._head_rows = head_rows
        with nullcontext() if self.exact else split_sums():
            logits = run_in_turn(self.stages, self.mesh, batch, self.dtype)
        self.cache.expect(None)
        return None if logits is None else logits[0, :head_rows]

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
                scores = scores._replace(**self._exact_scores(logits[rows], targets[rows], scores.top_ids))
            pieces.append(scores)
        return Scores(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))

    def _exact_scores(self, logits: Tensor, ids: Tensor, top_ids: Tensor) -> dict[str, Tensor]:
        return decode_kernels().exact_scores(logits, ids, top_ids, self.mesh, self._config)

    def _from_last_stage(self, kind: type[R], results: R | None, rows: int, alternatives: int) -> R:
        """Return the results of the last stage, which alone has some, on every stage."""
        mesh = self.mesh
        if mesh.plan.pp == 1 and results is not None:
            return results
        if results is None:
            packed = torch.empty(rows, 2 + 2 * alternatives, dtype=torch.float64, device=mesh.device)
        else:
            packed = pack(results)
        return unpack(kind, mesh.from_last_stage(packed))


def gather_columns(logits: Tensor, mesh: Mesh, columns: int) -> Tensor:
    """Return logits `[M, V]` from the `[M, V_local]` of each tp rank, V = `columns`, or from `[M, V]`."""
    if mesh.tp_group is None or logits.shape[1] == columns:
        return logits
    if missing := -(-columns // mesh.plan.tp) - logits.shape[1]:  # the last rank may have fewer
        logits = F.pad(logits, (0, missing))
    return GroupCollectives(mesh.tp_group).gather(logits, 1)[:, :columns]


def pack(results: Sampled | Scores) -> Tensor:
    """Return two fields `[..., M]` and two `[..., M, n]` in one tensor `[..., M, 2 + 2 n]` of float64, which holds ids
    and fp32 numbers alike."""
    first, second, *likeliest = results
    return torch.cat([part.double() for part in (first[..., None], second[..., None], *likeliest)], dim=-1)


def unpack(kind: type[R], packed: Tensor) -> R:
    """Return what `pack` packed."""
    parts = packed[..., 0], packed[..., 1], *packed[..., 2:].tensor_split(2, dim=-1)
    return kind(*(part.to(dtype) for part, dtype in zip(parts, DTYPES[kind], strict=True)))


class Pending(Generic[R]):
    """Results whose copy to the host is under way: the host reads them when the next round is launched."""

    def __init__(self, results: R):
        self._kind: type[R] = type(results)
        self._packed = pack(results)
        self._done: torch.cuda.Event | None = None
        if self._packed.is_cuda:
            pinned = torch.empty(self._packed.shape, dtype=self._packed.dtype, pin_memory=True)
            self._packed = pinned.copy_(self._packed, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> R:
        """Return the results on the CPU."""
        if self._done is not None:
            self._done.synchronize()
        return unpack(self._kind, self._packed)
