"""GSM8K (Cobbe et al. 2021): questions of grade-school arithmetic, with a reward for the right number."""

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

from dtgpt.evaluation.files import json_records, read_file
from dtgpt.ops.random.philox import fold_words
from dtgpt.posttrain.grpo.config import GrpoConfig, Message
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import PATH

SOURCE = "its train.jsonl is in github.com/openai/grade-school-math; name it with --grpo.path"
MARK = "####"  # before the result of an answer
ASK = f"Think step by step, and end with {MARK} and the number alone."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Problem(NamedTuple):
    question: str
    result: Decimal


@dataclass(frozen=True, kw_only=True)
class Gsm8k(GrpoConfig):
    """A question is asked once in each epoch, in another order in each. The reward of an answer is 1 where the number
    behind its last mark is right, or without a mark its last number, and else 0."""

    path: Annotated[str | None, "file of JSON lines with the keys question and answer, in the form of GSM8K", PATH] = (
        None
    )
    chat: Annotated[bool, "ask by the chat template of the model's tokenizer; off: as a text to go on with"] = True

    def prepare(self) -> None:
        self._problems  # noqa: B018

    def prompt(self, index: int) -> str | list[Message]:
        question = self._problem(index).question
        if self.chat:
            return [{"role": "user", "content": f"{question}\n{ASK}"}]
        return f"{ASK}\n\nQuestion: {question}\nAnswer:"

    def reward(self, index: int, answer: str) -> float:
        return float(result_of(answer) == self._problem(index).result)

    def _problem(self, index: int) -> Problem:
        epoch, place = divmod(index, len(self._problems))
        return self._problems[order(epoch, len(self._problems))[place]]

    @cached_property
    def _problems(self) -> list[Problem]:
        if self.path is None:
            raise UserError(f"grpo.path names no file of questions; {SOURCE}")
        found = []
        for entry in json_records(read_file(Path(self.path), SOURCE)):
            result = result_of(entry.field("answer", str, f"an answer that ends with {MARK} and a number"))
            if result is None:
                raise UserError(f'{entry.place} has an "answer" without a number; end it with {MARK} and the number')
            found.append(Problem(entry.field("question", str, "a question"), result))
        if not found:
            raise UserError(f"{self.path} has no question; {SOURCE}")
        return found


def result_of(answer: str) -> Decimal | None:
    """Return the number behind the last mark of an answer, or without a mark its last number; None where it has
    none."""
    _, mark, behind = answer.rpartition(MARK)
    numbers = NUMBER.findall(behind)
    return Decimal((numbers[0] if mark else numbers[-1]).replace(",", "")) if numbers else None


@lru_cache(2)
def order(epoch: int, count: int) -> list[int]:
    """Return the order in which an epoch asks `count` questions."""
    return sorted(range(count), key=lambda number: fold_words(1, "gsm8k", epoch, number))
