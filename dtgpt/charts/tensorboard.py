"""Records of a run as TensorBoard reads them, with the tags of Megatron-LM where it has them. The package tensorboard
(extra `tensorboard`) is imported only here."""

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.config.sections import LogConfig
from dtgpt.data.dataset import PERPLEXITIES, perplexity
from dtgpt.run.records import Begun, Sink
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
LEFT_OUT = ("step", "samples", *PERPLEXITIES)  # the axes, and what follows from losses


class TensorBoardObserver(Observer):
    """Write what a run records for TensorBoard, too."""

    def __init__(self, log: LogConfig, steps: int):
        """Raise UserError where torch cannot write for TensorBoard."""
        summary_writer()

    def sink(self, begun: Begun) -> Sink:
        return TensorBoard(begun.run, begun.values, begun.records, begun.step)


class TensorBoard(Sink):
    """Event files in the folder `tensorboard` of a run, one for each start."""

    def __init__(self, run: Path, recipe: dict[str, Any], records: list[dict[str, Any]], step: int):
        """records: those of the run so far, `step` the one from which it goes on. recipe: values by name, to be shown
        as a text. Raises UserError where the folder is a link."""
        folder = run / FOLDER
        if folder.is_symlink():
            raise UserError(f"{folder} is a link, through which nothing is written; remove it")
        # Steps that are taken again must not be shown twice. `purge_step` would hide them, but it counts the points of
        # the curves over samples as steps, too, and would hide most of them. So the past is written anew.
        former = list(folder.glob(FILES))
        is_stale = any(record["step"] > step for record in records)
        for path in former if is_stale else []:
            path.unlink()
        self._writer = summary_writer()(folder)
        rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in recipe.items()]
        self._writer.add_text("recipe", "\n".join(["| option | value |", "|---|---|", *rows]), step)
        for record in records if is_stale or not former else []:
            if record["step"] <= step:
                self._add(record)
        self._writer.flush()

    def write(self, record: dict[str, Any]) -> None:
        self._add(record)
        self._writer.flush()  # a record is in the file at once, and an error of the writer's thread is raised here

    def _add(self, record: dict[str, Any]) -> None:
        by_step, by_samples = scalars(record)
        for axis, values in ((record["step"], by_step), (record.get("samples"), by_samples)):
            for tag, value in values.items() if type(axis) is int else ():
                self._writer.add_scalar(tag, value, axis)

    def examples(self, step: int, texts: dict[str, str]) -> None:
        try:
            for name, text in texts.items():
                plain = text.encode(errors="replace").decode()
                self._writer.add_text(f"{name} answer", "\n".join(f"    {line}" for line in plain.splitlines()), step)
        except OSError as error:  # a full disk costs a text, not the run
            say(f"the answers of step {step} are missing from TensorBoard ({error})", warning=True)

    def close(self, failed: bool) -> None:
        with suppress(OSError):  # which was said at the record that is not there
            self._writer.close()


def summary_writer() -> Any:
    """Return torch's class that writes event files. Raises UserError if tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "log.tensorboard needs the package tensorboard; run pip install 'dtgpt[tensorboard]', or use "
            "--log.tensorboard off"
        ) from None
    return SummaryWriter


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
