"""A sequence that keeps to a grammar: llguidance says after each token which ones may follow."""

import re
from typing import Any

import torch
from torch import Tensor

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.grammar.vocabulary import compiled, set_bits, vocabulary_of
from dtgpt.inference.prompts import text_stream
from dtgpt.util.errors import UserError


class GrammarGuide:
    """Follows one sequence. Where its options say so, a text comes first that may be anything, such as a thought."""

    def __init__(self, job: Any, tokenizer: Tokenizer | None):
        """Raise UserError for a grammar that cannot be kept to, or without a tokenizer that spells texts."""
        if tokenizer is None or not tokenizer.spells:
            raise UserError("json_schema is for texts, and this model's tokens have none; leave it out")
        options = job.options
        self._tokenizer, self._vocabulary = tokenizer, vocabulary_of(tokenizer)
        self._matcher = compiled(tokenizer, options.json_schema, options.grammar).deep_copy()
        self._ends = options.end_ids(job.special)
        self._until = re.compile(options.free_until)
        named = tokenizer.encode_bare(options.free_from) if options.free_from else []
        self._from = named if len(named) == 1 else []  # the token that may begin the free text
        self._free = bool(options.free_until) and not options.free_from
        self._text, self._stream = "", text_stream(tokenizer, job.ids)
        self.ended = False

    def allowed(self) -> Tensor:
        if self._free:  # an end here would be one without an answer
            return torch.from_numpy(self._vocabulary.all_but(self._ends))
        words = self._vocabulary.words(self._matcher, self._ends)
        set_bits(words, self._from)
        return torch.from_numpy(words)

    def take(self, token: int) -> bool:
        if token in self._from:
            self._free, self._from = True, []
            return True
        self._from = []
        if not self._free:
            return self._consume([token])
        self._text += self._stream.extend([token])
        if (found := self._until.search(self._text)) is None:
            return True
        self._free = False
        return self._consume(self._tokenizer.encode_bare(self._text[found.end() :].lstrip()))

    def _consume(self, tokens: list[int]) -> bool:
        if not self._matcher.consume_tokens(tokens):
            return False
        self.ended = self._matcher.is_stopped()
        return True
