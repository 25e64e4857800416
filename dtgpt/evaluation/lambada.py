"""LAMBADA: the last word of a passage (Paperno et al. 2016), by Megatron-LM's procedure."""

import math

import numpy as np

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.evaluation.batches import fitted
from dtgpt.evaluation.files import DataFile, json_records, lines_of
from dtgpt.evaluation.scoring import TokenScores
from dtgpt.evaluation.tasks import (
    Prepared,
    Result,
    Task,
    TaskOptions,
    mean_and_error,
    opened,
)
from dtgpt.util.errors import UserError

SOURCE = (
    "LAMBADA's 5,153 passages are lambada_test.jsonl of https://github.com/cybertronai/bflm, the file that "
    "Megatron-LM's documentation names"
)


def passages(file: DataFile) -> list[tuple[str, str]]:
    """Return where it stands, and the text, of each passage: `text` of JSON lines, or a line of plain text."""
    if file.kind == "text" and not file.text.lstrip().startswith("{"):
        found = list(lines_of(file))
    else:
        found = [(record.place, record.field("text", str, "a passage")) for record in json_records(file)]
    for place, text in found:
        if not text.split():
            raise UserError(f"{place} has no word to predict; give a passage there")
    return found


def word_ids(texts: list[str], tokenizer: Tokenizer, strict: bool) -> list[tuple[list[int], list[int]]]:
    """Return the ids of context and target of each passage, as Megatron-LM makes them (tasks/zeroshot_gpt).

    strict: the target is the last word after a blank, encoded apart from the context before it; else it is the last
    token of the passage.
    """
    if not strict:
        return [(ids[:-1], ids[-1:]) for ids in map(tokenizer.encode_prompt, texts)]
    words = [text.split()[-1] for text in texts]
    before = [text[: text.rindex(word)].strip() for text, word in zip(texts, words, strict=True)]
    targets = [tokenizer.encode_bare(f" {word}") for word in words]
    return list(zip(map(tokenizer.encode_prompt, before), targets, strict=True))


def prepare(file: DataFile, tokenizer: Tokenizer, positions: int, options: TaskOptions) -> Prepared:
    """Return a sample for each passage of a file, cut on the left to a model's positions, and what makes a result of
    their scores. Raise UserError where the file does not hold passages."""
    texts = [text for _, text in passages(file)][: options.limit]
    samples = [
        fitted(opened(context, tokenizer), target, positions)
        for context, target in word_ids(texts, tokenizer, options.strict)
    ]
    return Prepared(samples, lambda scores: _result(scores, options.strict))


def _result(scores: list[TokenScores], strict: bool) -> Result:
    correct, total = sum(own.all_greedy for own in scores), len(scores)
    accuracy = correct / total
    line = (
        f" validation results on LAMBADA | number correct: {correct:.4E} | total examples: {total:.4E} | "
        f"avg accuracy: {accuracy:.4E}"
    )
    metrics = {"acc": accuracy, "acc_stderr": mean_and_error([own.all_greedy for own in scores])[1]}
    metrics |= {"correct": correct, "ppl": perplexity(scores)}
    target = "the last word, context and word encoded apart" if strict else "the last token"
    procedure = f"Megatron-LM, {'strict' if strict else 'not strict'}: {target}, is the likeliest"
    return Result("lambada", procedure, metrics, total, "passages", line, {"strict": strict})


def perplexity(scores: list[TokenScores]) -> float:
    """Return e to the mean negative log-probability of whole targets; infinity where that overflows."""
    try:
        return math.exp(-float(np.mean([own.logprob for own in scores])))
    except OverflowError:
        return math.inf


TASK = Task("lambada", SOURCE, prepare)
