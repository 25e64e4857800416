"""Steps of generation on a GPU: every shape of a pass is a CUDA graph, captured when it is first needed.

Few shapes occur, by padding. Prompts of one padded length are read in one pass, wherever that changes no bit of a
prompt's keys and values: in 16 bits, where matrix products choose no order of sums by the number of rows. This is
looked at once for each shape. No method waits for the device, but the first pass over several prompts of a shape.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.inference.cache import LayerCache
from dtgpt.inference.captured.graphs import StepGraphs
from dtgpt.inference.captured.prompt_batches import BATCH_TOKENS, group_prompts, padded_length, padded_size
from dtgpt.inference.captured.torch_private import without_split_k
from dtgpt.inference.scheduler import LONGEST_ROUND, PromptChunk
from dtgpt.inference.step import Step
from dtgpt.models.batch import Batch
from dtgpt.ops.attention.core import AttentionRule, causal_attention
from dtgpt.ops.attention.prompts import write_prompts, write_rings
from dtgpt.ops.sampling.sequences import Sampled, Variant

# Rows of steps that are so short that one graph holds all of a round: else the time between graphs would show.
ROWS_OF_SHORT_STEPS = 8


class PromptRows(NamedTuple):
    """The first tokens of several sequences, perhaps with others behind them that pad them to one length: what the
    cache keeps of these is overwritten before it is read. The scratch slot alone may occur more than once."""

    slots: Tensor  # int64 [B]
    lengths: Tensor  # int64 [B]: tokens without those that pad

    def attend(self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Keep k and v `[B, T, N_kv, D]` of the tokens in a layer, and return their attention `[B, T, N, D]`."""
        if rule.window is None:
            write_prompts(k, v, layer.keys, layer.values, self.slots)
        else:
            write_rings(k, v, layer.keys, layer.values, *self)
        return causal_attention(q, k, v, backend=layer.backend, rule=rule)


class CapturedStep(Step):
    """A `Step` whose passes are CUDA graphs; not for stages that are sharded over replicas.

    `batch_tokens`: most tokens of a pass over several prompts, padding included; 0: each prompt has a pass of its own.
    """

    @staticmethod
    def serves(graphs: bool) -> bool:
        """Return whether steps are of this kind, where CUDA graphs may hold them or not."""
        return graphs

    def __init__(self, *arguments: Any, **options: Any):
        """Take the arguments of `Step`, on a GPU."""
        super().__init__(*arguments, **options)
        self._graphs = StepGraphs()
        batched = self.dtype.itemsize == 2 and not self.mesh.plan.sequence_parallel
        self.batch_tokens = BATCH_TOKENS if batched else 0
        self._equal: dict[tuple[int, int], bool] = {}  # by batch size and length, whether bits are those of one prompt
        self.mesh.before_end.append(release_of(self._graphs))

    def group(self, chunks: Sequence[PromptChunk]) -> list[list[PromptChunk]]:
        together = group_prompts(chunks, self.cache.state.positions, self.batch_tokens)
        grouped = {chunk for group in together for chunk in group}
        return together + [[chunk] for chunk in chunks if chunk not in grouped]

    @torch.no_grad()
    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Fill the cache of each of `slots`, all different, with the tokens of a prompt, whose positions begin with
        `first`. Several are read in one pass: they begin at 0 and have one padded length. Raise ValueError where they
        have not."""
        length, *others = {padded_length(len(ids), self.cache.state.positions) for ids in prompts}
        if len(prompts) == 1 and (first or length is None):
            return super().read(slots, prompts, first)
        if length is None or others:
            raise ValueError(f"prompts of {[len(ids) for ids in prompts]} tokens cannot be read in one pass")
        self.attach()
        shape = padded_size(len(prompts), length, self.batch_tokens), length
        if shape[0] < len(prompts) or not self._equal.get(shape, True):
            return self._read_alone(slots, prompts, length)
        self._read_padded(slots, prompts, shape)
        if shape[0] > 1 and shape not in self._equal:
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
        inputs = self.tensor(padded), self.tensor(places), self.tensor(lengths)

        def idle() -> tuple[Tensor, ...]:
            return torch.zeros_like(inputs[0]), torch.full_like(inputs[1], self.slots), torch.zeros_like(inputs[2])

        def work(tokens: Tensor, slots: Tensor, lengths: Tensor) -> None:
            with without_split_k(tokens.device) if self.batch_tokens and not self.exact else nullcontext():
                self.fill_padded(tokens, slots, lengths)

        self._graphs.run(("prefill", *shape), work, inputs, idle)

    def fill_padded(self, tokens: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Fill the cache of each of the slots `[B]` with the first tokens `[B, T]` of a prompt, padded to T from
        `lengths` int64 `[B]`."""
        positions = torch.arange(tokens.shape[1], device=self.mesh.device).expand(len(tokens), -1)
        self.logits(Batch(tokens, positions=positions), PromptRows(slots, lengths), head_rows=1)

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
        rows, last = self.tensor(slots), self.cache.layers[-1:]
        kept = [memory[rows, :, :length].flatten() for layer in last for memory in (layer.keys, layer.values)]
        return torch.cat(kept).view(torch.uint8) if kept else rows.new_empty(0)

    def draw_steps(self, rows: Tensor, steps: int, variant: Variant) -> Sampled:
        if steps == LONGEST_ROUND and len(rows) <= ROWS_OF_SHORT_STEPS:
            return self._replay(rows, steps, variant)
        replayed = (self._replay(rows, 1, variant) for _ in range(steps))
        drawn = [Sampled(*(values.clone() for values in results)) for results in replayed]
        return Sampled(*(torch.cat(values, dim=1) for values in zip(*drawn, strict=True)))

    def _replay(self, rows: Tensor, steps: int, variant: Variant) -> Sampled:
        """Return the results in memory that the next replay overwrites."""

        def idle() -> tuple[Tensor]:
            return (torch.full_like(rows, self.slots),)

        def work(slots: Tensor) -> Sampled:
            return super(CapturedStep, self).draw_steps(slots, steps, variant)

        return self._graphs.run(("decode", len(rows), steps, variant), work, (rows,), idle)


def release_of(graphs: StepGraphs) -> Callable[[], None]:
    """Return a function that releases `graphs` if they still exist. It does not keep them alive."""
    reference = weakref.ref(graphs)

    def release() -> None:
        if (there := reference()) is not None:
            there.release()

    return release
