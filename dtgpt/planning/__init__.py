"""What a plan needs, from shapes alone: memory, messages and idle time of `dtgpt plan`."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "plan": CommandEntry(
            "dtgpt.planning.command:command",
            "dtgpt plan RECIPE.py [--plan NAME] [--world N] [--gpu NAME]\n"
            "    show memory, messages and pipeline bubble of a plan; no GPU is needed",
            place=40,
        ),
    },
    memory_checks=("dtgpt.planning.memory_check:check_settings",),
    alternatives={
        "parse": "dtgpt.planning.alternatives:parse_alternatives",
        "choose": "dtgpt.planning.alternatives:choose_alternative",
    },
    plan_choices=("dtgpt.planning.auto:settle_plan",),
)
