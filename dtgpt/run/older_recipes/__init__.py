"""Values that older versions of dtgpt wrote into recipe.json in another way."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(older_recipes=("dtgpt.run.older_recipes.values:translate",))
