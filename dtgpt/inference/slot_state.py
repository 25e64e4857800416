"""The state of sequences on the device, one row a slot, so that decode steps follow each other without the host."""

import torch
from torch import Tensor

from dtgpt.inference.sampling import Sampling, SpecialIds, parameters_of
from dtgpt.ops.sampling.record import record
from dtgpt.ops.sampling.sequences import PARAMETERS, Integers, Sequences

KEY = Integers._fields.index("key_0")


class SlotState:
    """Tensors of `slots` + 1 rows; the last row is scratch for rows that only pad a batch.

    token, position: int64 `[S]`; history: int64 `[S, P]`; parameters: int64, as `dtgpt.ops.sampling.sequences` lays
    them out.
    """

    def __init__(self, slots: int, positions: int, device: torch.device | str):
        rows = slots + 1
        self.positions, self.device = positions, torch.device(device)
        self.token, self.position = self._zeros(rows), self._zeros(rows)
        self.history, self.parameters = self._zeros(rows, positions), self._zeros(rows, PARAMETERS)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    @property
    def sequences(self) -> Sequences:
        """What `dtgpt.ops.sampling.sample` reads."""
        return Sequences(self.token, self.position, self.history, self.parameters)

    @staticmethod
    def encode(ids: list[int], sampling: Sampling, special: SpecialIds, prompt_index: int, choice: int) -> Tensor:
        """Return all that `set` needs to start a sequence after the non-empty prompt `ids`: int64 on the CPU."""
        return torch.cat([parameters_of(sampling, special, len(ids), prompt_index, choice), torch.tensor(ids)])

    def set(self, slot: int, payload: Tensor) -> None:
        """Start a sequence from what `encode` made."""
        ids = len(payload) - PARAMETERS
        uploaded = self._upload(payload)
        self.parameters[slot] = uploaded[:PARAMETERS]
        self.history[slot, :ids] = uploaded[PARAMETERS:]
        self.token[slot] = uploaded[-1]
        self.position[slot : slot + 1].fill_(ids - 1)  # the assignment of a number would wait for the device

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole rows; all are read before one is written."""
        read, written = self._upload(torch.tensor([sources, targets], dtype=torch.int64))
        for tensor in self.sequences:
            tensor[written] = tensor[read]

    def set_keys(self, slots: list[int], keys: list[tuple[int, int]]) -> None:
        """Let the draws of each slot be those of a key of two words."""
        rows, *words = self._upload(torch.tensor([slots, *zip(*keys, strict=True)], dtype=torch.int64))
        self.parameters[rows, KEY], self.parameters[rows, KEY + 1] = words

    def assign(self, slots: list[int], tokens: list[int]) -> None:
        """Replace the last token of each slot, as a beam search does that chooses on the host."""
        rows, chosen = self._upload(torch.tensor([slots, tokens], dtype=torch.int64))
        self.token[rows] = chosen
        self.history[rows, self.position[rows]] = chosen

    def record(self, slots: Tensor, tokens: Tensor) -> None:
        """Append the tokens int64 `[B]` of a step to the sequences in slots int64 `[B]`. At the last position the
        position stays, and a further token overwrites the last."""
        record(self.sequences, slots, tokens)

    def _upload(self, values: Tensor) -> Tensor:
        """Copy from the CPU to the device; from pinned memory, which a GPU reads without the host."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)
