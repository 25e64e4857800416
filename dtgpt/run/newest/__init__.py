"""The newest run of a name, with which `--resume auto` goes on."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(newest_runs=("dtgpt.run.newest.run:NEWEST",))
