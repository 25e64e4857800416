"""Mixtures of experts: the modules and config fields that families share whose MLPs are many, of which each token goes
through a few."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability()
