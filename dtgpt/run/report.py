"""What a run tells its user: lines on the console, records in its metrics.jsonl, texts in its folder.

All ranks take the same steps, but only rank 0 tells of them. It has a `RunReport`. The other ranks have a `Report`,
which takes the same calls and does nothing, so that the loop and its observers need not ask which rank they are on.
Whoever wants the records elsewhere, too, is a `Sink` (`records.py`), which an observer brings.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.data.dataset import Dataset
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.folder import describe_run, values_of
from dtgpt.run.records import Begun, JsonLines, Sink, read_records
from dtgpt.util.console import say
from dtgpt.util.storage import write_text


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
    """Tell of a run, on rank 0; a context that closes its files. Here the console shows the loss; a capability derives
    from this class, and shows more."""

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
        self.recipe, self.settings, self.mesh, self.data = recipe, settings, mesh, data
        self.steps, self.run, self.samples_before, self.first = recipe.num_steps, run, samples_before, step
        # Sinks first: they may need what a former start left, which the next two lines replace.
        begun = Begun(run, step, asdict(recipe), values_of(recipe), read_records(run / "metrics.jsonl"))
        more = [sink for open_sink in more_sinks if (sink := open_sink(begun)) is not None]
        describe_run(run, asdict(recipe), settings, mesh, data, step)
        self.sinks: list[Sink] = [JsonLines(run / "metrics.jsonl", keep_until_step=step), *more]

    @property
    def origin(self) -> str:
        """The step with which a run goes on, as words behind its name."""
        return f", from step {self.first}" if self.first else ""

    def __enter__(self) -> "RunReport":
        say(f"run {self.run}{self.origin}")
        return self

    def step(self, step: int, metrics: dict[str, float], recorded: bool) -> None:
        if recorded:
            self._write({"step": step, **metrics})
        say(f"step {step}/{self.steps}" + (f"  loss {metrics['loss']:.4f}" if "loss" in metrics else ""))

    def figures(self, step: int, figures: Mapping[str, float | None], *lines: str) -> None:
        self._write({"step": step, **known_values(figures)})
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

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        for sink in self.sinks:
            sink.close(failed=failure is not None)

    def finish(self, is_done: bool) -> None:
        for sink in self.sinks:
            sink.finish()

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


def known_values(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that are known."""
    return {name: value for name, value in values.items() if value is not None}
