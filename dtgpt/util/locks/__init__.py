"""Locks on files, by which no two processes write to the same folder."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(locks=("dtgpt.util.locks.lock:Flock",))
