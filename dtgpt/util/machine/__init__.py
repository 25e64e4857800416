"""What is known of machines: their peak rates, and how the C library keeps memory."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    cpu_starts=("dtgpt.util.machine.machine:keep_freed_memory",),
    memory_errors=("dtgpt.util.machine.machine:memory_errors_as_user_errors",),
    peaks=("dtgpt.util.machine.machine:peak_flops",),
)
