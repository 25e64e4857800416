"""Kernels of attention: which serves when is in `serve.py`."""
