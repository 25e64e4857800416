"""What is known of machines: what is installed, peak rates, how the C library keeps memory, threads under a limit."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={"--version": CommandEntry("dtgpt.util.machine.versions:command")},
    environments=("dtgpt.util.machine.versions:environment",),
    versions=("dtgpt.util.machine.versions:package_versions",),
    cpu_starts=("dtgpt.util.machine.machine:keep_freed_memory",),
    executors=("dtgpt.util.machine.threads:Threads",),
    memory_errors=("dtgpt.util.machine.machine:memory_errors_as_user_errors",),
)
