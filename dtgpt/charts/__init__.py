"""Curves of runs elsewhere than in metrics.jsonl: the loss plot, TensorBoard, Weights & Biases."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "plot": CommandEntry(
            "dtgpt.commands.plot:command",
            "dtgpt plot RUN [RUN ...] [--output FILE.png]\n    draw the loss curves of runs into one picture",
            place=140,
        ),
    },
    observers=(
        "dtgpt.charts.observers:observe_by_wandb",
        "dtgpt.charts.observers:observe_by_tensorboard",
        "dtgpt.charts.observers:LossPlot",
    ),
)
