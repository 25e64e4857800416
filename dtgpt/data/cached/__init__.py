"""Tokens of texts, and orders of samples, which are computed once and kept in the cache."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(caches=("dtgpt.data.cached.text:keep_tokens",))
