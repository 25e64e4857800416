"""Batches that grow as a run begins."""

from typing import Annotated

from dtgpt.util.seams import Capability, When


class RecipeFields:
    rampup_batch_size: Annotated[
        str | None,
        "'START INCREMENT SAMPLES': begin with START samples a step and add INCREMENT at equal intervals, to reach "
        "global_batch_size after SAMPLES; none: no ramp-up",
    ] = None


CAPABILITY = Capability(
    recipe_fields=("dtgpt.config.rampup:RecipeFields",),
    # An empty text is asked, too: it is refused.
    rampups=(When("dtgpt.config.rampup.sizes:ramped", ("rampup_batch_size", "rampup_batch_size=")),),
)
