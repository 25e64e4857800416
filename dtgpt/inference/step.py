"""The steps of generation on a rank: every command of rank 0 ends in a method of `Step`, on all ranks in one order.

Reading a prompt and decoding are the same pass of flat tokens through the stages, each token with a slot and a
position. They differ in three things: which tokens the attention of the pass sees (those of one sequence, or one token
each of several), how many rows the head computes, and what its logits are used for. So one function, `logits`, runs
both, and the cache is told before it which tokens come.

The stages may be those that `dtgpt.load` builds, or those of a run in training. No method waits for the device: results
are `Pending`, and the host reads them when it has launched the next round.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.inference.cache import Cache, Chunk, DecodeRows, Work
from dtgpt.inference.scheduler import PromptChunk
from dtgpt.models.batch import Batch
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.linear import split_sums
from dtgpt.ops.sampling.sample import sample
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.collectives import GroupCollectives
from dtgpt.parallel.engine import reshard
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.stages import run_in_turn
from dtgpt.util import seams
from dtgpt.util.hardware import to_device

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows of a decode step: few shapes, which are tuned and captured
SAMPLED = (torch.int64, torch.float32, torch.int64, torch.float32)  # types of the fields of `Sampled`
R = TypeVar("R", bound=tuple[Tensor, ...])  # two fields [..., M], and two [..., M, n] of the likeliest tokens


class ExactBits(Protocol):
    """What a capability has for log-probabilities with the bits of training's forward pass, at the seam `exact_bits`;
    its steps, at the seam `rank_steps`, have them then."""

    def check_exact(self, device: torch.device, plan: ResolvedPlan, dtype: torch.dtype) -> None:
        """Raise UserError where generation cannot have the bits of training's forward pass."""

    def check_sums(self, settings: Settings) -> None:
        """Raise UserError where it cannot have those of a run with these settings."""

    def check_blocks(self, config: ModelConfig) -> None:
        """Raise UserError for a model whose blocks cannot have them."""

    def exact_scores(
        self, logits: Tensor, ids: Tensor, top_ids: Tensor, stages: Sequence[Decoder], mesh: Mesh
    ) -> dict[str, Tensor]:
        """Return "logprobs" of ids `[M]` and "top_logprobs" of top_ids `[M, n]` with those bits, from this rank's
        columns of the logits `[M, V_local]`."""


def exact_bits() -> ExactBits:
    """Return what there is for these bits. Raise UserError where there is nothing."""
    return seams.first("exact_bits", "exact=True needs kernels of its own, and this dtgpt has none; leave exact out")


def step_kind(device: torch.device, graphs: bool, exact: bool) -> "type[Step]":
    """Return the class of a rank's steps: `Step`, with what capabilities do otherwise on this device. graphs: whether
    CUDA graphs may hold the steps. exact: whether log-probabilities have the bits of training's forward pass. Raise
    UserError where there is nothing for them."""
    on_gpu = device.type == "cuda"
    if exact:
        exact_bits()  # or raises where there are none
    elif not on_gpu:
        return Step
    kinds = [kind for kind in seams.listed("rank_steps") if kind.serves(graphs and on_gpu)]
    return type("RankStep", (*kinds, Step), {})


