"""Tokens that a run adds to the tokenizer and to the weights of a model."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    sections={"add_tokens": "dtgpt.posttrain.add_tokens.config:AddTokensConfig"},
    added_modules=("dtgpt.posttrain.add_tokens.rows:add_rows",),
    sources=("dtgpt.posttrain.add_tokens.checkpoints:ROWS",),
    tokenizers=("dtgpt.posttrain.add_tokens.format:WITH_TOKENS",),
)
