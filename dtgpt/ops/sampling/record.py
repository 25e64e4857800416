"""The end of a step: new tokens join their sequences."""

from torch import Tensor

from dtgpt.ops.sampling.sequences import Sequences
from dtgpt.ops.serve import Operation


def record_reference(tokens: Tensor, slots: Tensor, sequences: Sequences) -> None:
    """Append tokens int64 `[B]` to the sequences in slots int64 `[B]`, in place. At the last position the position
    stays, and a further token overwrites the last."""
    position = (sequences.position[slots] + 1).clamp_max(sequences.history.shape[1] - 1)
    sequences.token[slots], sequences.position[slots] = tokens, position
    sequences.history[slots, position] = tokens


RECORD = Operation("record", record_reference, "history[slots, position + 1] = tokens")


def record(sequences: Sequences, slots: Tensor, tokens: Tensor) -> None:
    """Do what `record_reference` does."""
    RECORD(tokens, slots, sequences)
