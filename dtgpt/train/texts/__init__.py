"""Texts that a run generates between its steps, for people to read how far a model is."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(observers=(When("dtgpt.train.texts.observer:Texts", ("log.sample_tokens",)),))
