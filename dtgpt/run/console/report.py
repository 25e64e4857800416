"""What a run says on the console: of what it is made, how fast it is, how long it takes, and what to do next with it.

The first step compiles, allocates and warms caches, so the rates begin after it. What happens inside `paused()` is no
training, and is left out of them, too.
"""

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from dtgpt.data.dataset import PART_NAMES, Dataset, bits_per_byte
from dtgpt.models.shared.flops import flops_per_token
from dtgpt.posttrain.demands import makes_samples
from dtgpt.run.console import LogFields
from dtgpt.run.console.line import SHOWN, progress_line
from dtgpt.run.report import RunReport, known_values
from dtgpt.util.console import counted, parameters, say
from dtgpt.util.hardware import total_memory
from dtgpt.util.machine.machine import peak_flops
from dtgpt.util.shared.device_words import device_name, number_types
from dtgpt.util.shared.words import duration, hanging

LARGE_FOR_A_CPU = 50_000_000  # parameters
HANG = 8  # the column in which the lines of the header begin


class ConsoleReport(RunReport):
    """A report with a header, rates and hints."""

    _lap_step: int | None  # of the last line; None: there was none

    def __enter__(self) -> "ConsoleReport":
        recipe, data, settings = self.recipe, self.data, self.settings
        self._begin, self._lap_begin = time.perf_counter(), time.perf_counter()
        self._lap_step, self._lap_tokens = None, 0
        first, whole = recipe.batch_sizes().at(0), recipe.global_batch_size
        self.device, self.ramps = self.mesh.device, first != whole
        self.peak = peak_flops(self.device, settings.dtype)
        self.shown = set(cast(LogFields, recipe.log).show.split(","))
        self.bytes_per_token, self.spells = data.bytes_per_token(), data.tokenizer.spells
        self.talks = "chat_template" in data.tokenizer.additions
        samples = self._samples(data, recipe.sample_length, recipe.log.eval_samples)
        say(self._header(f"{first} to {whole}" if self.ramps else f"{whole}", data, samples))
        if self.device.type == "cpu" and settings.model.num_parameters >= LARGE_FOR_A_CPU:
            from dtgpt.util.machine.large_models import caution_about

            say(caution_about(settings.model, settings.global_batch_size, settings.seq_length), warning=True)
        return self

    def _samples(self, data: Dataset, length: int, evaluated: int) -> str:
        """Return how many samples of each part the run takes, and of how many."""
        parts = []
        if not makes_samples(self.settings.sections):
            wanted, there = self.samples_before(self.steps), data.num_samples("train", length)
            parts.append(f"{wanted:,} to train on ({wanted / max(there, 1):.3g} epochs of {there:,})")
        for part, name in PART_NAMES.items():
            if there := data.num_samples(part, length):
                parts.append(f"{min(evaluated, there):,} of {there:,} for {name}")
        return ", ".join(parts)

    def _header(self, batch: str, data: Dataset, samples: str) -> str:
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
            f"{number_types(self.settings)}",
            f"run     {self.run}{self.origin}",
        ]
        return "\n".join(hanging(line, HANG) for line in header)

    def step(self, step: int, metrics: dict[str, float], recorded: bool) -> None:
        bits = bits_per_byte(metrics["loss"], self.bytes_per_token) if "loss" in metrics else None
        record: dict[str, Any] = {"step": step, **metrics, **known_values({"bits_per_byte": bits})}
        record["memory_total_gib"] = total_memory(self.device) / 2**30 if self.device.type == "cuda" else None
        record |= self._rates(step, int(metrics["tokens"]))
        if recorded:
            self._write(record)
        asked = {name: record.get(SHOWN[name]) for name in SHOWN if name in self.shown}
        say(progress_line(record | asked | ({} if self.ramps else {"batch_size": None}), self.steps))

    def finish(self, is_done: bool) -> None:
        super().finish(is_done)
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
        flops = flops_per_token(self.settings.model, self.settings.seq_length) * tokens_per_second / self.mesh.world
        rates["tflops_per_device"] = flops / 1e12
        if self.peak:
            rates["mfu"] = flops / self.peak
        if self.mesh.world > 1:
            rates["tokens_per_second_per_device"] = tokens_per_second / self.mesh.world
        return rates
