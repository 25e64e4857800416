"""The end of a step: new tokens join their sequences.

Reference: `record_reference`. Fast path: one Triton kernel, where torch launches six.
"""

from torch import Tensor

from dtgpt.ops.kernels.devices import has_triton
from dtgpt.ops.sampling.sequences import Sequences


def record(sequences: Sequences, slots: Tensor, tokens: Tensor) -> None:
    """Append tokens int64 `[B]` to the sequences in slots int64 `[B]`, in place. At the last position the position
    stays, and a further token overwrites the last."""
    if not has_triton(tokens):
        return record_reference(sequences, slots, tokens)
    from dtgpt.ops.kernels.sampling.record_kernels import launch_record

    launch_record(sequences, slots, tokens)


def record_reference(sequences: Sequences, slots: Tensor, tokens: Tensor) -> None:
    """Do what `record` does, in plain torch: the test oracle."""
    position = (sequences.position[slots] + 1).clamp_max(sequences.history.shape[1] - 1)
    sequences.token[slots], sequences.position[slots] = tokens, position
    sequences.history[slots, position] = tokens
