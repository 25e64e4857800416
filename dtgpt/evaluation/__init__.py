"""Evaluation of models on tasks with known answers."""

from dtgpt.util.seams import Capability, CommandEntry, When

CAPABILITY = Capability(
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
