"""Commands that need no model: recipes that come with dtgpt, and what this machine has."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "recipe": CommandEntry(
            "dtgpt.tools.recipe:command",
            "dtgpt recipe [NAME | --list]\n    print a recipe file that comes with dtgpt, or list them",
            place=24,
        ),
        "doctor": CommandEntry(
            "dtgpt.tools.doctor:command",
            "dtgpt doctor\n    check this machine: torch, GPUs, what they run, what is missing",
            place=22,
        ),
    },
    explanations=("dtgpt.tools.recipe:EXPLANATIONS",),
    near_paths=("dtgpt.tools.near_path:near_path",),
    foreign_models=("dtgpt.tools.foreign_models:explain",),
)
