"""GELU with its bias, and linear maps with their bias gradients."""
