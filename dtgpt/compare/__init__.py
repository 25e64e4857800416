"""What judges runs: steps of several plans compared, verdicts, the first tensor that differs, curves of two runs."""
