"""HellaSwag: which of four endings follows a context (Zellers et al. 2019), as llm.c and build-nanogpt measure it while
they train."""

from typing import Any, NamedTuple

import numpy as np

from dtgpt.data.text import paired
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.evaluation.batches import fitted
from dtgpt.evaluation.files import DataFile, Entry, json_records, lines_of
from dtgpt.evaluation.scoring import TokenScores
from dtgpt.evaluation.tasks import (
    Prepared,
    Result,
    Task,
    TaskOptions,
    mean_and_error,
    opened,
)
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown

SOURCE = (
    "HellaSwag's 10,042 items are data/hellaswag_val.jsonl of https://github.com/rowanz/hellaswag (lines of six, as in "
    "https://github.com/klosax/hellaswag_text_data, are read, too)"
)
ENDINGS = 4
LINES = ENDINGS + 2  # of an item in plain text: context, number of the right ending, endings


class Item(NamedTuple):
    """A context, its endings, and the number of the right one."""

    context: str
    endings: list[str]
    gold: int


def items_of(file: DataFile) -> list[Item]:
    """Return the items of JSON lines, or six lines of plain text each. Raise UserError for anything else."""
    if file.kind == "text" and not file.text.lstrip().startswith("{"):
        return _plain_items(file)
    return [_item(record) for record in json_records(file)]


def _item(record: Entry) -> Item:
    fields = record.fields
    endings = fields.get("endings")
    if not isinstance(endings, list) or len(endings) != ENDINGS or not all(isinstance(one, str) for one in endings):
        raise UserError(f'{record.place} has no list of {ENDINGS} texts under "endings"; give one there')
    if "ctx" in fields:
        context = record.field("ctx", str, "the context")
    else:
        context = paired(f"{record.field('ctx_a', str, 'the context')} {fields.get('ctx_b') or ''}".strip())
    return Item(context, list(map(paired, endings)), _gold(record.place, fields.get("label", fields.get("gold"))))


def _gold(place: str, label: Any) -> int:
    text = str(label).strip()
    if isinstance(label, bool) or not (len(text) == 1 and text in "0123"):
        raise UserError(
            f'{place} has the label {shown(label)}; give 0 to {ENDINGS - 1} under "label" (the test set has none: take '
            "the validation set)"
        )
    return int(text)


def _plain_items(file: DataFile) -> list[Item]:
    lines = list(lines_of(file))
    if len(lines) % LINES:
        raise UserError(
            f"{file.path} has {counted(len(lines), 'line')} of text, not items of {LINES}: context, "
            f"0 to {ENDINGS - 1}, {ENDINGS} endings; give JSON lines, or such items"
        )
    items = []
    for first in range(0, len(lines), LINES):
        (_, query), (label_place, label), *endings = lines[first : first + LINES]
        context = query.partition(": ")[2] or query
        gold = _gold(label_place, label)
        items.append(Item(context, [ending for _, ending in endings], gold))
    return items


def prepare(file: DataFile, tokenizer: Tokenizer, positions: int, options: TaskOptions) -> Prepared:
    """Return four samples for each item of a file, cut on the left to a model's positions, and what makes a result of
    their scores. Raise UserError where the file does not hold items."""
    items = items_of(file)[: options.limit]
    contexts = [opened(tokenizer.encode_prompt(item.context), tokenizer) for item in items]
    # Endings are encoded apart from the context, without what the tokenizer puts before every text.
    ends = [tokenizer.encode_bare(f" {ending}") for item in items for ending in item.endings]
    samples = [fitted(contexts[number // ENDINGS], end, positions) for number, end in enumerate(ends)]

    def measure(scores: list[TokenScores]) -> Result:
        sums = np.array([own.logprob for own in scores]).reshape(-1, ENDINGS)
        sizes = np.array([len(own.logprobs) for own in scores]).reshape(-1, ENDINGS)
        return _result(sums, np.maximum(sizes, 1), np.array([item.gold for item in items]))

    return Prepared(samples, measure)


def _result(sums: np.ndarray, sizes: np.ndarray, gold: np.ndarray) -> Result:
    """Return the accuracies of log-probabilities `[items, 4]`, whole and divided by sizes `[items, 4]`."""
    right = sums.argmax(axis=1) == gold
    right_by_size = (sums / sizes).argmax(axis=1) == gold
    (acc, error), (norm, norm_error) = (mean_and_error(found.tolist()) for found in (right, right_by_size))
    metrics = {"acc_norm": norm, "acc_norm_stderr": norm_error, "acc": acc, "acc_stderr": error}
    procedure = "llm.c and build-nanogpt: the likeliest of four endings; acc_norm by the log-probability per token"
    return Result("hellaswag", procedure, metrics, len(gold), "items")


TASK = Task("hellaswag", SOURCE, prepare)
