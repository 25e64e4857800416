"""Execution of the commands of rank 0, on every rank. No method waits for the device."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtgpt.inference.cache import Cache, Chunk
from dtgpt.inference.graphs import StepGraphs
from dtgpt.inference.prefill import Prefill
from dtgpt.inference.prompt_batches import padded_length
from dtgpt.inference.results import Pending
from dtgpt.inference.scheduler import LONGEST_ROUND
from dtgpt.inference.slot_state import SlotState
from dtgpt.inference.step import Step
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.sampling.scores import Scores
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.fsdp import reshard
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.hardware import to_device

# Rows of steps that are so short that one graph holds all of a round: else the time between graphs would show.
ROWS_OF_SHORT_STEPS = 8
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows of a decode step: few shapes, thus few graphs


class ModelRunner:
    """The cache and the state of `slots` sequences, and the stages that work on them.

    All ranks call the same methods in the same order with the same arguments. Between the first of them and `detach`
    the stages serve inference alone. `vocab_size`: ids that may be drawn; None: those of the model. `graphs`: replay
    prefill and decode steps as CUDA graphs on a GPU; not for stages that are sharded over replicas. `exact`: as of
    `Step`.
    """

    def __init__(
        self, stages: list[Decoder], mesh: Mesh, config: ModelConfig, dtype: torch.dtype, slots: int,
        vocab_size: int | None = None, graphs: bool = False, exact: bool = False,
    ):  # fmt: skip
        self.stages, self.mesh, self.slots = stages, mesh, slots
        self.cache = Cache(stages, config, mesh.plan, slots, dtype, mesh.device)
        vocab_size = vocab_size or config.vocab_size
        self.state = SlotState(slots, config.seq_length, mesh.device)
        self.step = Step(stages, mesh, dtype, self.cache, self.state, vocab_size, exact)
        self._graphs = StepGraphs() if graphs and mesh.device.type == "cuda" else None
        self.prompts = Prefill(self.step, self._graphs, scratch=slots)
        self._attached = False
        if self._graphs is not None:
            mesh.before_end.append(release_of(self._graphs))

    @torch.no_grad()
    def prefill(self, slot: int, ids: Sequence[int], first: int = 0) -> None:
        """Fill the cache of a slot with the tokens `ids`, whose positions begin with `first`."""
        self._attach()
        if self._graphs is None or first or padded_length(len(ids), self.state.positions) is None:
            return self.step.prefill(self._tensor(ids), Chunk(slot, first, len(ids)))
        self.prompts.read([slot], [ids])

    @torch.no_grad()
    def prefill_batch(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Fill the cache of each of `slots`, all different, with a prompt that begins at position 0, in one pass. The
        prompts are such as `group_prompts` puts together."""
        self._attach()
        self.prompts.read(slots, prompts)

    @torch.no_grad()
    def score(self, slot: int, ids: Sequence[int], first: int = 0, alternatives: int = 0) -> Pending[Scores]:
        """Prefill all of `ids` but the last one, and return the scores of all but the first one, with the ids and
        log-probabilities of the `alternatives` likeliest tokens in place of each."""
        self._attach()
        tokens = self._tensor(ids)
        chunk = Chunk(slot, first, len(ids) - 1)
        return Pending(self.step.score(tokens[:-1], tokens[1:], chunk, alternatives))

    @torch.no_grad()
    def start(self, slot: int, payload: Tensor) -> None:
        """Begin a sequence in a slot whose cache has all of its tokens but the last: see `SlotState.encode`."""
        self.state.set(slot, payload)

    @torch.no_grad()
    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions, and all of the state, of slots to other slots, all at once."""
        self.cache.copy(self._tensor(sources), self._tensor(targets), length)
        self.state.copy(list(sources), list(targets))

    @torch.no_grad()
    def set_keys(self, slots: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        """Let the draws of each of `slots` be those of a key of two words."""
        self.state.set_keys(list(slots), list(keys))

    @torch.no_grad()
    def assign(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Replace the token that each of `slots` has drawn last."""
        self.state.assign(list(slots), list(tokens))

    @torch.no_grad()
    def decode(self, slots: Sequence[int], steps: int, variant: Variant) -> Pending[Sampled]:
        """Draw the next `steps` tokens of each of `slots`, all different: results of shape `[B, steps]`."""
        self._attach()
        rows = self._tensor([*slots, *[self.slots] * (self._bucket(len(slots)) - len(slots))])
        if len(rows) > len(slots):
            self.state.position[self.slots :].zero_()  # attention over the scratch slot stays short
        drawn = self._decode(rows, steps, variant)
        return Pending(Sampled(*(values[: len(slots)] for values in drawn)))

    def _decode(self, rows: Tensor, steps: int, variant: Variant) -> Sampled:
        """Return the results `[B, steps]` of decode steps of padded rows."""
        if self._graphs is None:
            return self._steps(rows, steps, variant)
        if steps == LONGEST_ROUND and len(rows) <= ROWS_OF_SHORT_STEPS:
            return self._replay(self._graphs, rows, steps, variant)
        replayed = (self._replay(self._graphs, rows, 1, variant) for _ in range(steps))
        drawn = [Sampled(*(values.clone() for values in results)) for results in replayed]
        return Sampled(*(torch.cat(values, dim=1) for values in zip(*drawn, strict=True)))

    def _replay(self, graphs: StepGraphs, rows: Tensor, steps: int, variant: Variant) -> Sampled:
        """Return the results in memory that the next replay overwrites."""

        def idle() -> tuple[Tensor]:
            return (torch.full_like(rows, self.slots),)

        name = "decode", len(rows), steps, variant
        return graphs.run(name, lambda slots: self._steps(slots, steps, variant), (rows,), idle)

    def _steps(self, rows: Tensor, steps: int, variant: Variant) -> Sampled:
        drawn = [self.step.decode(rows, variant) for _ in range(steps)]
        return Sampled(*(torch.stack(values, dim=1) for values in zip(*drawn, strict=True)))

    def detach(self) -> None:
        """Leave the stages as they were, until the next command."""
        if self._attached:
            self.step.detach()
            reshard(*self.stages)
            self._attached = False

    def _attach(self) -> None:
        if not self._attached:
            self.step.attach()
            self._attached = True

    def _bucket(self, rows: int) -> int:
        """Return the number of rows of a decode step for `rows` sequences."""
        bucket = next((size for size in BUCKETS if size >= rows), rows)
        multiple = self.mesh.plan.tp if self.mesh.plan.sequence_parallel else 1
        return -(-bucket // multiple) * multiple

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.mesh.device)


def release_of(graphs: StepGraphs) -> Callable[[], None]:
    """Return a function that releases `graphs` if they still exist. It does not keep them alive."""
    reference = weakref.ref(graphs)

    def release() -> None:
        if (there := reference()) is not None:
            there.release()

    return release
