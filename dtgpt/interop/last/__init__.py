"""A Hugging Face folder at the end of a run: RUN/hf."""
