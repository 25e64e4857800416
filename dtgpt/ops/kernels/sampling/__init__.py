"""Kernels that choose the next token of each sequence from its logits."""
