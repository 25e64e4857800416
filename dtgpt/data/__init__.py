"""Text and token files, tokenizers, and the samples of every step."""
