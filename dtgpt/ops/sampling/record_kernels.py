"""Triton kernel of `dtgpt.ops.sampling.record`. Needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.sampling.record import Records
from dtgpt.ops.sampling.sequences import Sampled


@triton.jit(do_not_specialize=["positions", "recent", "most", "given", "count"])
def record_kernel(
    slots, tokens, logprobs, top_ids, top_logprobs, last_token, last_position, history, past_logprobs, recent_ids,
    recent_logprobs, positions, recent, most, given, count, LANES: tl.constexpr,
):  # fmt: skip
    """Append a row's token to its slot; count: how many of the `given` alternatives are kept, `most` at most."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token, place = tl.load(tokens + row), tl.minimum(tl.load(last_position + slot) + 1, positions - 1)
    tl.store(last_token + slot, token)
    tl.store(last_position + slot, place)
    tl.store(history + slot * positions + place, token)
    tl.store(past_logprobs + slot * positions + place, tl.load(logprobs + row))
    lane = tl.arange(0, LANES)
    target, inside = (slot * recent + place % recent) * most + lane, lane < count
    tl.store(recent_ids + target, tl.load(top_ids + row * given + lane, mask=inside), mask=inside)
    tl.store(recent_logprobs + target, tl.load(top_logprobs + row * given + lane, mask=inside), mask=inside)


def launch_record(records: Records, slots: Tensor, sampled: Sampled) -> None:
    """Do what `record` does."""
    given, (_, recent, most) = sampled.top_ids.shape[1], records.top_ids.shape
    count = min(given, most)
    record_kernel[(len(slots),)](
        slots, *(tensor.contiguous() for tensor in sampled), *records, records.history.shape[1], recent, most, given,
        count, LANES=triton.next_power_of_2(max(count, 1)), num_warps=1,
    )  # fmt: skip
