"""Runs that end after a number of samples, and go on."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(sample_counts=("dtgpt.train.sample_counts.counts:SAMPLE_COUNTS",))
