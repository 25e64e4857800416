"""Records of a run as TensorBoard reads them, with the tags of Megatron-LM where it has them. The package tensorboard
(extra `tensorboard`) is imported only here."""

import io
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.config.sections import LogConfig
from dtgpt.data.dataset import PERPLEXITIES, perplexity
from dtgpt.run.sinks import Begun, Sink
from dtgpt.train.observer import Observer
from dtgpt.util.console import say
from dtgpt.util.errors import UserError

FOLDER = "tensorboard"  # within a run folder
FILES = "events.out.tfevents.*"


class Tag(NamedTuple):
    """How TensorBoard shows a value of a record."""

    name: str
    factor: float = 1.0
    by_samples: bool = False  # show it over the samples seen, too


# The tags that `training_log`, `evaluate_and_print_results` and the timers of Megatron-LM write. Other values of a
# record keep their names.
TAGS = {
    "step_loss": Tag("lm loss", by_samples=True),
    "lr": Tag("learning-rate", by_samples=True),
    "batch_size": Tag("batch-size", by_samples=True),
    "grad_norm": Tag("grad-norm", by_samples=True),
    "loss_scale": Tag("loss-scale", by_samples=True),
    "validation_loss": Tag("lm loss validation", by_samples=True),
    "test_loss": Tag("lm loss test", by_samples=True),
    "seconds_per_step": Tag("iteration-time"),
    "tflops_per_device": Tag("throughput"),
    "memory_gib": Tag("mem-max-allocated-bytes", factor=2**30),
    "data_seconds": Tag("batch-generator-time"),
    "forward_backward_seconds": Tag("forward-backward-time"),
    "forward_seconds": Tag("forward-compute-time"),
    "backward_seconds": Tag("backward-compute-time"),
    "optimizer_seconds": Tag("optimizer-time"),
    "save_seconds": Tag("save-checkpoint-time"),
}
STARTED = re.compile(r"events\.out\.tfevents\.(\d{1,10})\.")
LEFT_OUT = ("step", "samples", *PERPLEXITIES)  # the axes, and what follows from losses


class TensorBoardObserver(Observer):
    """Write what a run records for TensorBoard, too."""

    def __init__(self, log: LogConfig, steps: int):
        """Raise UserError where torch cannot write for TensorBoard."""
        import_tensorboard()

    def sink(self, begun: Begun) -> Sink:
        return TensorBoard(begun.run, begun.values, begun.records, begun.step)


class TensorBoard(Sink):
    """Event files in the folder `tensorboard` of a run, one for each process that trained it."""

    def __init__(self, run: Path, recipe: dict[str, Any], records: list[dict[str, Any]], step: int):
        """records: those of the run so far, `step` the one from which it goes on. Where some are of later steps, or
        none are in event files, the files are rewritten. recipe: values by name, to be shown as a text."""
        import_tensorboard()
        folder = run / FOLDER
        if folder.is_symlink():
            raise UserError(f"{folder} is a link, through which nothing is written; remove it")
        folder.mkdir(exist_ok=True)
        former = list(folder.glob(FILES))
        is_stale = any(record["step"] > step for record in records)
        for path in former if is_stale else []:
            path.unlink()
        # The form of all writers. TensorBoard reads the files of a folder in the order of their names, and a clock may
        # have gone back since the last one.
        started = [int(found[1]) for path in former if (found := STARTED.match(path.name))]
        seconds = max(int(time.time()), *(1 + second for second in started), 0)
        name = f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.{os.getpid()}.{len(former)}"
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._size = 0  # of the events that are whole
        self._write([version_event(), recipe_event(recipe, step)])
        for record in records if is_stale or not former else []:
            if record["step"] <= step:
                self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        self._write(list(scalar_events(record)))

    def examples(self, step: int, texts: dict[str, str]) -> None:
        try:
            for name, text in texts.items():
                self.text(step, f"{name} answer", text)
        except OSError as error:  # a full disk costs a text, not the run
            say(f"the answers of step {step} are missing from TensorBoard ({error})", warning=True)

    def text(self, step: int, name: str, text: str) -> None:
        """Show a text as it is, by its step."""
        plain = text.encode(errors="replace").decode()
        self._write([text_event(step, name, "\n".join(f"    {line}" for line in plain.splitlines()))])

    def close(self, failed: bool) -> None:
        self._file.close()

    def _write(self, events: list[Any]) -> None:
        """Append all events or none: TensorBoard reads nothing after a truncated event."""
        data = framed(events)
        written = self._file.write(data)
        if written < len(data):
            self._file.truncate(self._size)
            self._file.seek(self._size)
            raise OSError("only part of an event was written")
        self._size += written


def import_tensorboard() -> None:
    """Raise UserError if tensorboard is not installed."""
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError:
        raise UserError(
            "log.tensorboard needs the package tensorboard; run pip install 'dtgpt[tensorboard]', or use "
            "--log.tensorboard off"
        ) from None


def version_event() -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), file_version="brain.Event:2")


def recipe_event(recipe: dict[str, Any], step: int) -> Any:
    """Return the event of a table of options and values."""
    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in recipe.items()]
    return text_event(step, "recipe", "\n".join(["| option | value |", "|---|---|", *rows]))


def text_event(step: int, name: str, markdown: str) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard.summary import text

    return Event(wall_time=time.time(), step=step, summary=text(name, markdown))


def scalar_events(record: dict[str, Any]) -> Iterator[Any]:
    """Yield the events of a record: one over its step, and one over its samples where it has them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    by_step, by_samples = scalars(record)
    for axis, values in ((record["step"], by_step), (record.get("samples"), by_samples)):
        if values and type(axis) is int:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            yield Event(wall_time=time.time(), step=axis, summary=summary)


def scalars(record: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the values of a record by their tags: over steps, and over samples."""
    by_step: dict[str, float] = {}
    by_samples: dict[str, float] = {}
    for name, value in record.items():
        if name in LEFT_OUT or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        tag = TAGS.get(name, Tag(name))
        shown = {tag.name: value * tag.factor}
        if name in ("validation_loss", "test_loss"):
            shown[f"{tag.name} ppl"] = perplexity(value)
        by_step |= shown
        if tag.by_samples:
            by_samples |= {f"{shown_name} vs samples": shown_value for shown_name, shown_value in shown.items()}
    return by_step, by_samples


def framed(events: list[Any]) -> bytes:
    """Return the bytes of events in TensorBoard's file format."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()
