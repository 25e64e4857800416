"""The answer of OpenAI's completions, as a whole and as events of a stream."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.request import Completion, SequenceUpdate
from dtgpt.serve.openai_logprobs import Logprobs, TokenNames
from dtgpt.serve.openai_request import CompletionRequest

DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(separators=(",", ":"))


class CompletionAnswer:
    """What the whole answer and every event of a stream have in common."""

    def __init__(self, asked: CompletionRequest, model: str, tokenizer: Tokenizer | None, names: TokenNames):
        self.asked, self._tokenizer, self._names = asked, tokenizer, names
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}

    def whole(self, completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Return the answer from the sequences of each job."""
        asked = self.asked
        choices = [
            self.form(Choice(self, job, rank).take(found, found.text or "", found.finish_reason))
            for job, sequences in enumerate(completions)
            for rank, found in enumerate(best(sequences, asked.n))
        ]
        return {**self._head, "choices": choices, "usage": self.usage(_new_tokens(completions))}

    def stream(self) -> "CompletionStream":
        """Return what makes the events of an answer that is sent as it is generated."""
        return CompletionStream(self)

    def tokens(self, found: Sequence[Sequence[Completion]]) -> int:
        """Return the number of tokens that the whole answer has, about."""
        prompt = self.asked.prompt_tokens * self.asked.n if self.asked.echo else 0
        return prompt + _new_tokens(found)

    def form(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return an entry of `choices` in the form of this kind of answer."""
        return choice

    def logprobs(self, job: int) -> Logprobs | None:
        """Return what the log-probabilities of a choice are made by; None: nobody asks for them."""
        asked = self.asked
        if asked.logprobs is None:
            return None
        return Logprobs(self._names, self._tokenizer, asked.prompts[job], asked.echo)

    def usage(self, new_tokens: int) -> dict[str, int]:
        """Return the numbers of tokens. Those of sequences that `best_of` drops count: they were generated."""
        prompt = self.asked.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new_tokens, "total_tokens": prompt + new_tokens}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        """Return an event of a stream."""
        fields = {**self._head, "choices": choices}
        if self.asked.include_usage:
            fields["usage"] = usage
        return b"data: " + ENCODER.encode(fields).encode() + b"\n\n"


class CompletionStream:
    """The events of an answer that is sent as it is generated."""

    def __init__(self, answer: CompletionAnswer):
        self._answer, asked = answer, answer.asked
        self._choices = [Choice(answer, job, rank) for job in range(len(asked.jobs)) for rank in range(asked.n)]
        self._new_tokens = 0
        self.opening = answer.tokens([])

    def events(self, updates: Sequence[SequenceUpdate]) -> bytes:
        """Return the events for what a round has added, one for each choice."""
        events = []
        for update in updates:
            self._new_tokens += len(update.ids)
            choice = self._choices[update.job * self._answer.asked.n + update.choice]
            entry = choice.take(update, update.text, update.finish)
            if choice.has_news(entry):
                events.append(self._answer.event([self._answer.form(entry)]))
        return b"".join(events)

    def end(self) -> bytes:
        """Return what ends a complete answer."""
        if not self._answer.asked.include_usage:
            return DONE
        return self._answer.event([], self._answer.usage(self._new_tokens)) + DONE


class Choice:
    """One sequence of an answer, whose parts are taken as they arrive: several of a stream, one of a whole answer."""

    def __init__(self, answer: CompletionAnswer, job: int, rank: int):
        self._asked, self._prompt = answer.asked, answer.asked.prompts[job]
        self._index = job * self._asked.n + rank
        self._logprobs = answer.logprobs(job)
        self._length = 0  # characters sent
        self._begun = False

    def take(self, found: SequenceUpdate | Completion, text: str, finish: str | None) -> dict[str, Any]:
        """Return the entry in `choices` for new tokens and their text; finish: the reason of the end, None before."""
        asked, first = self._asked, not self._begun
        if first and asked.echo:
            text = self._prompt.text + text
        self._length += len(text)
        logprobs = self._take_logprobs(found, first, finish)
        entry = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if asked.return_token_ids:
            entry |= {"prompt_token_ids": self._prompt.ids if first else None, "token_ids": found.ids}
        self._begun = self._begun or self.has_news(entry)
        return entry

    def has_news(self, entry: dict[str, Any]) -> bool:
        """Return whether an entry has anything to send."""
        logprobs = entry["logprobs"]
        ended = entry["finish_reason"] is not None
        return bool(entry["text"] or ended or self._asked.return_token_ids or (logprobs and logprobs["tokens"]))

    def _take_logprobs(
        self, found: SequenceUpdate | Completion, first: bool, finish: str | None
    ) -> dict[str, Any] | None:
        logprobs = self._logprobs
        if logprobs is None:
            return None
        if first and self._asked.echo and found.prompt is not None:
            logprobs.add_prompt(found.prompt)
        logprobs.add(found.ids, found.logprobs, found.alternatives)
        return logprobs.take_shown(self._length) if finish is None else logprobs.take(self._length)


def _new_tokens(found: Sequence[Sequence[Completion]]) -> int:
    return sum(len(completion.ids) for sequences in found for completion in sequences)


def best(sequences: Sequence[Completion], count: int) -> list[Completion]:
    """Return the sequences, or the `count` of them whose tokens are the likeliest on average, the best first."""
    if len(sequences) == count:
        return list(sequences)
    return sorted(sequences, key=lambda found: -sum(found.logprobs) / max(1, len(found.logprobs)))[:count]
