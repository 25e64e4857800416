"""The steps of generation on a rank: every command of rank 0 ends in a method of `Step`, on all ranks in one order.

Prompts are read in passes over one or several, sequences are continued in rounds of decode steps. Few shapes occur, by
padding, so that on a GPU each is a CUDA graph, captured when it is first needed. No method waits for the device, but
the first pass over several prompts of a shape.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from dtgpt.inference.cache import Cache, Chunk
from dtgpt.inference.forward import Forward, Pending
from dtgpt.inference.graphs import StepGraphs
from dtgpt.inference.prompt_batches import BATCH_TOKENS, padded_length, padded_size
from dtgpt.inference.scheduler import LONGEST_ROUND
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.sampling.scores import Scores
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.engine import reshard
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.hardware import to_device
from dtgpt.util.torch_private import without_split_k

# Rows of steps that are so short that one graph holds all of a round: else the time between graphs would show.
ROWS_OF_SHORT_STEPS = 8
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows of a decode step: few shapes, thus few graphs


class Step:
    """The cache of `slots` sequences, and the stages that work on it.

    All ranks call the same methods in the same order with the same arguments. Between the first of them and `detach`
    the stages serve inference alone.

    `batch_tokens`: most tokens of a pass over several prompts, padding included; 0: each prompt has a pass of its own.
    So it is wherever a batch could change a prompt's bits: on CPUs and in fp32, where libraries choose the order of
    sums by the number of rows.
    """

    def __init__(
        self, stages: list[Decoder], mesh: Mesh, config: ModelConfig, dtype: torch.dtype, slots: int,
        vocab_size: int | None = None, graphs: bool = False, exact: bool = False,
    ):  # fmt: skip
        """vocab_size: ids that may be drawn; None: those of the model. graphs: replay prefill and decode steps as CUDA
        graphs on a GPU; not for stages that are sharded over replicas. exact: as of `Forward`."""
        self.stages, self.mesh, self.slots = stages, mesh, slots
        self.cache = Cache(stages, config, mesh.plan, slots, dtype, mesh.device)
        self.passes = Forward(stages, mesh, dtype, self.cache, vocab_size or config.vocab_size, exact)
        self._graphs = StepGraphs() if graphs and mesh.device.type == "cuda" else None
        batched = self._graphs is not None and dtype.itemsize == 2 and not mesh.plan.sequence_parallel
        self.batch_tokens = BATCH_TOKENS if batched else 0
        self._equal: dict[tuple[int, int], bool] = {}  # by batch size and length, whether bits are those of one prompt
        self._attached = False
        if self._graphs is not None:
            mesh.before_end.append(release_of(self._graphs))

    @torch.no_grad()
    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Fill the cache of each of `slots`, all different, with the tokens of a prompt, whose positions begin with
        `first`. Several are read in one pass: they begin at 0 and have one padded length. Raise ValueError where they
        have not."""
        self._attach()
        length, *others = {padded_length(len(ids), self.cache.state.positions) for ids in prompts}
        if len(prompts) == 1 and (self._graphs is None or first or length is None):
            return self.passes.fill(self._tensor(prompts[0]), Chunk(slots[0], first, len(prompts[0])))
        if length is None or others:
            raise ValueError(f"prompts of {[len(ids) for ids in prompts]} tokens cannot be read in one pass")
        shape = padded_size(len(prompts), length, self.batch_tokens), length
        if shape[0] < len(prompts) or not self._equal.get(shape, True):
            return self._read_alone(slots, prompts, length)
        self._read_padded(slots, prompts, shape)
        if self._graphs is not None and shape[0] > 1 and shape not in self._equal:
            self._equal[shape] = self._is_equal_alone(slots, prompts, length)

    def _read_alone(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> None:
        for slot, ids in zip(slots, prompts, strict=True):
            self._read_padded([slot], [ids], (1, length))

    def _read_padded(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], shape: tuple[int, int]) -> None:
        """Run one pass of `shape`, padded with zeros and with the scratch slot."""
        size, length = shape
        missing = size - len(prompts)
        padded = [[*ids, *[0] * (length - len(ids))] for ids in prompts] + [[0] * length] * missing
        places, lengths = [*slots, *[self.slots] * missing], [*map(len, prompts), *[0] * missing]
        inputs = self._tensor(padded), self._tensor(places), self._tensor(lengths)
        if self._graphs is None:
            return self.passes.fill_padded(*inputs)

        def idle() -> tuple[Tensor, ...]:
            return torch.zeros_like(inputs[0]), torch.full_like(inputs[1], self.slots), torch.zeros_like(inputs[2])

        def work(tokens: Tensor, slots: Tensor, lengths: Tensor) -> None:
            with without_split_k(tokens.device) if self.batch_tokens and not self.passes.exact else nullcontext():
                self.passes.fill_padded(tokens, slots, lengths)

        self._graphs.run(("prefill", *shape), work, inputs, idle)

    def _is_equal_alone(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> bool:
        """Read prompts that were read together once more, each alone, and return whether each rank has the same bits.

        Which kernels multiply is chosen by shape, so one look at each shape is enough; it waits for the device, as the
        capture before it did. The last layer depends on all layers before it."""
        together = self._last_layer(slots, length)
        self._read_alone(slots, prompts, length)
        alone = self._last_layer(slots, length)
        return all(self.mesh.gather(torch.equal(together, alone)))

    def _last_layer(self, slots: Sequence[int], length: int) -> Tensor:
        """Return a copy of what the last layer's cache has of the slots, as bytes; empty on a rank without one."""
        rows, last = self._tensor(slots), self.cache.layers[-1:]
        kept = [memory[rows, :, :length].flatten() for layer in last for memory in (layer.keys, layer.values)]
        return torch.cat(kept).view(torch.uint8) if kept else rows.new_empty(0)

    @torch.no_grad()
    def score(self, slot: int, ids: Sequence[int], first: int = 0, alternatives: int = 0) -> Pending[Scores]:
        """Read all of `ids` but the last one, and return the scores of all but the first one, with the ids and
        log-probabilities of the `alternatives` likeliest tokens in place of each."""
        self._attach()
        tokens = self._tensor(ids)
        chunk = Chunk(slot, first, len(ids) - 1)
        return Pending(self.passes.score(tokens[:-1], tokens[1:], chunk, alternatives))

    @torch.no_grad()
    def decode(self, slots: Sequence[int], steps: int, variant: Variant) -> Pending[Sampled]:
        """Draw the next `steps` tokens of each of `slots`, all different: results of shape `[B, steps]`."""
        self._attach()
        rows = self._tensor([*slots, *[self.slots] * (self._bucket(len(slots)) - len(slots))])
        if len(rows) > len(slots):
            self.cache.state.position[self.slots :].zero_()  # attention over the scratch slot stays short
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
        drawn = [self.passes.draw(rows, variant) for _ in range(steps)]
        return Sampled(*(torch.stack(values, dim=1) for values in zip(*drawn, strict=True)))

    def detach(self) -> None:
        """Leave the stages as they were, until the next command."""
        if self._attached:
            self.passes.detach()
            reshard(*self.stages)
            self._attached = False

    def _attach(self) -> None:
        if not self._attached:
            self.passes.attach()
            self._attached = True

    def _bucket(self, rows: int) -> int:
        """Return the number of rows of a decode step for `rows` sequences."""
        bucket = next((size for size in BUCKETS if size >= rows), rows)
        multiple = self.mesh.plan.tp if self.mesh.plan.sequence_parallel else 1
        return -(-bucket // multiple) * multiple

    def _tensor(self, numbers: Sequence) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.mesh.device)


def release_of(graphs: StepGraphs) -> Callable[[], None]:
    """Return a function that releases `graphs` if they still exist. It does not keep them alive."""
    reference = weakref.ref(graphs)

    def release() -> None:
        if (there := reference()) is not None:
            there.release()

    return release
