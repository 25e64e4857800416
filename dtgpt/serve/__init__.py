"""`dtgpt serve`: an HTTP server on one engine, for Megatron-LM's clients, OpenAI's clients and a web page."""
