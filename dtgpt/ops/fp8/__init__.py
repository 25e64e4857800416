"""Matrix products of 8-bit floats: quantisation by scales that are powers of two, and the products."""
