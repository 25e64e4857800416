"""In which values a run that goes on differs: from the recipe file, and from what it was before."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    kept_values=("dtgpt.run.differences.texts:say_kept",),
    changed_values=("dtgpt.run.differences.texts:changes_since",),
    kept_data=("dtgpt.run.differences.texts:check_data",),
)
