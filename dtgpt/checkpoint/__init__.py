"""Save and resume: safetensors for tensors, JSON for the rest, no pickle. docs/checkpoints.md describes the format.

`save.Saver` writes in the background, `load.find_checkpoint` finds the newest whole one, `load.load_training` gives
every shard of any plan its part, `load.Saved` gives its weights to whatever takes a `Source`.
"""
