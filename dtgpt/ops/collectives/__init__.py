"""Collectives of large tensors through memory that the ranks of one host share."""
