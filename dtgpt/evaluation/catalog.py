"""The tasks by name, and which of them is asked for, from which file."""

import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.evaluation import hellaswag, lambada, wikitext
from dtgpt.evaluation.files import DataFile, read_file
from dtgpt.evaluation.tasks import Prepared, Task, TaskOptions
from dtgpt.util.errors import UserError, shown_name

TASKS = {task.name: task for task in (lambada.TASK, wikitext.TASK, hellaswag.TASK)}
OF_ONE_TASK = {"strict": "lambada", "overlapping_eval": "wikitext103"}  # options


class Asked(NamedTuple):
    """A task to measure."""

    task: Task
    path: Path
    options: TaskOptions


def task_named(name: str) -> Task:
    """Return the task of a name; Megatron-LM writes it in capitals. Raise UserError for any other name."""
    if name.lower() in TASKS:
        return TASKS[name.lower()]
    near = difflib.get_close_matches(name.lower()[:99], TASKS, n=1)
    advice = f"did you mean {near[0]}?" if near else f"use {' or '.join(TASKS)}; dtgpt lm-eval knows others"
    raise UserError(f"there is no task {shown_name(name)}; {advice}")


def asked_for(names: Sequence[str], paths: Sequence[str], options: TaskOptions) -> list[Asked]:
    """Return the tasks with these names and files, in pairs. Raise UserError where they, or the options, do not go
    together."""
    tasks = [task_named(name) for name in names]
    if not tasks:
        raise UserError(f"no task is given; add --task {'|'.join(TASKS)} and --data FILE")
    if not paths:
        raise UserError(f"--task {tasks[0].name} needs --data FILE; {tasks[0].source}")
    if len(tasks) != len(paths):
        raise UserError(
            f"--task has {len(tasks)} names and --data {len(paths)} files; give a file for each task, in its order"
        )
    for name, owner in OF_ONE_TASK.items():
        if getattr(options, name) not in (None, False) and all(task.name != owner for task in tasks):
            raise UserError(
                f"--{name.replace('_', '-')} belongs to the task {owner}, which is not asked for; leave it out"
            )
    return [Asked(task, Path(path), options) for task, path in zip(tasks, paths, strict=True)]


def tasks_and_files(words: str, options: TaskOptions) -> list[Asked]:
    """Return what `hellaswag:FILE lambada:FILE` asks for; quotes hold blanks in a path. Raise UserError for any other
    text."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise UserError(f"{shown_name(words)} is not a list of tasks ({error}); close the quotes") from None
    pairs = [part.partition(":") for part in parts]
    for part, (_, colon, path) in zip(parts, pairs, strict=True):
        if not colon or not path:
            raise UserError(
                f"{shown_name(part)} is not a task with its file; give such as hellaswag:hellaswag_val.jsonl"
            )
    return asked_for([name for name, _, _ in pairs], [path for _, _, path in pairs], options)


def prepare(asked: Asked, tokenizer: Tokenizer, positions: int) -> tuple[DataFile, Prepared]:
    """Read the file of a task, and return it with the samples for a model of so many positions. Raise UserError where
    that cannot be done."""
    if not tokenizer.spells:
        raise UserError(f"the tokenizer {tokenizer.name} does not encode text; give the one of the model")
    file = read_file(asked.path, asked.task.source)
    prepared = asked.task.prepare(file, tokenizer, positions, asked.options)
    if not prepared.samples:
        raise UserError(f"{asked.path} has nothing to measure; {asked.task.source}")
    return file, prepared
