"""Output projection and cross-entropy, over a vocabulary that may be sharded."""
