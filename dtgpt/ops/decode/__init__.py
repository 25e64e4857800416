"""What decode steps need to know of a model."""
