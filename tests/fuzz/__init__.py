"""Tests of `dtgpt.fuzz`."""
