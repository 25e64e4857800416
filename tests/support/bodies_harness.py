"""Commands of the harness as the ranks of a plan: functions importable by name."""

import ast
import json
import os
from functools import partial
from pathlib import Path
from unittest import mock

import lm_eval.tasks

from dtgpt.evaluation.harness_command import command


def lm_eval_command(model: str, tasks: str, names: list[str], output: str, words: list[str]) -> int:
    """The exit code of `dtgpt lm-eval` on this rank. The harness reads its own 13,000 tasks for seconds, and asks pip
    for all packages, which is left out. A rank of a test may not start processes, which draw the bootstrap samples
    otherwise."""
    without = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    given = ["--tasks", ",".join(names), "--include_path", tasks, "--output_path", output, "--log_samples"]
    alone = mock.patch.dict(os.environ, DISABLE_MULTIPROC="1")
    quick = mock.patch("lm_eval.evaluator.add_env_info")
    with alone, quick, mock.patch("lm_eval.tasks.TaskManager", without):
        return command([model, *given, *words])


def saved_answers(output: Path) -> dict[str, list]:
    """What the model answered to each request of each task, in order, from the files of `--log_samples`, where numbers
    are texts."""
    found = {}
    for path in output.rglob("samples_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        name = path.name.removeprefix("samples_").rpartition("_")[0]
        ordered = [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
        found[name] = ordered if name == "local_generation" else numbers(ordered)
    return found


def numbers(value):
    return [numbers(one) for one in value] if isinstance(value, list) else ast.literal_eval(value)
