"""The reports of `dtgpt plan`, without a GPU or processes: memory, messages and idle time of a recipe under a plan; a
table of several plans, a line each; and plans by the time of a step, with why others lost (`--plan auto`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from dtgpt.config.execution import Settings
from dtgpt.config.plan import GPUS_OF_HOST, Plan
from dtgpt.models.config import ModelConfig
from dtgpt.models.shared.flops import flops_per_token, used_parameters
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.columns import aligned, short_duration
from dtgpt.planning.gpus import GIB, Gpu
from dtgpt.planning.memory import Memory, fullest, memory_by_rank
from dtgpt.planning.parameters import parameters_of
from dtgpt.planning.search import Candidate, Ranking, why_slower
from dtgpt.planning.step_time import StepTime, left_out, step_time
from dtgpt.planning.traffic import bubble, collectives_of, sent_bytes
from dtgpt.planning.what_fits import (
    fits_into,
    largest_micro_batch,
    longest_sequence,
    options_of_change,
    what_fits,
    with_fewest_blocks,
)
from dtgpt.posttrain.demands import slots_of
from dtgpt.util.console import byte_size, counted, parameters
from dtgpt.util.shared.device_words import number_types
from dtgpt.util.shared.words import hanging

SHORT = {"optimizer": "moments", "gradients": "grads"}  # in the table, of 80 columns


def describe_plan(settings: Settings, name: str, notes: list[str], gpu: Gpu, steps: int = 1) -> str:
    """Return the report on the recipe `name`, which trains `steps` steps, with `notes` for the user."""
    memories = memory_by_rank(settings)
    most = fullest(memories)
    lines = [*describe_mesh(name, settings), "", *_memory(settings, memories), ""]
    lines += [*_traffic(settings, list(memories)), ""]
    if gpu.rates is not None and settings.device.type == "cuda":
        lines += [*_time(settings, step_time(settings, gpu.rates), gpu, steps), ""]
    lines += [hanging(f"note: {note}", 6) for note in notes]
    lines.append(verdict(most.total, gpu, "the fullest rank"))
    if fits_into(most.total, gpu.size):
        micro, length = largest_micro_batch(settings, gpu.size), longest_sequence(settings, gpu.size)
        words = f"largest that fit: micro-batches of {micro:,}, or samples of {length:,} tokens"
        fewer = with_fewest_blocks(settings, gpu.size)
        if fewer != settings:
            words += f"; faster: {' '.join(sorted(options_of_change(settings, fewer)))}"
        lines.insert(-1, hanging(words, 2))
    else:
        lines.append(hanging(f"what would fit: {'; '.join(what_fits(settings, gpu))}", 2))
    return "\n".join(lines)


def verdict(needed: float, gpu: Gpu, rank: str) -> str:
    """Return whether `needed` bytes on `rank` fit into the GPU."""
    fits = "fits" if fits_into(needed, gpu.size) else "DOES NOT FIT"
    return f"{fits}: {byte_size(needed)} on {rank}, {gpu.name} has {byte_size(gpu.size)}"


def _time(settings: Settings, time: StepTime, gpu: Gpu, steps: int) -> list[str]:
    """Return the lines on the time of a step and of the run."""
    world, tokens = settings.plan.world, settings.global_batch_size * settings.seq_length
    rate = tokens / time.total
    flops = flops_per_token(settings.model, settings.seq_length) * rate / world
    mfu = f", MFU {flops / gpu.peak:.1%}" if gpu.peak and settings.dtype.itemsize == 2 else ""
    hours = steps * time.total / 3600
    parts = {name: part for name, part in parts_of(time).items() if part >= 0.001 * time.total}
    spent = ", ".join(f"{name} {short_duration(part)}" for name, part in parts.items())
    lines = [
        f"step    {short_duration(time.total)} on {gpu.name}: {rate:,.0f} tokens/s, {rate / world:,.0f} a GPU{mfu}",
        f"        {spent}",
        *(f"        {line}" for line in left_out(settings)),
        f"        expected error: {gpu.measured}{'; of several hosts none was measured' * (world > GPUS_OF_HOST)}",
        f"run     {counted(steps, 'step')}: {hours:,.1f} hours, {hours * world:,.0f} GPU hours",
    ]
    return [hanging(line, 8) for line in lines]


def parts_of(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by words."""
    over = {f"messages over {axis}": seconds for axis, seconds in time.messages.items()}
    return {
        **vars(time.work),
        "recomputation": time.again,
        "optimizer": time.optimizer,
        **over,
        "bubble": time.bubble,
        "waiting for the host": time.host,
    }


