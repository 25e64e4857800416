"""Matrix products of 8-bit floats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning")."""
