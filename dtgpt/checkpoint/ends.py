"""The ids at which the texts of a model end. Most models come from files that name them, in a format which a capability
reads; the tokenizer's end of text is that of all others."""

from pathlib import Path
from typing import NamedTuple

from dtgpt.checkpoint.open import formats
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.gpt2 import GPT2_124M


class Ends(NamedTuple):
    """Ids at which texts end. `source`: what names them; None: nothing does. `ignored`: ids that the files name beside
    these, or in vain, and that the model does not have: nothing ever meets them."""

    ids: tuple[int, ...]
    source: str | None
    ignored: tuple[int, ...] = ()


def ends_of(path: Path | None, tokenizer: Tokenizer | None, vocab_size: int) -> Ends:
    """Return the ends of the model at `path`, of any format: what its files name, or those of the model that it came
    from. Where none does, it is the tokenizer's end of text, or that of GPT-2's own vocabulary. Raise UserError where a
    file names what is not an id."""
    found = [] if path is None else [form.ends(path) for form in formats()]
    source, named = next(filter(None, found), (None, []))
    ids = tuple(i for i in named if 0 <= i < vocab_size)
    ignored = tuple(i for i in named if i not in ids)
    if ids:
        return Ends(ids, source, ignored)
    if tokenizer is None and vocab_size == GPT2_124M.vocab_size:
        return Ends((vocab_size - 1,), "GPT-2's vocabulary", ignored)
    own = None if tokenizer is None or not tokenizer.spells else tokenizer.end_of_text
    return Ends((), None, ignored) if own is None else Ends((own,), "its tokenizer", ignored)
