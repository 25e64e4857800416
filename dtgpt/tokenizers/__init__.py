"""Text <-> ids: `tokenizer.py` is what a run carries with it, `vocabulary.py` whatever `dtgpt prepare` can read."""
