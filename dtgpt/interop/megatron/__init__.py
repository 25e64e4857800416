"""Checkpoints of Megatron-LM: any TP x PP, read and written."""
