"""Evaluation of models on tasks with known answers."""

from typing import Annotated

from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Changed, Is, Rule, Rules
from dtgpt.util.seams import Capability, CommandEntry, When


class LogFields:
    eval_tasks: Annotated[
        str | None, "tasks to measure as dtgpt eval does, each with its file, as in 'hellaswag:FILE lambada:FILE'"
    ] = None
    eval_tasks_interval: Annotated[
        int | None,
        "number of steps between measurements of the tasks; 0: at the end only; none: eval_interval",
        Bounds(0),
    ] = None
    eval_tasks_limit: Annotated[int | None, "largest number of items to measure of a task; none: all", Bounds(1)] = None


NOTES: Rules = (
    Rule(
        "{field}={value} has no effect without log.eval_tasks",
        Changed("log.eval_tasks_interval", "log.eval_tasks_limit"),
        Is("log.eval_tasks", "==", None),
    ),
)
CAPABILITY = Capability(
    log_fields=("dtgpt.evaluation:LogFields",),
    recipe_notes=("dtgpt.evaluation:NOTES",),
    commands={
        "eval": CommandEntry(
            "dtgpt.evaluation.command:command",
            "dtgpt eval MODEL --task lambada|wikitext103|hellaswag --data FILE\n"
            "    measure a model on tasks with known answers",
            place=90,
        ),
        "lm-eval": CommandEntry(
            "dtgpt.evaluation.harness_command:command",
            "dtgpt lm-eval MODEL --tasks NAME[,NAME ...]\n    evaluate a model with lm-evaluation-harness",
            place=100,
        ),
    },
    # An empty text is asked, too: it is refused.
    observers=(When("dtgpt.evaluation.in_training:TaskEvaluation", ("log.eval_tasks", "log.eval_tasks=")),),
)
