"""The report of `dtgpt plan`: memory, messages and idle time of a recipe under a plan, without a GPU or processes."""

import difflib
import re

import torch

from dtgpt.config.execution import Settings
from dtgpt.config.fp8 import check_fp8, no_float8
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.fit import fits_into, what_fits
from dtgpt.planning.memory import Memory, fullest, memory_by_rank
from dtgpt.planning.parameters import parameters_of
from dtgpt.planning.traffic import bubble, collectives_of
from dtgpt.util.console import byte_size, counted, hanging, parameters
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import DEVICE_MEMORY, NO_FLOAT8, total_memory

GIB = 2**30
LARGEST = 1024  # GiB; larger numbers are those of products
SHORT = {"optimizer": "moments", "gradients": "grads"}  # in the table, of 80 columns


def describe_plan(settings: Settings, name: str, notes: list[str], gpu: str | None) -> str:
    """Return the report on the recipe `name`, with `notes` for the user. `gpu`: a name of DEVICE_MEMORY or a size in
    GiB, by default the CUDA device of this machine, else H200."""
    device, size = find_device(gpu, settings.fp8)
    memories = memory_by_rank(settings)
    most = fullest(memories)
    lines = [*describe_mesh(name, settings), "", *_memory(settings, memories), ""]
    lines += [*_traffic(settings, list(memories)), ""]
    lines += [hanging(f"note: {note}", 6) for note in notes]
    lines.append(verdict(most.total, device, size, "the fullest rank"))
    if not fits_into(most.total, size):
        lines.append(hanging(f"what would fit: {'; '.join(what_fits(settings, size))}", 2))
    return "\n".join(lines)


def verdict(needed: float, device: str, size: float, rank: str) -> str:
    """Return whether `needed` bytes on `rank` fit into the `size` bytes of `device`, both as `find_device` returns."""
    fits = "fits" if fits_into(needed, size) else "DOES NOT FIT"
    return f"{fits}: {byte_size(needed)} on {rank}, {device} has {byte_size(size)}"


def find_device(gpu: str | None, fp8: bool = False) -> tuple[str, float]:
    """Return (words, bytes) of a name of DEVICE_MEMORY, in any spelling, or of a size such as 80, 80GiB or 85.9GB.
    Raise UserError for anything else, and for a GPU that cannot train in `fp8`."""
    if gpu is None:
        if torch.cuda.is_available():
            device = torch.device("cuda", 0)
            if fp8:
                check_fp8(device)
            return torch.cuda.get_device_name(device), total_memory(device)
        gpu = "H200"
    word = _plain(gpu)
    for name, size in DEVICE_MEMORY.items():
        if word == _plain(name):
            if fp8 and name in NO_FLOAT8:
                raise no_float8(f"--gpu {name}")
            return name, size * GIB
    given = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*(gib|gb|g)?", gpu.strip(), re.ASCII | re.IGNORECASE)
    size = float(given[1]) * (1e9 if (given[2] or "").lower() == "gb" else GIB) if given else 0
    if 0 < size <= LARGEST * GIB:
        return "the device", size
    near = difflib.get_close_matches(gpu.upper(), DEVICE_MEMORY, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"--gpu {gpu[:60]} is not known; {hint}use one of {', '.join(DEVICE_MEMORY)}, or its memory in GiB, up to "
        f"{LARGEST}, such as --gpu 80"
    )


def _plain(name: str) -> str:
    """Return a name without what people write differently."""
    return re.sub(r"[^A-Z0-9]|NVIDIA|GEFORCE", "", name.upper())


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
    columns = [SHORT.get(name, name) for name in vars(memories[0])]
    unit, name = (GIB, "GiB") if fullest(memories).total >= GIB else (GIB / 1024, "MiB")
    lines = [f"{name} by pipeline rank" if plan.pp > 1 else f"{name} on each rank"]
    rows = [["ranks", "params", *columns, "total"]]
    for rank, memory in memories.items():
        group = plan.ranks_of_stage
        label = f"{rank}" if group == 1 else f"{rank}-{rank + group - 1}"
        count = parameters(sum(p.local for p in parameters_of(settings.model, plan, rank))).split(" param")[0]
        rows.append([label, count, *(_figure(n / unit) for n in (*vars(memory).values(), memory.total))])
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
