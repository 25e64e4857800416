"""Commands and scripts of Megatron-LM, nanoGPT and llm.c, read without running them, as recipes and commands of dtgpt.
Nothing here imports torch."""
