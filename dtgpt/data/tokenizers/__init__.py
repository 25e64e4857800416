"""Text <-> ids: `tokenizer.py` says what each can do, `byte_level.py` and `char.py` have two kinds, and `open.py` opens
one by the name or file that the user gives. Those of other packages are in `data/library_tokenizers/`."""
