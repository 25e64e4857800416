"""Processes of a run that are started together, find each other, and end together when one of them is lost."""

import os

from dtgpt.util.seams import Capability


def follow_launcher() -> None:
    """Under torchrun, watch from now on whether torchrun still runs; another parent, such as a shell, may go and leave
    its children."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from dtgpt.liveness.orphans import follow_torchrun  # here, since every command begins with this question

        follow_torchrun()


CAPABILITY = Capability(
    peers=("dtgpt.liveness.torchrun:Torchrun",),
    launches=("dtgpt.liveness.launcher:LaunchOptions",),
    watches=("dtgpt.liveness:follow_launcher",),
)
