"""The recipe.json of a run that goes on: as older versions wrote it, and held against the fields of today."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    older_recipes=("dtgpt.run.older_recipes.values:translate",),
    saved_recipes=("dtgpt.run.older_recipes.checks:checked_values",),
)
