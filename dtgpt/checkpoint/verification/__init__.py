"""Checkpoints are held against what was written: digests, sizes, names, and entries of their kinds."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    verifications=("dtgpt.checkpoint.verification.verify:Verified",),
    entries={
        "empty_steps": "dtgpt.checkpoint.verification.entries:check_empty_steps",
        "interval_loss": "dtgpt.checkpoint.verification.entries:check_interval",
    },
)
