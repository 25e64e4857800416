"""Training: the loop, the trainer, startup, evaluation, and the comparison of plans."""
