"""Curves of runs elsewhere than in metrics.jsonl: the loss plot, TensorBoard, and trackers of experiments."""

from typing import Annotated, Literal

from dtgpt.util.seams import Capability, CommandEntry, When


class LogFields:
    wandb: Annotated[Literal["off", "online", "offline"], "send metrics to Weights & Biases"] = "off"
    wandb_project: Annotated[str, "project of Weights & Biases"] = "dtgpt"
    tensorboard: Annotated[bool, "write metrics for TensorBoard into the run folder, by Megatron-LM's names"] = False


CAPABILITY = Capability(
    log_fields=("dtgpt.charts:LogFields",),
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
