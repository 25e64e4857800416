"""The recipe's section of trackers. Weights & Biases has fields of the section `log`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from dtgpt.config.sections import Section
from dtgpt.util.rules import Changed, Missing, Rule, Rules

Mode = Literal["off", "offline", "online"]


@dataclass(frozen=True, kw_only=True)
class TrackersConfig(Section):
    mlflow: Annotated[Mode, "send metrics to MLflow; offline: RUN/mlflow; online: MLFLOW_TRACKING_URI"] = "off"
    trackio: Annotated[
        Mode, "send metrics to Trackio; offline: its own folder; online: TRACKIO_SPACE_ID or TRACKIO_SERVER_URL"
    ] = "off"
    comet: Annotated[Mode, "send metrics to Comet; offline: archives in RUN/comet, for comet upload"] = "off"
    project: Annotated[str, "project of these trackers, which is an experiment of MLflow"] = "dtgpt"
    recipe_rules: ClassVar[Rules] = (
        Rule(
            "trackers.project={trackers.project} has no effect without a tracker; add --trackers.mlflow, "
            "--trackers.trackio or --trackers.comet",
            Changed("trackers.project"),
            Missing("trackers.mlflow"),
            Missing("trackers.trackio"),
            Missing("trackers.comet"),
        ),
    )
