"""Tests of `dtgpt.compare`."""
