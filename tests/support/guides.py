"""A guide of sequences by a rule that needs no library, and options that ask for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dtgpt.inference.options import Options
from dtgpt.ops.sampling.sequences import Variant

STEP = 5


class Countdown:
    """Token t of a text is t modulo STEP, and at least `first`; the text is complete behind `length` of them."""

    def __init__(self, vocab_size: int, length: int, first: int):
        self._size, self._length, self._first = vocab_size, length, first
        self._taken, self.ended = 0, False

    def allowed(self) -> Tensor:
        ids = torch.arange(-(-self._size // 32) * 32)
        bits = (ids % STEP == self._taken % STEP) & (ids >= self._first)
        words = (bits.view(-1, 32).long() << torch.arange(32)).sum(1)
        return words.to(torch.int32)  # the last bit is the sign

    def take(self, token: int) -> bool:
        fits = token >= self._first and token % STEP == self._taken % STEP
        self._taken += 1
        self.ended = self._taken == self._length
        return fits


@dataclass(frozen=True, kw_only=True)
class GuidedOptions(Options):
    guided_length: int = 6
    guided_vocabulary: int = 131
    guided_first: int = 0

    @property
    def is_guided(self) -> bool:
        return True

    @property
    def variant(self) -> Variant:
        return super().variant._replace(masks=True)

    def guide(self, job, tokenizer) -> Countdown:
        return Countdown(self.guided_vocabulary, self.guided_length, self.guided_first)
