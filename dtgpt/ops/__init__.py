"""Operations: each has a reference in plain PyTorch and a kernel with the same result up to rounding."""
