"""Checkpoints are held against what was written: digests, sizes, names, and entries of their kinds."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    verifications=("dtgpt.checkpoint.verification.verify:Verified",),
    entries={"interval_loss": "dtgpt.checkpoint.verification.entries:check_interval"},
)
