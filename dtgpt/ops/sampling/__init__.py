"""Choosing the next token of each sequence from its logits, and scoring given tokens. Nothing leaves the device."""
