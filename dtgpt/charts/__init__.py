"""Curves of runs elsewhere than in metrics.jsonl: the loss plot, TensorBoard, Weights & Biases."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    observers=(
        "dtgpt.charts.observers:observe_by_wandb",
        "dtgpt.charts.observers:observe_by_tensorboard",
        "dtgpt.charts.observers:LossPlot",
    )
)
