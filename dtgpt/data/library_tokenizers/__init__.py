"""Tokenizers of Hugging Face, SentencePiece, tiktoken's files and nanoGPT."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    tokenizers=("dtgpt.data.library_tokenizers.format:LIBRARY_FILES",),
    tokenizer_kinds=dict.fromkeys(("bpe", "char", "gpt2"), "dtgpt.data.library_tokenizers.format:make"),
    saved_tokenizers=dict.fromkeys(
        ("characters", "ranks", "tokenizer_json", "sentencepiece"), "dtgpt.data.library_tokenizers.format:from_json"
    ),
    text_streams=("dtgpt.data.library_tokenizers.stream:DecodeWindow",),
)
