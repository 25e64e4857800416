"""The report of `dtgpt plan --plan auto`: plans by the time of a step, and why others lost."""

from dtgpt.config.execution import Settings
from dtgpt.planning.columns import aligned, short_duration
from dtgpt.planning.gpus import GIB, Gpu
from dtgpt.planning.search import Candidate, Ranking, why_slower
from dtgpt.planning.step_time import left_out
from dtgpt.util.console import counted, hanging


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
