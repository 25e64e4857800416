"""Curves of runs elsewhere than in metrics.jsonl: the loss plot, TensorBoard, and trackers of experiments."""

from dtgpt.util.seams import Capability, CommandEntry, When

CAPABILITY = Capability(
    commands={
        "plot": CommandEntry(
            "dtgpt.charts.command:command",
            "dtgpt plot RUN [RUN ...] [--output FILE.png]\n    draw the loss curves of runs into one picture",
            place=140,
        ),
    },
    sections={"trackers": "dtgpt.charts.config:TrackersConfig"},
    observers=(
        When("dtgpt.charts.wandb:WandbObserver", ("log.wandb",)),
        *(
            When(f"dtgpt.charts.{name}:{mode.title()}", (f"trackers.{name}={mode}",))
            for name in ("mlflow", "trackio", "comet")
            for mode in ("offline", "online")
        ),
        When("dtgpt.charts.tensorboard:TensorBoardObserver", ("log.tensorboard",)),
        "dtgpt.charts.observers:LossPlot",
    ),
)
