"""`dtgpt doctor`: whether this machine has what dtgpt needs."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "doctor": CommandEntry(
            "dtgpt.doctor.command:command",
            "dtgpt doctor\n    check this machine: torch, GPUs, what they run, what is missing",
            place=160,
            usage_place=22,
        ),
    },
)
