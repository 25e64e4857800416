"""Signals, and limits in minutes or steps, end a run after a step, with a checkpoint."""

from typing import Annotated

from dtgpt.util.field_types import Bounds
from dtgpt.util.seams import Capability, When


class RecipeFields:
    exit_after: Annotated[float | None, "minutes until the run saves and ends; none: no limit", Bounds(above=0)] = None
    exit_interval: Annotated[
        int | None, "save and end after the next step that is a multiple of this; 0 or none: do not", Bounds(0)
    ] = None


CAPABILITY = Capability(
    recipe_fields=("dtgpt.run.stops:RecipeFields",),
    stops=(
        "dtgpt.run.stops.signals:Signals",
        When("dtgpt.run.stops.limits:Limits", ("exit_after", "exit_interval")),
    ),
)