def sizes(config: ModelConfig) -> str:
    """Return the number of parameters in words, and of those that each token meets where it does not meet all."""
    whole, used = config.num_parameters, used_parameters(config)
    met = f", {parameters(used).removesuffix(' parameters')} of them for each token"
    return parameters(whole) + met * (used < whole)


def _rows(plan: Plan) -> str:
    """Return what a rank has memory for."""
    return "planned for even loads" if plan.asks_host else "each with room for all rows"


def describe_mesh(name: str, settings: Settings) -> list[str]:
    """Return the lines on the recipe `name`: model, degrees of the plan, batch and stages."""
    config, plan, passes = settings.model, settings.plan, settings.micro_batches
    lines = [
        f"recipe  {name}: {sizes(config)}, {counted(config.num_layers, 'block')} of "
        f"{config.hidden_size}, T={settings.seq_length}, {number_types(settings)}"
        f"{', compiled' if settings.compile else ''}",
        f"plan    {plan.name}: {counted(plan.world, 'rank')} = pp {plan.pp} x dp {plan.dp} x "
        + (f"cp {plan.cp} x " if plan.cp > 1 else "")
        + f"tp {plan.tp}, tp fastest"
        + (f"; experts of a block on {plan.ep} of dp x cp, {_rows(plan)}" if plan.ep > 1 else "")
        + (f"; ZeRO-{plan.zero}" if plan.zero else "")
        + ("; sequence parallel" if plan.sequence_parallel else ""),
        f"batch   {counted(settings.global_batch_size, 'sample')} = {counted(plan.dp, 'replica')} x "
        f"{counted(passes, 'micro-batch', 'micro-batches')} x {settings.micro_batch_size}",
    ]
    if plan.pp > 1:
        cut = [len(blocks) for blocks in block_ranges(config, plan)]
        idle = bubble(plan, passes)
        idle_words = (
            f"bubble {idle:.1%} of a step"
            if idle is not None
            else f"bubble not known below {2 * plan.pp - 1} micro-batches"
        )
        lines.append(f"stages  {plan.num_stages} by {plan.schedule}, blocks {' '.join(map(str, cut))}; {idle_words}")
    return [hanging(line, 8) for line in lines]


def _memory(settings: Settings, memories: dict[int, Memory]) -> list[str]:
    plan = settings.plan
    parts = [name for name in vars(memories[0]) if name != "cache" or slots_of(settings)]
    unit, name = (GIB, "GiB") if fullest(memories).total >= GIB else (GIB / 1024, "MiB")
    lines = [f"{name} by pipeline rank" if plan.pp > 1 else f"{name} on each rank"]
    rows = [["ranks", "params", *(SHORT.get(part, part) for part in parts), "total"]]
    for rank, memory in memories.items():
        group = plan.ranks_of_stage
        label = f"{rank}" if group == 1 else f"{rank}-{rank + group - 1}"
        count = parameters(sum(p.local for p in parameters_of(settings.model, plan, rank))).split(" param")[0]
        rows.append(
            [label, count, *(_figure(n / unit) for n in (*(getattr(memory, part) for part in parts), memory.total))]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for label, *cells in rows:  # one blank between columns: 80 of them are few
        lines.append(" ".join([label.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]))
    return lines


def _figure(size: float, large: str = ".1f") -> str:
    return f"{size:.2f}" if size < 100 else f"{size:{large}}"


def _traffic(settings: Settings, ranks: list[int]) -> list[str]:
    if settings.plan.world == 1:
        return ["no collectives: one process"]
    lines = []
    for rank in dict.fromkeys((ranks[0], ranks[-1])):
        lines.append(f"messages of rank {rank} in one step")
        for c in collectives_of(settings, rank):
            each = f"{c.count:>8} x {byte_size(c.bytes / c.count):>10} = {byte_size(c.bytes):>10}"
            left = f"  {c.kind:<15}{c.over:<4}{each}  "
            lines.append(hanging(left + c.what, len(left)))
    return lines


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
    some = [axis for axis in ("cp", "ep") if any(getattr(case.settings.plan, axis) > 1 for case in cases)]
    axes = [*some, "tp", "dp", "pp"]
    step = [["plan", "GPUs", "micro-batches", "bubble", *axes, "longest", *["time"] * timed]]
    for case, most in zip(cases, memories, strict=True):
        settings, start = case.settings, [case.plan, f"{case.settings.plan.world:,}"]
        fits = "yes" if fits_into(most.total, size) else "NO"
        memory.append([*start, *(_figure(n / unit, ",.1f") for n in (*_columns(most), most.total)), fits])
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
        f"recipe  {name}: {sizes(config)}, {config.num_layers} blocks of {config.hidden_size}, "
        f"T={settings.seq_length}, {number_types(settings)}, recompute {settings.recompute}{first}",
        f"batch   {settings.global_batch_size:,} samples = {tokens:,} tokens, micro-batches of "
        f"{settings.micro_batch_size}",
    ]
    return [hanging(line, 8) for line in lines]


