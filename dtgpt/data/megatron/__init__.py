"""Token files and sample order of Megatron-LM; token shards of llm.c and nanoGPT."""
