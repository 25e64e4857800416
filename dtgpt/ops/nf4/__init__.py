"""Matrices of 4 bits with scales of 8 bits, and products with them."""
