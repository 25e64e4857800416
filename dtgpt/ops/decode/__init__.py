"""Decode steps in 16 bits on a GPU: transformer blocks for one token each of a few sequences."""
