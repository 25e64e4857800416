"""`dtgpt eval`: measure a model on LAMBADA, WikiText-103 and HellaSwag."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import dtgpt
from dtgpt.checkpoint.load import Saved
from dtgpt.commands.command import Command
from dtgpt.commands.model_options import Addend, OpenOptions, open_as_asked
from dtgpt.config.plan import Plan
from dtgpt.evaluation.catalog import Asked, asked_for, prepare
from dtgpt.evaluation.files import DataFile
from dtgpt.evaluation.report import Measured, as_json, megatron_lines, table, task_lines
from dtgpt.evaluation.scoring import Scorer, scorer_of
from dtgpt.evaluation.tasks import Prepared, TaskOptions
from dtgpt.inference.commands import told_by_rank_0
from dtgpt.inference.model import Model
from dtgpt.interop.inspect import model_digest
from dtgpt.models.source import Source
from dtgpt.posttrain.lora.checkpoint import Merged
from dtgpt.tools.progress import ProgressLines
from dtgpt.tools.results import check_output, write_results
from dtgpt.util.console import counted, say
from dtgpt.util.field_types import PATH, Bounds
from dtgpt.util.hardware import memory_errors_as_user_errors
from dtgpt.util.machine.threads import Threads
from dtgpt.util.shared.device_words import device_name
from dtgpt.util.shared.words import duration


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What is measured, and where results go."""

    task: Annotated[tuple[str, ...], "lambada, wikitext103 or hellaswag; several are measured in turn"] = ()
    data: Annotated[tuple[str, ...], "file of each task, in the order of the tasks"] = ()
    strict: Annotated[bool, "lambada: predict the whole last word, not its last token alone"] = False
    overlapping_eval: Annotated[
        int | None, "wikitext103: tokens from one window to the next; none: 32, as Megatron-LM", Bounds(1)
    ] = None
    limit: Annotated[int | None, "measure only the first passages, windows or items; none: all", Bounds(1)] = None
    output: Annotated[str, "file for the results as JSON, replaced when they are complete", PATH] = "eval.json"
    batch_tokens: Annotated[
        int | None, "tokens of a batch, padding included; none: as many as keep the device busy", Bounds(1)
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvalOptions(OpenOptions, Measurements):  # fields are listed from the last base on
    """Measure a model on tasks with known answers. MODEL is a run folder, whose newest checkpoint is used, or any model
    that `dtgpt convert` reads. Under torchrun, the processes share the work by a plan.

    lambada      accuracy of the last word, as Megatron-LM measures it
    wikitext103  perplexity of the whole text, as Megatron-LM measures it
    hellaswag    accuracy in choosing one of four endings, as llm.c measures it while it trains

    dtgpt lm-eval has the procedures of lm-evaluation-harness. Each task needs a file: JSON lines or plain text,
    compressed or not."""

    headings: ClassVar[dict[str, str]] = {  # in `--help`, from the named field on
        "task": "tasks and results",
        "plan": "execution",
        "tokenizer": "tokenizer",
        "adapter": "execution",
    }

    plan: Annotated[
        str | None, "parallel plan, such as tp2_pp2; none: a replica in each process that torchrun started"
    ] = None
    adapter: Addend = None


@memory_errors_as_user_errors("use smaller batches (--batch-tokens)")
def evaluate(path: Path, options: EvalOptions) -> None:
    how = TaskOptions(strict=options.strict, overlapping_eval=options.overlapping_eval, limit=options.limit)
    asked, output = asked_for(options.task, options.data, how), Path(options.output)
    check_output(output, "--output", "eval.json", [one.path for one in asked])
    source, settings, mesh, tokenizer = open_as_asked(path, options, Plan() if options.plan is None else None)
    positions = settings.model.seq_length
    _, kept = told_by_rank_0(mesh, lambda: (None, [prepare(one, tokenizer, positions) for one in asked]))
    prepared = kept[0] if kept else []
    scorer = scorer_of(
        Model.read(source, settings, mesh, path, tokenizer=tokenizer, exact=options.exact), options.batch_tokens
    )
    with Threads(1) as threads:  # a digest takes seconds, in which the device works
        digest = threads.submit(model_digest, source) if mesh.rank == 0 else None
        measured = measure(scorer, asked, prepared)
        if digest is not None:
            described = describe_model(path, options.adapter, source, positions, digest.result())
    if mesh.rank == 0:
        show(measured)
        results = {
            "dtgpt": dtgpt.__version__,
            "model": described,
            "tokenizer": tokenizer.name,
            "plan": mesh.plan.name,
            "processes": mesh.world,
            "device": device_name(mesh.device),
            "precision": str(settings.dtype).removeprefix("torch."),
            "results": list(map(as_json, measured)),
        }
        write_results(output, "--output", results)


def measure(scorer: Scorer, asked: Sequence[Asked], prepared: Sequence[tuple[DataFile, Prepared]]) -> list[Measured]:
    """Score the tasks in turn, and return their results on rank 0, which alone has what was `prepared`; nothing on the
    other ranks."""
    measured = []
    for number, one in enumerate(asked):
        begin = time.perf_counter()
        if scorer.mesh.rank:
            scorer.score(None)
            continue
        file, (samples, to_result) = prepared[number]
        progress = SampleProgress(one.task.name, len(samples), scorer.mesh.plan.dp)
        scores = scorer.score(samples, progress.add)
        progress.finish()
        if scores is not None:
            measured.append(Measured(one, file, to_result(scores), time.perf_counter() - begin))
    return measured


def show(measured: Sequence[Measured]) -> None:
    """Print what Megatron-LM prints of the tasks that it has, a table of all, and how each was measured."""
    for one in measured:
        if one.result.line is not None:
            say(megatron_lines(one.result.line))
    say(table([one.result for one in measured]))
    for one in measured:
        say(task_lines(one))


def describe_model(path: Path, adapter: str | None, source: Source, positions: int, digest: str) -> dict[str, Any]:
    """Return what a file of results says of its model. Where adapters are merged into it, the checkpoint is theirs."""
    config = source.config
    described: dict[str, Any] = {"path": str(path), "sha256": digest, "parameters": config.num_parameters}
    described |= {"architecture": config.architecture, "positions": positions}
    if adapter is not None:
        described["adapter"] = adapter
    if isinstance(source, Saved | Merged) and (checkpoint := source.checkpoint) is not None:
        described |= {"checkpoint": str(checkpoint.folder), "step": checkpoint.state.get("step")}
    return described


class SampleProgress(ProgressLines):
    """Lines of progress of a task."""

    def __init__(self, name: str, samples: int, replicas: int):
        """replicas: of the model, each of which scores its part of the samples; `add` counts those of one."""
        super().__init__()
        self._name, self._samples, self._replicas, self._done = name, samples, replicas, 0

    def add(self, samples: int) -> None:
        """Count samples that are done."""
        self._done = min(self._samples, self._done + samples * self._replicas)
        self.say_at_times(self._state)

    def finish(self) -> None:
        """Report the end."""
        self._done = self._samples
        self.say(self._state())

    def _state(self) -> str:
        text = f"{self._name}: {self._done:,}/{counted(self._samples, 'sample')} in {duration(self.seconds)}"
        if self._done < self._samples:
            text += f", {duration(self.seconds * (self._samples - self._done) / max(self._done, 1))} left"
        return text


command = Command(
    "eval MODEL",
    EvalOptions,
    evaluate,
    "runs/gpt2_tiny-001 --task lambada --data lambada_test.jsonl",
    aliases={"valid_data": "data", "strict_lambada": "strict", "tasks": "task"},
)
