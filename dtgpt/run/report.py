"""What a run tells its user: lines on the console, records in its metrics.jsonl, texts in its folder.

All ranks take the same steps, but only rank 0 tells of them. It has a `RunReport`. The other ranks have a `Report`,
which takes the same calls and does nothing, so that the loop and its observers need not ask which rank they are on.
Whoever wants the records elsewhere, too, is a `Sink` (`records.py`), which an observer brings.
"""

import errno
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.data.dataset import PART_NAMES, Dataset, bits_per_byte, perplexity
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.folder import describe_run, values_of
from dtgpt.run.records import Begun, JsonLines, Sink, read_records
from dtgpt.util import seams
from dtgpt.util.console import counted, duration, hanging, parameters, say, terminal_width
from dtgpt.util.hardware import device_name, peak_flops, total_memory
from dtgpt.util.storage import write_text

HANG = 8  # the column in which the lines of the header begin


class Report:
    """Tell nothing, on every rank but the first."""

    def step(self, step: int, metrics: dict[str, float], recorded: bool) -> None:
        """Print a progress line after optimizer step `step`, and record it unless it is for the console alone. Of the
        metrics, `loss` is the mean of the interval, `step_loss` that of the step (neither is there where no token
        counted), `tokens` those since the beginning of the run, `memory_gib` the largest use of any rank."""

    def figures(self, step: int, figures: Mapping[str, float | None], *lines: str) -> None:
        """Record what was measured after a step, and print the lines that say it."""

    def text(self, step: int, folder: str, text: str) -> None:
        """Keep a text of a step in a folder of the run."""

    def examples(self, step: int, texts: dict[str, str]) -> None:
        """Keep texts from the training of a step, by name, such as the best and the worst answer."""

    def finish(self, is_done: bool) -> None:
        """Say how long the run took, where everything is and, where it is done, what to do next with it."""

    def paused(self) -> AbstractContextManager[None]:
        """Leave the time of the context out of the rates. The device finishes what it has queued first."""
        return nullcontext()


