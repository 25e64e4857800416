"""The line that says how far a run is, and how it does, from what was recorded of a step."""

import math
import time
from collections.abc import Callable
from typing import Any

from dtgpt.data.dataset import perplexity
from dtgpt.util.console import counted
from dtgpt.util.shared.words import duration, terminal_width


def _memory(record: dict[str, Any]) -> str:
    total = record.get("memory_total_gib")
    return f"mem {record['memory_gib']:.1f}{f'/{total:.0f}' if total else ''} GiB"


# What `log.show` may ask for, by the value of a record that must be known for it.
SHOWN = {"time": "step", "ppl": "loss", "z": "loss_z", "ms": "seconds_per_step"}
# The parts of a progress line, in its order, by the value that must be known for it.
PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "time": lambda r: time.strftime("%H:%M:%S"),
    "batch_size": lambda r: f"batch {r['batch_size']}",
    "loss": lambda r: f"loss {r['loss']:.4f}",
    "ppl": lambda r: f"ppl {perplexity(r['loss']):.4g}",
    "bits_per_byte": lambda r: f"bits/byte {r['bits_per_byte']:.3f}",
    "reward": lambda r: f"reward {r['reward']:.3f}",
    "answer_tokens": lambda r: f"length {r['answer_tokens']:.1f}",
    "reward_accuracy": lambda r: f"accuracy {r['reward_accuracy']:.3f}",
    "reward_margin": lambda r: f"margin {r['reward_margin']:.3f}",
    "reward_chosen": lambda r: f"chosen {r['reward_chosen']:.3f}",
    "grad_norm": lambda r: f"gnorm {r['grad_norm']:.2f}",
    "z": lambda r: f"z {r['loss_z']:+.2f} {r['grad_norm_z']:+.2f}",
    "skipped_outliers": lambda r: f"{counted(r['skipped_outliers'], 'outlier')} skipped",
    "empty_steps": lambda r: f"{counted(r['empty_steps'], 'step')} without a counted token",
    "lr": lambda r: f"lr {r['lr']:.1e}".replace("e-0", "e-"),
    "loss_scale": lambda r: f"scale {_power(r['loss_scale'])}, {r['skipped_steps']} skipped",
    "ms": lambda r: f"{1000 * r['seconds_per_step']:.1f} ms",
    "tokens_per_second": lambda r: f"{_rounded(r['tokens_per_second'])} tok/s",
    "tokens_per_second_per_device": lambda r: f"{_rounded(r['tokens_per_second_per_device'])}/device",
    "mfu": lambda r: f"mfu {r['mfu']:.0%}",
    "memory_gib": _memory,
    "eta_seconds": lambda r: f"eta {duration(r['eta_seconds'])}",
}
LEAST = (  # what a narrow terminal does not show, the first one first
    "memory_gib",
    "bits_per_byte",
    "tokens_per_second_per_device",
    "mfu",
    "answer_tokens",
    "reward_margin",
    "grad_norm",
    "reward_chosen",
    "eta_seconds",
)


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


def _power(scale: float) -> str:
    """Return `2^16`, or the number itself where it is not a power of two."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _rounded(number: float) -> str:
    """Return `950`, `412k` or `1.23M`."""
    if number < 1e4:
        return f"{number:.0f}"
    return f"{number / 1e3:.0f}k" if number < 1e6 else f"{number / 1e6:.2f}M"
