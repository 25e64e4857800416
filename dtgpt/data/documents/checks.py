"""What data cannot be where their documents are kept apart."""

from typing import TYPE_CHECKING

import torch

from dtgpt.data.dataset import Dataset
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Given, Is, Rule, Rules, check_rules

if TYPE_CHECKING:
    from dtgpt.data.documents import DataFields

LOOKED_AT = 64  # samples that are read at a time
END_RULES: Rules = (  # known: the tokenizer of the data
    Rule(
        "data.{field}=on needs an end of text between documents, which the tokenizer {known.name} does not have; leave "
        "it out",
        Given("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        Is("known.end_of_text", "==", None),
    ),
)


def check(data: "DataFields", dataset: Dataset, samples: int, seq_length: int, seed: int) -> None:
    """Raise UserError for an option about documents where the tokenizer has no end of text between them, or where no
    token of so many samples counts."""
    check_rules(END_RULES, data, known=dataset.tokenizer)
    if data.eod_mask_loss:
        check_counted(dataset, samples, seq_length, seed)


def check_counted(dataset: Dataset, samples: int, seq_length: int, seed: int) -> None:
    """Raise UserError where all tokens of so many samples are ends of text, after which nothing counts."""
    end = dataset.tokenizer.end_of_text
    assert end is not None  # the rules have refused the option for other tokenizers
    key = fold(root_key(seed), "data")
    for first in range(0, samples, LOOKED_AT):  # of which the first ones say so for nearly all texts
        windows = dataset.windows(torch.arange(first, min(first + LOOKED_AT, samples)), seq_length, key)
        if windows[:, :-1].ne(end).any():
            return
    raise UserError(
        f"all tokens of {dataset.source} are ends of text, after which data.eod_mask_loss lets nothing count; leave it "
        "out, or give another text"
    )
