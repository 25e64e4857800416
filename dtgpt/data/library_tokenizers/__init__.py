"""Tokenizers of Hugging Face, SentencePiece, tiktoken's files and nanoGPT."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    tokenizers=("dtgpt.data.library_tokenizers.format:LIBRARY_FILES",),
    text_streams=("dtgpt.data.library_tokenizers.stream:DecodeWindow",),
)
