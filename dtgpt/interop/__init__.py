"""Models of Hugging Face, Megatron-LM, nanoGPT and llm.c, read tensor by tensor and written."""
