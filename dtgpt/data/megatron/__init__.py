"""Token files and sample order of Megatron-LM; token shards of llm.c and nanoGPT."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    datasets=("dtgpt.data.megatron.format:TOKEN_FILES",),
    saved_tokenizers={"ids": "dtgpt.data.megatron.ids:from_json"},
)
