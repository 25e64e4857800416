"""The ids at which the texts of a model end: those at which transformers' `generate` stops."""

from pathlib import Path
from typing import NamedTuple

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.hf.origin import OF_MODEL, read_origin
from dtgpt.models.gpt2 import GPT2_124M


class Ends(NamedTuple):
    """Ids at which texts end. `source`: what names them; None: nothing does. `ignored`: ids that the files name beside
    these, or in vain, and that the model does not have: transformers never meets them."""

    ids: tuple[int, ...]
    source: str | None
    ignored: tuple[int, ...] = ()


def ends_of(path: Path | None, tokenizer: Tokenizer | None, vocab_size: int) -> Ends:
    """Return the ends of the model at `path`, of any format: the `eos_token_id` of generation_config.json, or without
    this file that of config.json, in its folder or the one that it came from. Where transformers has no end, it is the
    tokenizer's end of text, or that of GPT-2's own vocabulary. Raise UserError where a file names what is not an
    id."""
    source, named = (None, []) if path is None else read_origin(path, OF_MODEL).ends()
    ids = tuple(i for i in named if 0 <= i < vocab_size)
    ignored = tuple(i for i in named if i not in ids)
    if ids:
        return Ends(ids, source, ignored)
    if tokenizer is None and vocab_size == GPT2_124M.vocab_size:
        return Ends((vocab_size - 1,), "GPT-2's vocabulary", ignored)
    own = None if tokenizer is None or not tokenizer.spells else tokenizer.end_of_text
    return Ends((), None, ignored) if own is None else Ends((own,), "its tokenizer", ignored)