class RunReport(Report):
    """Tell of a run, on rank 0; a context that closes its files.

    The first step compiles, allocates and warms caches, so the rates begin after it. What happens inside `paused()`
    is no training, and is left out of them, too.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: Settings,
        mesh: Mesh,
        data: Dataset,
        run: Path,
        step: int,
        samples_before: Callable[[int], int],
        more_sinks: Iterable[Callable[[Begun], Sink | None]] = (),
    ):
        """step: the number of steps done so far. samples_before: returns the samples seen when a step begins.
        more_sinks: return those that observers bring, beside metrics.jsonl."""
        self.steps, self.settings, self.mesh, self.device, self.run = recipe.num_steps, settings, mesh, mesh.device, run
        first, whole = recipe.batch_sizes().at(0), recipe.global_batch_size
        self.samples_before, self.ramps = samples_before, first != whole
        self.peak = peak_flops(self.device, settings.dtype)
        self.shown = set(recipe.log.show.split(","))
        self.bytes_per_token, self.spells = data.bytes_per_token(), data.tokenizer.spells
        self.talks = "chat_template" in data.tokenizer.additions
        self.first, self._begin = step, time.perf_counter()

        # Sinks first: they may need what a former start left, which the next two lines replace.
        begun = Begun(run, step, asdict(recipe), values_of(recipe), read_records(run / "metrics.jsonl"))
        more = [sink for open_sink in more_sinks if (sink := open_sink(begun)) is not None]
        describe_run(run, asdict(recipe), settings, mesh, data, step)
        self.sinks: list[Sink] = [JsonLines(run / "metrics.jsonl", keep_until_step=step), *more]

        self._lap_begin, self._lap_tokens = time.perf_counter(), 0
        self._lap_step: int | None = None
        samples = self._samples(data, recipe.sample_length, recipe.log.eval_samples)
        self._say_header(f"{first} to {whole}" if self.ramps else f"{whole}", data, samples, step)

    def _samples(self, data: Dataset, length: int, evaluated: int) -> str:
        """Return how many samples of each part the run takes, and of how many."""
        parts = []
        if not self.settings.makes_samples:
            wanted, there = self.samples_before(self.steps), data.num_samples("train", length)
            parts.append(f"{wanted:,} to train on ({wanted / max(there, 1):.3g} epochs of {there:,})")
        for part, name in PART_NAMES.items():
            if there := data.num_samples(part, length):
                parts.append(f"{min(evaluated, there):,} of {there:,} for {name}")
        return ", ".join(parts)

    def _say_header(self, batch: str, data: Dataset, samples: str, step: int) -> None:
        model, tokenizer = self.settings.model, data.tokenizer
        per_token = f"{self.bytes_per_token:.2f} bytes per token " if tokenizer.spells else ""
        header = [
            f"model   {parameters(model.num_parameters)}; "
            f"{counted(self.steps, 'step')} of {batch} x {self.settings.seq_length} tokens",
            f"data    {data.source}: {counted(data.num_train_tokens, 'token')} to train on, "
            f"{data.num_valid_tokens:,} for validation, {per_token}({tokenizer.name}, "
            f"{counted(tokenizer.vocab_size, 'token')})",
            *([f"samples {samples}"] if samples else []),
            f"plan    {self.mesh.plan.name}",
            f"device  {f'{self.mesh.world} x ' if self.mesh.world > 1 else ''}{device_name(self.device)}, "
            f"{self.settings.number_types}",
            f"run     {self.run}" + (f", from step {step}" if step else ""),
        ]
        say("\n".join(hanging(line, HANG) for line in header))
        for caution_on in seams.listed("cpu_cautions") if self.device.type == "cpu" else ():
            if caution := caution_on(model, self.settings.global_batch_size, self.settings.seq_length):
                say(caution, warning=True)

    def step(self, step: int, metrics: dict[str, float], recorded: bool) -> None:
        bits = bits_per_byte(metrics["loss"], self.bytes_per_token) if "loss" in metrics else None
        record: dict[str, Any] = {"step": step, **metrics, **_known({"bits_per_byte": bits})}
        record["memory_total_gib"] = total_memory(self.device) / 2**30 if self.device.type == "cuda" else None
        record |= self._rates(step, int(metrics["tokens"]))
        if recorded:
            self._write(record)
        asked = {name: record.get(SHOWN[name]) for name in SHOWN if name in self.shown}
        say(progress_line(record | asked | ({} if self.ramps else {"batch_size": None}), self.steps))

    def figures(self, step: int, figures: Mapping[str, float | None], *lines: str) -> None:
        self._write({"step": step, **_known(figures)})
        for line in lines:
            say(f"step {step}: {line}")

    def examples(self, step: int, texts: dict[str, str]) -> None:
        self.text(step, "answers", "\n".join(f"{name}: {text}" for name, text in texts.items()))
        for sink in self.sinks:
            sink.examples(step, texts)

    def text(self, step: int, folder: str, text: str) -> None:
        path = text_path(self.run, folder, step)
        try:
            if path.parent.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "it is a link, through which nothing is written")
            path.parent.mkdir(exist_ok=True)
            write_text(path, text.encode(errors="replace").decode())
        except OSError as error:  # a text is not worth a run
            say(f"the text of this step is not in {path.parent} ({error})", warning=True)

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        for sink in self.sinks:
            sink.close(failed=failure is not None)

    def finish(self, is_done: bool) -> None:
        for sink in self.sinks:
            sink.finish()
        since = f" since step {self.first}" if self.first else ""
        say(f"time    {duration(time.perf_counter() - self._begin)}{since}")
        say(f"run     {self.run}")
        if is_done:
            name = shlex.quote(str(self.run))
            if file := self.settings.model.recipe_file:
                name += f" --recipe {shlex.quote(file)}"
            talk = f"dtgpt chat {name}" if self.talks else f"dtgpt generate {name} --interactive"
            commands = [talk] * self.spells + [f"dtgpt serve {name}"]
            say("\n".join(f"{'      ' if i else 'next: '}{command}" for i, command in enumerate(commands)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        yield
        # A lap that began within the context has no pause before it.
        self._lap_begin += time.perf_counter() - max(begin, self._lap_begin)

    def _rates(self, step: int, tokens: int) -> dict[str, float]:
        """Return the rates since the last progress line; nothing on the first."""
        now, last, seen = time.perf_counter(), self._lap_step, tokens - self._lap_tokens
        seconds, self._lap_begin, self._lap_step, self._lap_tokens = now - self._lap_begin, now, step, tokens
        if last is None or step == last:
            return {}
        per_step, tokens_per_second = seconds / (step - last), seen / seconds
        rates = {
            "tokens_per_second": tokens_per_second,
            "seconds_per_step": per_step,
            "eta_seconds": (self.steps - step) * per_step,
        }
        flops = self.settings.model.flops_per_token(self.settings.seq_length) * tokens_per_second / self.mesh.world
        rates["tflops_per_device"] = flops / 1e12
        if self.peak:
            rates["mfu"] = flops / self.peak
        if self.mesh.world > 1:
            rates["tokens_per_second_per_device"] = tokens_per_second / self.mesh.world
        return rates

    def _write(self, record: dict[str, Any]) -> None:
        record = {"step": record["step"], "samples": self.samples_before(record["step"]), **record}
        for sink in self.sinks:
            try:
                sink.write(record)
            except OSError as error:  # a full disk costs a record, not the run
                say(f"step {record['step']} is missing from the metrics ({error})", warning=True)


def text_path(run: Path, folder: str, step: int) -> Path:
    """Return where a run keeps a text of a step."""
    return run / folder / f"step_{step:08d}.txt"


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


# The progress line.


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
