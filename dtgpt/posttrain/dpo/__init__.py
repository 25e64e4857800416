"""Training on pairs of answers, of which one is preferred (DPO)."""
