"""Records of a run: where they go, metrics.jsonl, and their form on the console."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from dtgpt.util.console import counted, duration, terminal_width
from dtgpt.util.field_types import is_finite
from dtgpt.util.storage import atomic_file, open_regular, parse_json

LONGEST_LINE = 1 << 20  # bytes of a record
LARGEST_INT = 1 << 53  # that a float holds exactly, and so the largest step
FORMER = {"valid_loss": "validation_loss", "valid_bits_per_byte": "validation_bits_per_byte"}  # names of older versions
LARGEST_SHOWN = 1e30  # larger values are not drawn, nor do they overflow a sum
LEAST_RANGE = 0.02  # of a sparkline


class Begun(NamedTuple):
    """A run that begins or goes on, before anything of it is written."""

    run: Path  # its folder
    step: int  # after which it goes on
    recipe: dict[str, Any]
    values: dict[str, Any]  # of the recipe, by dotted name
    records: list[dict[str, Any]]  # so far, some perhaps of later steps than `step`, which are taken again


class Sink:
    """Where rank 0 sends what a run records. A class of this one has what it needs of these methods."""

    def write(self, record: dict[str, Any]) -> None:
        """Take the `step` and what was measured. OSError: the record is lost, and the run goes on."""

    def examples(self, step: int, texts: dict[str, str]) -> None:
        """Take texts from a step, by name."""

    def finish(self) -> None:
        """Do what is to be done when the last step has been taken, or the run was asked to end."""

    def close(self, failed: bool) -> None:
        """Close what is open. failed: the run ended with an error."""


class JsonLines(Sink):
    """One JSON object a line, flushed at once. After a resume, records past `keep_until_step` are dropped first."""

    def __init__(self, path: Path, keep_until_step: int = 0):
        with_records = ((line, parse_record(line)) for line in metric_lines(path))
        kept = [line for line, record in with_records if record and record["step"] <= keep_until_step]
        with atomic_file(path) as file:
            file.writelines(line.rstrip(b"\n") + b"\n" for line in kept)  # as they are, whoever wrote them
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        self._file = os.fdopen(descriptor, "ab", buffering=0)  # a record is in the file at once
        self._torn = False  # the file ends within a record, so the next one begins a new line

    def write(self, record: dict[str, Any]) -> None:
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in record.items()}
        line = b"\n" * self._torn + (json.dumps(finite) + "\n").encode()
        self._torn = self._file.write(line) < len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, "only part of a record was written")

    def close(self, failed: bool) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without lines that a killed process or a full disk left half written."""
    return [record for record in map(parse_record, metric_lines(path)) if record is not None]


def metric_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a metrics.jsonl; none if the file does not exist. A line above `LONGEST_LINE` is cut
    there, so that it does not parse as a record."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line
            while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, None where it holds none: a JSON object whose `step` is an integer from 0 on. Its
    values are finite numbers, and None for all else: a file may have been written by others, too. Names that older
    versions wrote are those of today."""
    try:
        record = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    if not has_step(record):
        return None
    return {FORMER.get(name, name): _number(value) for name, value in record.items() if name.isprintable()}


def has_step(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value of JSON is an object whose `step` is an integer from 0 to `LARGEST_INT`."""
    step = value.get("step") if isinstance(value, dict) else None
    return type(step) is int and 0 <= step <= LARGEST_INT


def _number(value: Any) -> float | None:
    """Return a finite number of JSON, as a float where a float holds no integer of its size; None for anything else."""
    if type(value) is int and abs(value) <= LARGEST_INT:
        return value
    return float(value) if is_finite(value) else None


def _memory(record: dict[str, Any]) -> str:
    total = record.get("memory_total_gib")
    return f"mem {record['memory_gib']:.1f}{f'/{total:.0f}' if total else ''} GiB"