def _columns(memory: Memory) -> list[int]:
    """Return weights (masters, and what matmuls read), moments, gradients, activations and the rest, in bytes."""
    weights, rest = memory.weights + memory.gathered, memory.edges + memory.working + memory.cache
    return [weights, memory.optimizer, memory.gradients, memory.activations, rest]


def _step(settings: Settings, unit: float, axes: list[str]) -> list[str]:
    plan, passes = settings.plan, settings.micro_batches
    idle = bubble(plan, passes) if plan.pp > 1 else 0.0
    sent = [sent_bytes(settings, rank) for rank in memory_by_rank(settings)]
    most = [max(each[over] for each in sent) / unit for over in axes]
    return [f"{passes:,}", "unknown" if idle is None else f"{idle:.1%}", *(_figure(n, ",.1f") for n in most)]


def describe_ranking(ranking: Ranking, gpu: Gpu, number: int) -> list[str]:
    """Return the lines on the plans that fit and on those that would be faster but do not. number: of processes that
    are there."""
    best = ranking.best
    used = best.settings.plan.world
    ranks = counted(used, "process", "processes")
    rows = [["plan", "micro", "recompute", "step", "GiB", "slower", "most of it"]]
    for each in ranking.fitting:
        slower = each.seconds / best.seconds - 1
        rows.append(
            [*_choice(each.settings), short_duration(each.seconds), _gib(each), f"{slower:.1%}", _reason(each, best)]
        )
    for each in ranking.too_large:
        rows.append([*_choice(each.settings), "-", _gib(each), "-", f"does not fit {gpu.size / GIB:.1f} GiB"])
    lines = [
        f"plans of {ranks} by the time of a step on {gpu.name}",
        *aligned(rows, (0, 2, 6)),
        *left_out(best.settings),
    ]
    if used < number:
        lines.append(f"{number - used:,} of {number:,} processes wait: no plan fits more than {used:,} of them")
    if gpu.measured:
        lines.append(hanging(f"expected error of a time: {gpu.measured}; plans that are nearer are equal", 2))
    return [*lines, f"chosen: {options_of(best)}", ""]


def options_of(chosen: Candidate) -> str:
    """Return the options that say the same without `auto`."""
    own = chosen.settings
    words = f"--plan {own.plan.name} --micro_batch_size {own.micro_batch_size} --recompute {own.recompute}"
    return words if own.recompute_blocks is None else f"{words} --recompute_blocks {own.recompute_blocks}"


def _choice(settings: Settings) -> list[str]:
    blocks = "" if settings.recompute_blocks is None else f" {settings.recompute_blocks}"
    return [settings.plan.name, f"{settings.micro_batch_size}", f"{settings.recompute}{blocks}"]


def _gib(candidate: Candidate) -> str:
    return f"{candidate.memory.total / GIB:,.1f}"


def _reason(candidate: Candidate, best: Candidate) -> str:
    return "" if candidate is best else why_slower(candidate, best)