class Step:
    """The cache of `slots` sequences, and the stages that work on it.

    All ranks call the same methods in the same order with the same arguments. Between the first of them and `detach`
    the stages serve inference alone.
    """

    batch_tokens = 0  # most tokens of a pass over several prompts; 0: each prompt has a pass of its own

    def __init__(
        self,
        stages: list[Decoder],
        mesh: Mesh,
        config: ModelConfig,
        dtype: torch.dtype,
        slots: int,
        vocab_size: int | None = None,
        exact: bool = False,
    ):
        """vocab_size: ids that may be drawn; None: those of the model. exact: compute log-probabilities with the bits
        of training's forward pass, where the class can."""
        self.stages, self.mesh, self.config, self.dtype = stages, mesh, config, dtype
        self.slots, self.exact, self.vocab_size = slots, exact, vocab_size or config.vocab_size
        self.cache = Cache(stages, config, mesh.plan, slots, dtype, mesh.device)
        self._attached = False
        self._head_rows = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def group(self, chunks: Sequence[PromptChunk]) -> list[list[PromptChunk]]:
        """Return the chunks to read in each pass, those of a prompt in their order: here each alone."""
        return [[chunk] for chunk in chunks]

    @torch.no_grad()
    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Fill the cache of each of `slots`, all different, with the tokens of a prompt, whose positions begin with
        `first`."""
        self.attach()
        for slot, ids in zip(slots, prompts, strict=True):
            self.chunk_logits(self.tensor(ids), Chunk(slot, first, len(ids)), head_rows=1)  # a head takes no zero rows

    @torch.no_grad()
    def decode(self, slots: Sequence[int], steps: int, variant: Variant) -> "Pending[Sampled]":
        """Draw the next `steps` tokens of each of `slots`, all different: results of shape `[B, steps]`."""
        self.attach()
        rows = self.tensor([*slots, *[self.slots] * (self._bucket(len(slots)) - len(slots))])
        if len(rows) > len(slots):
            self.cache.state.position[self.slots :].zero_()  # attention over the scratch slot stays short
        drawn = self.draw_steps(rows, steps, variant)
        return Pending(Sampled(*(values[: len(slots)] for values in drawn)))

    def draw_steps(self, rows: Tensor, steps: int, variant: Variant) -> Sampled:
        """Return the results `[B, steps]` of decode steps of padded rows, int64 `[B]`."""
        drawn = [self._draw(rows, variant) for _ in range(steps)]
        return Sampled(*(torch.stack(values, dim=1) for values in zip(*drawn, strict=True)))

    def _draw(self, slots: Tensor, variant: Variant) -> Sampled:
        """Feed the next token of each of `slots`, int64 `[B]`, draw the one after it, and record that as the slot's
        next token.

        The slots are the only input, and nothing here waits for the device: a CUDA graph can hold it.
        """
        logits = self.row_logits(slots)
        drawn = None if logits is None else self.choose(logits, slots, variant)
        drawn = self.from_last_stage(Sampled, SAMPLED, drawn, len(slots), variant.alternatives)
        self.cache.state.record(slots, drawn.tokens)
        return drawn

    def row_logits(self, slots: Tensor) -> Tensor | None:
        """Return this rank's columns of the logits `[B, V_local]` after the next token of each slot; None on a rank
        that does not hold the head."""
        tokens, positions = self.cache.state.token[slots], self.cache.state.position[slots]
        return self.logits(Batch(tokens[None], positions=positions[None]), DecodeRows(slots, positions), len(slots))

    def choose(self, logits: Tensor, slots: Tensor, variant: Variant) -> Sampled:
        """Choose the token after the next one of each slot by this rank's columns of the logits."""
        columns = gather_columns(logits, self.mesh, self.config.padded_vocab_size)
        return sample(columns, self.cache.state.sequences, slots, self.vocab_size, variant, self.config.vocab_size)

    def chunk_logits(self, tokens: Tensor, chunk: Chunk, head_rows: int) -> Tensor | None:
        """Fill the cache with the tokens `[T]` of a chunk, padded where tp ranks share them evenly. Return this rank's
        columns of the logits `[head_rows, V_local]` of the first ones; None on a rank without the head."""
        positions = torch.arange(chunk.first, chunk.first + chunk.length, device=self.mesh.device)
        plan = self.mesh.plan
        if plan.sequence_parallel and (padding := -len(tokens) % plan.tp):
            tokens, positions = (F.pad(flat, (0, padding)) for flat in (tokens, positions))
        return self.logits(Batch(tokens[None], positions=positions[None]), chunk, head_rows)

    def logits(self, batch: Batch, work: Work, head_rows: int) -> Tensor | None:
        """Return this rank's columns of the logits `[head_rows, V_local]` of the first rows of a batch's first sample;
        None on a rank that does not hold the head."""
        self.cache.expect(work)
        self._head_rows = head_rows
        with nullcontext() if self.exact else split_sums():
            logits = run_in_turn(self.stages, self.mesh, batch, self.dtype)
        self.cache.expect(None)
        return None if logits is None else logits[0, :head_rows]

    def attach(self) -> None:
        """Give the stages the cache, and limit the head to the rows that a pass asks for."""
        if self._attached:
            return
        self.cache.attach()
        for stage in self.stages:
            if stage.head is not None and not self.mesh.plan.sequence_parallel:  # a rank has a part of the rows there
                self._hooks.append(stage.head.register_forward_pre_hook(self._select_rows, prepend=True))
        self._attached = True

    def detach(self) -> None:
        """Leave the stages as they were, until the next command."""
        if self._attached:
            self.cache.detach()
            while self._hooks:
                self._hooks.pop().remove()
            reshard(*self.stages)
            self._attached = False

    def _select_rows(self, head: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *more = inputs
        return x[:1, : self._head_rows], *more

    def from_last_stage(
        self, kind: type[R], types: Sequence[torch.dtype], results: R | None, rows: int, alternatives: int
    ) -> R:
        """Return the results of the last stage, which alone has some, on every stage. types: of their fields."""
        mesh = self.mesh
        if mesh.plan.pp == 1 and results is not None:
            return results
        if results is None:
            packed = torch.empty(rows, 2 + 2 * alternatives, dtype=torch.float64, device=mesh.device)
        else:
            packed = _pack(results)
        return _unpack(kind, types, mesh.from_last_stage(packed))

    def _bucket(self, rows: int) -> int:
        """Return the number of rows of a decode step for `rows` sequences."""
        bucket = next((size for size in BUCKETS if size >= rows), rows)
        multiple = self.mesh.plan.tp if self.mesh.plan.sequence_parallel else 1
        return -(-bucket // multiple) * multiple

    def tensor(self, numbers: Sequence) -> Tensor:
        """Copy whole numbers to the device."""
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.mesh.device)


def gather_columns(logits: Tensor, mesh: Mesh, columns: int) -> Tensor:
    """Return logits `[M, V]` from the `[M, V_local]` of each tp rank, V = `columns`, or from `[M, V]`."""
    if mesh.tp_group is None or logits.shape[1] == columns:
        return logits
    if missing := -(-columns // mesh.plan.tp) - logits.shape[1]:  # the last rank may have fewer
        logits = F.pad(logits, (0, missing))
    return GroupCollectives(mesh.tp_group).gather(logits, 1)[:, :columns]


def _pack(results: tuple[Tensor, ...]) -> Tensor:
    """Return two fields `[..., M]` and two `[..., M, n]` in one tensor `[..., M, 2 + 2 n]` of float64, which holds ids
    and fp32 numbers alike: one message between ranks, and one copy to the host."""
    first, second, *likeliest = results
    return torch.cat([part.double() for part in (first[..., None], second[..., None], *likeliest)], dim=-1)


def _unpack(kind: type[R], types: Sequence[torch.dtype], packed: Tensor) -> R:
    """Return what `_pack` packed."""
    parts = packed[..., 0], packed[..., 1], *packed[..., 2:].tensor_split(2, dim=-1)
    return kind(*(part.to(dtype) for part, dtype in zip(parts, types, strict=True)))


class Pending(Generic[R]):
    """Results whose copy to the host is under way: the host reads them when the next round is launched."""

    def __init__(self, results: R):
        self._kind, self._types = type(results), [part.dtype for part in results]
        self._packed = _pack(results)
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
        return _unpack(self._kind, self._types, self._packed)
