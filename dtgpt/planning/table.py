"""The table of `dtgpt plan`: several plans on several numbers of processes, a line each."""

from collections.abc import Sequence
from dataclasses import dataclass

from dtgpt.config.execution import Settings
from dtgpt.planning.columns import aligned, short_duration
from dtgpt.planning.fit import fits_into, longest_sequence
from dtgpt.planning.gpus import GIB, Gpu
from dtgpt.planning.memory import Memory, fullest, memory_by_rank
from dtgpt.planning.step_time import left_out, step_time
from dtgpt.planning.traffic import bubble, sent_bytes
from dtgpt.util.console import byte_size, hanging, parameters


@dataclass(frozen=True)
class PlannedCase:
    """A plan for a number of processes, by the name that the user gave it."""

    plan: str
    settings: Settings


def describe_table(name: str, cases: Sequence[PlannedCase], notes: Sequence[str], gpu: Gpu) -> str:
    """Return the tables of memory and of a step for the cases of the recipe `name`, one at least, with `notes`
    below."""
    size, timed = gpu.size, gpu.rates is not None and cases[0].settings.device.type == "cuda"
    memories = [fullest(memory_by_rank(case.settings)) for case in cases]
    largest = max(memory.total for memory in memories)
    unit, unit_name = (GIB, "GiB") if largest >= GIB else (GIB / 1024, "MiB")
    memory = [["plan", "GPUs", "weights", "moments", "grads", "activations", "other", "total", "fits"]]
    axes = ["cp"] * any(case.settings.plan.cp > 1 for case in cases) + ["tp", "dp", "pp"]
    step = [["plan", "GPUs", "micro-batches", "bubble", *axes, "longest", *["time"] * timed]]
    for case, most in zip(cases, memories, strict=True):
        settings, start = case.settings, [case.plan, f"{case.settings.plan.world:,}"]
        fits = "yes" if fits_into(most.total, size) else "NO"
        memory.append([*start, *(_figure(n / unit) for n in (*_parts(most), most.total)), fits])
        time = [short_duration(step_time(settings, gpu.rates).total)] if gpu.rates and timed else []
        step.append([*start, *_step(settings, unit, axes), f"{longest_sequence(settings, size):,}", *time])
    lines = [
        *_heading(name, cases[0].settings),
        "",
        f"{unit_name} on the fullest rank; {gpu.name} has {byte_size(size)}",
        *aligned(memory),
        "",
        f"a step: {unit_name} that a rank sends; tokens of the longest sample that fits" + "; time of a step" * timed,
        *aligned(step),
        *(
            [hanging(f"expected error of a time: {gpu.measured}; of several hosts none was measured", 2)]
            if timed
            else []
        ),
        *(left_out(cases[0].settings) if timed else []),
    ]
    return "\n".join([*lines, *[""] * bool(notes), *(hanging(note, 2) for note in notes)])


def _heading(name: str, settings: Settings) -> list[str]:
    config, tokens = settings.model, settings.global_batch_size * settings.seq_length
    first = "" if settings.recompute_blocks is None else f", recompute_blocks {settings.recompute_blocks}"
    lines = [
        f"recipe  {name}: {parameters(config.num_parameters)}, {config.num_layers} blocks of {config.hidden_size}, "
        f"T={settings.seq_length}, {settings.number_types}, recompute {settings.recompute}{first}",
        f"batch   {settings.global_batch_size:,} samples = {tokens:,} tokens, micro-batches of "
        f"{settings.micro_batch_size}",
    ]
    return [hanging(line, 8) for line in lines]


def _parts(memory: Memory) -> list[int]:
    """Return weights (masters, and what matmuls read), moments, gradients, activations and the rest, in bytes."""
    weights, rest = memory.weights + memory.gathered, memory.edges + memory.working + memory.cache
    return [weights, memory.optimizer, memory.gradients, memory.activations, rest]


def _step(settings: Settings, unit: float, axes: list[str]) -> list[str]:
    plan, passes = settings.plan, settings.micro_batches
    idle = bubble(plan, passes) if plan.pp > 1 else 0.0
    sent = [sent_bytes(settings, rank) for rank in memory_by_rank(settings)]
    most = [max(each[over] for each in sent) / unit for over in axes]
    return [f"{passes:,}", "unknown" if idle is None else f"{idle:.1%}", *map(_figure, most)]


def _figure(size: float) -> str:
    return f"{size:.2f}" if size < 100 else f"{size:,.1f}"
