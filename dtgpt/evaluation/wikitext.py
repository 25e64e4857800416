"""WikiText-103's perplexity (Merity et al. 2016) by Megatron-LM's procedure, which makes it comparable between
tokenizers (Shoeybi et al. 2019, appendix E.1)."""

import math
import re
from typing import NamedTuple

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.files import DataFile, json_records
from dtgpt.evaluation.scoring import TokenScores
from dtgpt.evaluation.tasks import Prepared, Result, Task, TaskOptions
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

SOURCE = (
    "WikiText-103's test set of 245,566 words is wiki.test.tokens of wikitext-103-v1 "
    "(https://huggingface.co/datasets/Salesforce/wikitext), as one text or a row a line"
)
BLANK_LINE = " \n"  # in WikiText; data sets that have a row a line have an empty row for it
OVERLAPPING_EVAL = 32  # tokens from one window to the next where an option does not say it, as in Megatron-LM
LARGEST_EXPONENT = 20  # of a perplexity by Megatron-LM's procedure

# What the detokenizer of Megatron-LM, and of lm-evaluation-harness, replaces, in this order (facts of both programs):
# texts by texts, and what stands between two signs by the same without blanks around it.
CONTRACTION = ("s '", "s'")
QUOTED_DIGIT = (re.compile(r"/' [0-9]/"), "/'[0-9]/")  # replaced by these very characters
NUMBERS = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
PUNCTUATION = tuple((f" {sign} ", f"{sign} ") for sign in ":;.!?,")
ENCLOSED = tuple(
    re.compile(rf"({re.escape(begin)})\s*([^{re.escape(end)}]*?)\s*({re.escape(end)})")
    for begin, end in ("()", "[]", "{}", '""', "''")
)
REST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \xb0 ", "\xb0"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Return WikiText's tokens as ordinary text."""
    text = text.replace(*CONTRACTION)
    text = QUOTED_DIGIT[0].sub(QUOTED_DIGIT[1], text)
    for before, after in (*NUMBERS, *PUNCTUATION):
        text = text.replace(before, after)
    for enclosed in ENCLOSED:
        text = enclosed.sub(r"\1\2\3", text)
    for before, after in REST:
        text = text.replace(before, after)
    return text


def whole_text(file: DataFile) -> str:
    """Return the text of a file: as it is, or that of its rows (`text`, or articles `page`), of which an empty one
    stands for a blank line."""
    if file.kind == "text":
        if file.text.startswith('"'):  # no WikiText does, but exports of the data set
            raise UserError(f"{file.path} begins with a quote, as CSV does, which is not read; write it as JSON lines")
        return file.text
    texts = [row.field("page" if "page" in row.fields else "text", str, "a text") for row in json_records(file)]
    if len(texts) == 1:
        return texts[0]
    return "".join(text if text.endswith("\n") else f"{text}\n" if text else BLANK_LINE for text in texts)


class Window(NamedTuple):
    """Part of a text of T tokens: ids from `first` up to `end`, of which those from `counted` on are predicted and
    counted."""

    first: int
    counted: int
    end: int


def overlapping_windows(tokens: int, positions: int, step: int | None) -> list[Window]:
    """Return Megatron-LM's windows of `positions` predictions, `step` tokens from one to the next (None: as many as
    there are positions): in all but the first, the last `step` predictions count alone. Windows may count nothing."""
    step = max(1, positions if step is None else step)
    count = max(1, math.ceil(max(tokens - 1 - step, 0) / step) + 1)
    windows = []
    for number in range(count):
        first = number * step
        skipped = max(0, positions - step) if number else 0
        windows.append(Window(first, first + 1 + skipped, min(first + positions + 1, tokens)))
    return windows


def prepare(file: DataFile, tokenizer: Tokenizer, positions: int, options: TaskOptions) -> Prepared:
    """Return the windows of a file, of a model's positions each, and what makes a result of their scores. Raise
    UserError where the file does not hold a text, or the windows would leave tokens out."""
    step = options.overlapping_eval
    step = min(OVERLAPPING_EVAL, positions) if step is None else step
    if step > positions:
        raise UserError(
            f"--overlapping-eval {step} leaves tokens out between windows of {positions}; use 1 to {positions}"
        )
    text = whole_text(file)
    words = len(text.strip().split(" "))
    ids = tokenizer.encode_prompt(detokenize(text))
    if len(ids) < 2 or words < 2:
        raise UserError(f"{file.path} has {counted(words, 'word')}, too few for a perplexity; give a longer text")
    windows = overlapping_windows(len(ids), positions, step)
    samples = [Sample(ids[first:end], counted - first) for first, counted, end in windows if counted < end]
    samples = samples[: options.limit]
    details = {"overlapping_eval": step, "words": words, "tokens": len(ids), "windows": len(windows)}

    def measure(scores: list[TokenScores]) -> Result:
        counted = sum(len(own.logprobs) for own in scores)  # T - 1, if there is no limit
        loss, ratio = -sum(own.logprob for own in scores) / counted, (len(ids) - 1) / (words - 1)
        ppl, adjusted = (math.exp(min(LARGEST_EXPONENT, exponent)) for exponent in (loss, loss * ratio))
        line = (
            f" validation results on WIKITEXT103 | avg loss: {loss:.4E} | ppl: {ppl:.4E} | "
            f"adjusted ppl: {adjusted:.4E} | token ratio: {ratio} |"
        )
        metrics = {"adjusted_ppl": adjusted, "ppl": ppl, "loss": loss, "token_ratio": ratio}
        procedure = f"Megatron-LM: windows of {positions} predictions, {step} tokens from one to the next"
        return Result("wikitext103", procedure, metrics, counted, "tokens", line, details)

    return Prepared(samples, measure)


TASK = Task("wikitext103", SOURCE, prepare)
