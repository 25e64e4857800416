"""Tokenizers of Hugging Face, SentencePiece and tiktoken's files, and the files in which transformers reads them."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(tokenizers=("dtgpt.data.library_tokenizers.format:LIBRARY_FILES",))
