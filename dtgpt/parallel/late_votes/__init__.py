"""Decisions of all ranks that do not wait for a GPU."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(late_votes=("dtgpt.parallel.late_votes.ballot:Ballot",))
