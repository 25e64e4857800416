"""The report of `dtgpt plan`: memory, messages and idle time of a recipe under a plan, without a GPU or processes."""

from dtgpt.config.execution import Settings
from dtgpt.parallel.collectives import GPUS_OF_HOST
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.fit import (
    fits_into,
    largest_micro_batch,
    longest_sequence,
    options_of_change,
    what_fits,
    with_fewest_blocks,
)
from dtgpt.planning.gpus import GIB, Gpu
from dtgpt.planning.memory import Memory, fullest, memory_by_rank
from dtgpt.planning.parameters import parameters_of
from dtgpt.planning.step_time import StepTime, left_out, step_time
from dtgpt.planning.traffic import bubble, collectives_of
from dtgpt.util.console import byte_size, counted, hanging, parameters, short_duration

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
    flops = settings.model.flops_per_token(settings.seq_length) * rate / world
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
        **vars(time.work), "recomputation": time.again, "optimizer": time.optimizer, **over, "bubble": time.bubble,
        "waiting for the host": time.host,
    }  # fmt: skip


def describe_mesh(name: str, settings: Settings) -> list[str]:
    """Return the lines on the recipe `name`: model, degrees of the plan, batch and stages."""
    config, plan, passes = settings.model, settings.plan, settings.micro_batches
    lines = [
        f"recipe  {name}: {parameters(config.num_parameters)}, {counted(config.num_layers, 'block')} of "
        f"{config.hidden_size}, T={settings.seq_length}, {settings.number_types}"
        f"{', compiled' if settings.compile else ''}",
        f"plan    {plan.name}: {counted(plan.world, 'rank')} = pp {plan.pp} x dp {plan.dp} x "
        + (f"cp {plan.cp} x " if plan.cp > 1 else "")
        + f"tp {plan.tp}, tp fastest"
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
    parts = [name for name in vars(memories[0]) if name != "cache" or settings.slots]
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


def _figure(size: float) -> str:
    return f"{size:.2f}" if size < 100 else f"{size:.1f}"


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