# The parts of a progress line, in its order, by the value that must be known for it.
PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "time": lambda r: r["time"],
    "batch_size": lambda r: f"batch {r['batch_size']}",
    "loss": lambda r: f"loss {r['loss']:.4f}",
    "ppl": lambda r: f"ppl {r['ppl']:.4g}",
    "bits_per_byte": lambda r: f"bits/byte {r['bits_per_byte']:.3f}",
    "reward": lambda r: f"reward {r['reward']:.3f}",
    "answer_tokens": lambda r: f"length {r['answer_tokens']:.1f}",
    "reward_accuracy": lambda r: f"accuracy {r['reward_accuracy']:.3f}",
    "reward_margin": lambda r: f"margin {r['reward_margin']:.3f}",
    "reward_chosen": lambda r: f"chosen {r['reward_chosen']:.3f}",
    "grad_norm": lambda r: f"gnorm {r['grad_norm']:.2f}",
    "z": lambda r: f"z {r['z'][0]:+.2f} {r['z'][1]:+.2f}",
    "skipped_outliers": lambda r: f"{counted(r['skipped_outliers'], 'outlier')} skipped",
    "empty_steps": lambda r: f"{counted(r['empty_steps'], 'step')} without a counted token",
    "lr": lambda r: f"lr {r['lr']:.1e}".replace("e-0", "e-"),
    "loss_scale": lambda r: f"scale {_power(r['loss_scale'])}, {r['skipped_steps']} skipped",
    "ms": lambda r: f"{r['ms']:.1f} ms",
    "tokens_per_second": lambda r: f"{_rounded(r['tokens_per_second'])} tok/s",
    "tokens_per_second_per_device": lambda r: f"{_rounded(r['tokens_per_second_per_device'])}/device",
    "mfu": lambda r: f"mfu {r['mfu']:.0%}",
    "memory_gib": _memory,
    "eta_seconds": lambda r: f"eta {duration(r['eta_seconds'])}",
}
TIMED = ("forward_backward", "forward", "backward", "optimizer", "data")  # parts of a step that have timers
LEAST = (
    "memory_gib", "bits_per_byte", "tokens_per_second_per_device", "mfu", "answer_tokens", "reward_margin", "grad_norm",
    "reward_chosen", "eta_seconds",
)  # fmt: skip


def progress_line(record: dict[str, Any], steps: int) -> str:
    """Return `step 120/1000  loss 3.2141  ...` of a record without what is not known. Where it is wider than the
    terminal, what matters least is left out; a file has all."""
    parts = {"step": f"step {record['step']:>{len(str(steps))}}/{steps}"}
    parts |= {name: part(record) for name, part in PARTS.items() if record.get(name) is not None}
    width = terminal_width() or math.inf
    for name in LEAST:
        if len("  ".join(parts.values())) > width:
            parts.pop(name, None)
    return "  ".join(parts.values())


def timer_line(record: dict[str, Any], graphs: bool) -> str:
    """Return `ms/step: forward-backward 36.9 (forward 12.1, backward 24.3), ...` of a record; empty without timers.
    graphs: steps are replayed as CUDA graphs, in which forward and backward are one."""
    known = {name: record[f"{name}_seconds"] * 1000 for name in TIMED if record.get(f"{name}_seconds") is not None}
    if not known:
        return ""
    parts = [f"{name} {known[name]:.1f}" for name in ("forward", "backward") if name in known]
    inner = ", ".join(parts) or ("replayed as CUDA graphs" if graphs else "")
    shown = {name: f"{name.replace('_', '-')} {value:.1f}" for name, value in known.items()}
    if inner and "forward_backward" in shown:
        shown["forward_backward"] += f" ({inner})"
    return "  ms/step: " + ", ".join(shown[n] for n in ("forward_backward", "optimizer", "data") if n in shown)


def _power(scale: float) -> str:
    """Return `2^16`, or the number itself where it is not a power of two."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _rounded(number: float) -> str:
    """Return `950`, `412k` or `1.23M`."""
    if number < 1e4:
        return f"{number:.0f}"
    return f"{number / 1e3:.0f}k" if number < 1e6 else f"{number / 1e6:.2f}M"


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """Return a curve in one line of text, `width` characters at most, each the mean of its part of the values. The
    height is the range of the values, and at least `LEAST_RANGE` of the largest: noise shall not look like a rise."""
    known = [v for v in values if v is not None and abs(v) < LARGEST_SHOWN]
    if not known:
        return ""
    width = min(width, len(known))
    cuts = [round(i * len(known) / width) for i in range(width + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    height = max(high - low, LEAST_RANGE * max(abs(low), abs(high)))
    return "".join("▁▂▃▄▅▆▇█"[round((m - low) / height * 7) if height else 0] for m in means)
