"""A byte-level BPE of the user's own text, trained by Hugging Face's `tokenizers`."""

import re
from collections.abc import Iterable

from dtgpt.data.tokenizers.bpe_files import letter_bytes
from dtgpt.util.errors import UserError

LONGEST_RUN = 2000  # characters
SMALLEST = 257  # 256 bytes and the end of text


def train_ranks(documents: Iterable[str], vocab_size: int) -> list[bytes]:
    """Return the bytes of each token by id, with GPT-2's pre-tokenization; at most `vocab_size` with the end of text,
    which is not among them. Raise UserError where that is too small or the package is missing."""
    if vocab_size < SMALLEST:
        raise UserError(f"data.bpe_vocab_size={vocab_size} is too small; a byte-level BPE needs {SMALLEST} or more")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError(
            "training a BPE needs the package tokenizers; run pip install 'dtgpt[data]', or use the tokenizer bytes, "
            "which needs no training (--data.tokenizer bytes of a run, --tokenizer bytes of dtgpt prepare)"
        ) from None
    trainable = Tokenizer(models.BPE())
    trainable.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainable.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    trainable.train_from_iterator((piece for d in documents for piece in _pieces(d)), trainer)
    # tokenizers numbers the 256 byte letters first and then the merges in their order: just tiktoken's ranks.
    letters = letter_bytes()
    by_id = sorted(trainable.get_vocab().items(), key=lambda item: item[1])
    return [bytes(letters[c] for c in token) for token, _ in by_id]


def _pieces(document: str) -> list[str]:
    """Yield the document for training, cut where one run of letters or blanks is so long that merging it would take
    hours."""
    if not re.search(rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}", document):
        return [document]
    return re.findall(rf"\s{{1,{LONGEST_RUN}}}\S{{0,{LONGEST_RUN}}}|\S{{1,{LONGEST_RUN}}}", document)
