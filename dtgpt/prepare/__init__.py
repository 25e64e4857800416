"""Text files -> token files: `dtgpt prepare` and `dtgpt tokenizer train`.

`job.prepare` does it: `inputs.py` finds and cuts the files, `documents.py` reads what stands in them, `encode.py` makes
tokens in the processes of `pool.py`, and `dtgpt.data.indexed` writes them.
"""
