"""The command that belongs to no other capability: the recipes that come with dtgpt."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "recipe": CommandEntry(
            "dtgpt.commands.recipe:command",
            "dtgpt recipe [NAME]\n    print a recipe file that comes with dtgpt; without NAME, list them",
            place=150,
            usage_place=24,
        ),
    },
    explanations=("dtgpt.commands.recipe:EXPLANATIONS",),
)
