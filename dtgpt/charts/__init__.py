"""Curves of runs elsewhere than in metrics.jsonl: the loss plot, TensorBoard, Weights & Biases."""

from dtgpt.util.seams import Capability, CommandEntry, When

CAPABILITY = Capability(
    commands={
        "plot": CommandEntry(
            "dtgpt.charts.command:command",
            "dtgpt plot RUN [RUN ...] [--output FILE.png]\n    draw the loss curves of runs into one picture",
            place=140,
        ),
    },
    observers=(
        When("dtgpt.charts.wandb:WandbObserver", ("wandb",)),
        When("dtgpt.charts.tensorboard:TensorBoardObserver", ("tensorboard",)),
        "dtgpt.charts.observers:LossPlot",
    ),
)
