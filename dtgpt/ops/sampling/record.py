"""Appending the tokens of a step to their sequences, on the device.

Reference: indexed writes of torch. Fast path: one Triton kernel instead of about ten.
"""

from typing import NamedTuple

from torch import Tensor

from dtgpt.ops.fast import has_triton
from dtgpt.ops.sampling.sequences import Sampled


class Records(NamedTuple):
    """Tensors with a row for each slot; P is the number of positions."""

    token: Tensor  # int64 [S], the last token
    position: Tensor  # int64 [S], that of `token`
    history: Tensor  # int64 [S, P], entry i is the token at position i
    logprobs: Tensor  # fp32 [S, P]
    top_ids: Tensor  # int64 [S, R, A], entry i % R belongs to the token at position i
    top_logprobs: Tensor  # fp32 [S, R, A]


def record(records: Records, slots: Tensor, sampled: Sampled) -> None:
    """Append the tokens of a step to the sequences in slots int64 `[B]`, with the first A alternatives. At the last
    position the position stays, and a further token overwrites the last."""
    if has_triton(slots):
        from dtgpt.ops.sampling.record_kernels import launch_record

        launch_record(records, slots, sampled)
    else:
        record_reference(records, slots, sampled)


def record_reference(records: Records, slots: Tensor, sampled: Sampled) -> None:
    """Do what `record` does, in plain torch: the test oracle."""
    token, position, history, logprobs, top_ids, top_logprobs = records
    place = (position[slots] + 1).clamp_max(history.shape[1] - 1)
    token[slots], position[slots] = sampled.tokens, place
    history[slots, place], logprobs[slots, place] = sampled.tokens, sampled.logprobs
    recent, most = top_ids.shape[1:]
    if count := min(sampled.top_ids.shape[1], most):
        top_ids[slots, place % recent, :count] = sampled.top_ids[:, :count]
        top_logprobs[slots, place % recent, :count] = sampled.top_logprobs[:, :count]
