"""What capabilities share of models."""
