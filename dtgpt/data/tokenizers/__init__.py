"""Text <-> ids: `tokenizer.py` says what each can do and has byte-level BPE, `libraries.py` those of other packages;
`open.py` opens one by the name or file that the user gives, and `char.py` has characters."""
