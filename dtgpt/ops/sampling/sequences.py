"""What sampling reads and returns: the state of sequences in tensors, one row a slot, and the layout of parameters.

The parameters of a sequence are one row of int64 numbers, so that they travel between ranks and to the device in one
piece. Floats are in it as the bit patterns of float64.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

MOST_BIASES = 300  # ids in a logit bias, as OpenAI's API
MOST_STOPS = 64  # ids that a request may end at
MOST_ENDS = 64  # ids that end the texts of a model
MOST_ENDINGS = MOST_STOPS + MOST_ENDS
NONE = -1  # where an id would be
IDS = ("colon", "newline", "paired_newline")  # fields of `Integers`

T = TypeVar("T")


class Integers(NamedTuple, Generic[T]):
    """The whole numbers among the parameters of a sequence."""

    prompt_length: T
    key_0: T  # the two words of the key of its draws
    key_1: T
    top_k: T  # 0: all
    ngram: T  # tokens in an n-gram that must not repeat; 0: may repeat
    min_new_tokens: T
    colon: T  # NONE, or the id after which `newline` is banned
    newline: T
    paired_newline: T  # NONE, or the id that ends the sequence where it follows itself


class Floats(NamedTuple, Generic[T]):
    """The real numbers among the parameters of a sequence."""

    temperature: T  # 0: the likeliest token
    top_p: T  # 0 or 1: all
    top_p_decay: T
    top_p_bound: T
    min_p: T  # 0: all
    frequency_penalty: T
    presence_penalty: T
    repetition_penalty: T  # 0 or 1: none


SIZES = (len(Integers._fields), len(Floats._fields), MOST_BIASES, MOST_BIASES, MOST_ENDINGS)
PARAMETERS = sum(SIZES)  # numbers in a row


class Parameters(NamedTuple):
    """Rows of parameters, unpacked."""

    integers: Integers[Tensor]  # int64 [B] each
    floats: Floats[Tensor]  # float64 [B] each
    bias_ids: Tensor  # int64 [B, MOST_BIASES]; entries that are not in use have id 0 and value 0
    bias_values: Tensor  # float64 [B, MOST_BIASES]
    endings: Tensor  # int64 [B, MOST_ENDINGS]: banned before min_new_tokens; NONE where not in use


class Sequences(NamedTuple):
    """The state of all sequences. The leading dimension S has one row a slot; P is the number of positions."""

    token: Tensor  # int64 [S], the last token, whose logits come next
    position: Tensor  # int64 [S], that of `token`
    history: Tensor  # int64 [S, P], all tokens up to `position`; what is behind has no meaning
    parameters: Tensor  # int64 [S, PARAMETERS]
    allowed: Tensor  # int32 [S, W], read by masks: bit i % 32 of word i // 32 says whether id i may come next


class Variant(NamedTuple):
    """What a step must be able to do for some of its rows. A row that does not need a rule gets the same token with and
    without it."""

    filters: bool = False  # top-k, top-p, min-p
    edits: bool = False  # colon rule, logit bias, penalties, bans of endings
    ngram: int = 0  # longest n-gram that must not repeat, rounded up to a power of two; 0: none
    alternatives: int = 0  # likeliest ids to return
    candidates: bool = False  # nothing is drawn, and alternatives are the likeliest after all rules
    masks: bool = False  # the host says which ids may come next


class Sampled(NamedTuple):
    """The chosen tokens of B rows."""

    tokens: Tensor  # int64 [B]
    logprobs: Tensor  # fp32 [B], of the unfiltered distribution at temperature 1
    top_ids: Tensor  # int64 [B, alternatives], the likeliest of that distribution, best first, smallest id among equals
    top_logprobs: Tensor  # fp32 [B, alternatives]; for beams changed as the rules change logits: -inf where banned


def _bits(values: Sequence[float]) -> list[int]:
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()


def _padded(values: Sequence[int], size: int, filler: int) -> list[int]:
    if len(values) > size:
        raise ValueError(f"{len(values)} values do not fit into {size} places")
    return [*values, *[filler] * (size - len(values))]


def pack(numbers: Mapping[str, float], bias: Mapping[int, float], endings: Sequence[int]) -> Tensor:
    """Return a row of parameters: int64 `[PARAMETERS]`. numbers: by the names of `Integers` and `Floats`; those that
    are left out change nothing. Raises ValueError for more biases or endings than fit."""
    integers = [numbers.get(name, NONE if name in IDS else 0) for name in Integers._fields]
    floats = [numbers.get(name, 0.0) for name in Floats._fields]
    ids = _padded(list(bias), MOST_BIASES, 0)
    values = _padded(_bits(list(bias.values())), MOST_BIASES, 0)
    return torch.tensor([*integers, *_bits(floats), *ids, *values, *_padded(endings, MOST_ENDINGS, NONE)])


def unpack(rows: Tensor) -> Parameters:
    """Return the parameters of rows int64 `[B, PARAMETERS]`."""
    integers, floats, bias_ids, bias_values, endings = rows.split(SIZES, dim=1)
    return Parameters(
        Integers(*integers.unbind(1)),
        Floats(*floats.view(torch.float64).unbind(1)),
        bias_ids,
        bias_values.view(torch.float64),
        endings,
    )
