"""Checkpoints that are written while training goes on."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(savers=("dtgpt.checkpoint.background.saver:BackgroundSaver",))
