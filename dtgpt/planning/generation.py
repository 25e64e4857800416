"""The memory of generation under a plan, without a GPU: weights and slots, for `dtgpt plan --inference-slots`."""

from dtgpt.config.execution import Settings
from dtgpt.parallel.cache_sizes import SHARE, slot_bytes
from dtgpt.planning.gpus import Gpu
from dtgpt.planning.parameters import parameters_of
from dtgpt.util.console import byte_size, counted


def weight_bytes(settings: Settings, rank: int) -> int:
    """Return the bytes of the weights with which a rank generates."""
    held = parameters_of(settings.model, settings.plan.for_inference(), rank)
    return settings.dtype.itemsize * sum(p.local for p in held)


def describe_generation(settings: Settings, slots: int, gpu: Gpu) -> str:
    """Return a report on `slots` sequences that are generated at the same time."""
    plan, config = settings.plan.for_inference(), settings.model
    lines, most, group = [], 0, plan.ranks_of_stage
    for rank in range(0, plan.world, group):
        weights, slot = weight_bytes(settings, rank), slot_bytes(config, plan, settings.dtype, rank)
        whole = weights + (slots + 1) * slot
        most = max(most, whole)
        ranks = f"rank {rank}" if group == 1 else f"ranks {rank}-{rank + group - 1}"
        lines.append(
            f"  {ranks}: {byte_size(weights)} of weights + {slots + 1:,} slots of {byte_size(slot)} = "
            f"{byte_size(whole)}"
        )
    fits = "fits" if most <= SHARE * gpu.size else "DOES NOT FIT"
    sequences = counted(slots, "sequence")
    return "\n".join(
        [
            f"generation of {sequences} of up to {config.seq_length} tokens at the same time; one more slot is scratch",
            *lines,
            f"{fits}: {byte_size(most)} on the fullest rank, {gpu.name} has {byte_size(gpu.size)}",
        ]
    )
