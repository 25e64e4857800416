"""Prompts to the cache: one or several in a pass, of one padded length, as CUDA graphs on a GPU."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from dtgpt.inference.broadcast import true_everywhere
from dtgpt.inference.graphs import StepGraphs
from dtgpt.inference.prompt_batches import BATCH_TOKENS, padded_length, padded_size
from dtgpt.inference.step import Step
from dtgpt.util.hardware import to_device
from dtgpt.util.matmul import without_split_k


class Prefill:
    """Passes over padded prompts. Every rank makes the same ones.

    `batch_tokens`: most tokens of a pass over several prompts, padding included; 0: each prompt has a pass of its own.
    So it is wherever a batch could change a prompt's bits: on CPUs and in fp32, where libraries choose the order of
    sums by the number of rows.
    """

    def __init__(self, step: Step, graphs: StepGraphs | None, scratch: int):
        """Use a pass of `step`. `scratch`: the slot that prompts which pad a batch are written to."""
        self._step, self._graphs, self._scratch = step, graphs, scratch
        batched = graphs is not None and step.dtype.itemsize == 2 and not step.mesh.plan.sequence_parallel
        self.batch_tokens = BATCH_TOKENS if batched else 0
        self._equal: dict[tuple[int, int], bool] = {}  # by batch size and length, whether bits are those of one prompt

    @torch.no_grad()
    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Fill the cache of each slot with the tokens of a prompt, from position 0 on. The slots differ; the prompts
        have one padded length. Raise ValueError where they have not."""
        length, *others = {padded_length(len(ids), self._step.state.positions) for ids in prompts}
        if length is None or others:
            raise ValueError(f"prompts of {[len(ids) for ids in prompts]} tokens cannot be read in one pass")
        shape = padded_size(len(prompts), length, self.batch_tokens), length
        if shape[0] < len(prompts) or not self._equal.get(shape, True):
            return self._read_alone(slots, prompts, length)
        self._read(slots, prompts, shape)
        if self._graphs is not None and shape[0] > 1 and shape not in self._equal:
            self._equal[shape] = self._check(slots, prompts, length)

    def _read_alone(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> None:
        for slot, ids in zip(slots, prompts, strict=True):
            self._read([slot], [ids], (1, length))

    def _read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], shape: tuple[int, int]) -> None:
        """Run one pass of `shape`, padded with zeros and with the scratch slot."""
        size, length = shape
        missing = size - len(prompts)
        padded = [[*ids, *[0] * (length - len(ids))] for ids in prompts] + [[0] * length] * missing
        places, lengths = [*slots, *[self._scratch] * missing], [*map(len, prompts), *[0] * missing]
        inputs = self._tensor(padded), self._tensor(places), self._tensor(lengths)
        if self._graphs is None:
            return self._step.prefill_padded(*inputs)

        def idle() -> tuple[Tensor, ...]:
            return torch.zeros_like(inputs[0]), torch.full_like(inputs[1], self._scratch), torch.zeros_like(inputs[2])

        def work(tokens: Tensor, slots: Tensor, lengths: Tensor) -> None:
            with without_split_k(tokens.device) if self.batch_tokens and not self._step.exact else nullcontext():
                self._step.prefill_padded(tokens, slots, lengths)

        self._graphs.run(("prefill", *shape), work, inputs, idle)

    def _check(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> bool:
        """Read prompts that were read together once more, each alone, and return whether each rank has the same bits.

        Which kernels multiply is chosen by shape, so one look at each shape is enough; it waits for the device, as the
        capture before it did. The last layer depends on all layers before it."""
        together = self._last_layer(slots, length)
        self._read_alone(slots, prompts, length)
        alone = self._last_layer(slots, length)
        return true_everywhere(self._step.mesh, torch.equal(together, alone))

    def _last_layer(self, slots: Sequence[int], length: int) -> Tensor:
        """Return a copy of what the last layer's cache has of the slots, as bytes; empty on a rank without one."""
        rows, last = self._tensor(slots), self._step.cache.layers[-1:]
        kept = [memory[rows, :, :length].flatten() for layer in last for memory in (layer.keys, layer.values)]
        return torch.cat(kept).view(torch.uint8) if kept else rows.new_empty(0)

    def _tensor(self, numbers: Sequence) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._step.mesh.device)
