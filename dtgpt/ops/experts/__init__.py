"""Mixtures of experts: which experts a token goes through, rows sorted by expert, products of each expert's rows."""
