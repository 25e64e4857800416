"""Commands beside training and generation that belong to no other capability: recipes, the machine."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "recipe": CommandEntry(
            "dtgpt.commands.recipe:command",
            "dtgpt recipe [NAME]\n    print a recipe file that comes with dtgpt; without NAME, list them",
            place=150,
            usage_place=24,
        ),
        "doctor": CommandEntry(
            "dtgpt.commands.doctor:command",
            "dtgpt doctor\n    check this machine: torch, GPUs, what they run, what is missing",
            place=160,
            usage_place=22,
        ),
    },
)
