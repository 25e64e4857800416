"""What several capabilities use, and the core does not."""
