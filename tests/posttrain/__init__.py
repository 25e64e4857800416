"""Tests of `dtgpt.posttrain`."""
