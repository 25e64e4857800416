"""Processes of a run that are started together, find each other, and end together when one of them is lost."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    peers=("dtgpt.liveness.torchrun:Torchrun",),
    launches=("dtgpt.liveness.launcher:LaunchOptions",),
    watches=("dtgpt.liveness.orphans:follow_launcher",),
)
