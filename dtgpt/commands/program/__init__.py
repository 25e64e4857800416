"""What a shell, a container and torchrun expect of a program, beside an exit code."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    program_starts=(
        "dtgpt.commands.program.start:interrupt_imports",
        "dtgpt.commands.program.start:check_current_folder",
    ),
    watches=("dtgpt.commands.program.start:name_user",),
    failures=("dtgpt.commands.program.start:hand_to_torchrun",),
)
