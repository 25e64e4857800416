"""The answer of OpenAI's completions, as a whole and as events of a stream."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.request import Completion
from dtgpt.inference.session import SequenceUpdate
from dtgpt.serve.openai_logprobs import Logprobs
from dtgpt.serve.openai_request import CompletionRequest
from dtgpt.serve.token_names import TokenNames

DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(separators=(",", ":"))


class CompletionAnswer:
    """What the whole answer and every event of a stream have in common."""

    def __init__(self, asked: CompletionRequest, model: str, tokenizer: Tokenizer | None, names: TokenNames):
        self.asked, self._tokenizer, self._names = asked, tokenizer, names
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}

    def whole(self, found: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Return the answer from the sequences of each job."""
        asked = self.asked
        choices = [
            self._choice(job, job * asked.n + rank, completion)
            for job, sequences in enumerate(found)
            for rank, completion in enumerate(best(sequences, asked.n))
        ]
        return {**self._head, "choices": choices, "usage": self.usage(_new_tokens(found))}

    def tokens(self, found: Sequence[Sequence[Completion]]) -> int:
        """Return the number of tokens that the whole answer has, about."""
        prompt = self.asked.prompt_tokens * self.asked.n if self.asked.echo else 0
        return prompt + _new_tokens(found)

    def _choice(self, job: int, index: int, found: Completion) -> dict[str, Any]:
        asked, prompt = self.asked, self.asked.prompts[job]
        text = (prompt.text if asked.echo else "") + (found.text or "")
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": found.finish_reason}
        if (logprobs := self.logprobs(job)) is not None:
            if asked.echo and found.prompt is not None:
                logprobs.add_prompt(found.prompt)
            logprobs.add(found.ids, found.logprobs, found.alternatives)
            choice["logprobs"] = logprobs.take(len(text))
        if asked.return_token_ids:
            choice |= {"prompt_token_ids": prompt.ids, "token_ids": found.ids}
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
        self._choices = [
            _StreamedChoice(answer, job, job * asked.n + choice)
            for job in range(len(asked.jobs))
            for choice in range(asked.n)
        ]
        self._new_tokens = 0
        self.opening = answer.tokens([])

    def events(self, updates: Sequence[SequenceUpdate]) -> bytes:
        """Return the events for what a round has added, one for each choice."""
        events = []
        for update in updates:
            self._new_tokens += len(update.ids)
            choice = self._choices[update.job * self._answer.asked.n + update.choice]
            if (entry := choice.take(update)) is not None:
                events.append(self._answer.event([entry]))
        return b"".join(events)

    def end(self) -> bytes:
        """Return what ends a complete answer."""
        if not self._answer.asked.include_usage:
            return DONE
        return self._answer.event([], self._answer.usage(self._new_tokens)) + DONE


class _StreamedChoice:
    """One choice of a stream."""

    def __init__(self, answer: CompletionAnswer, job: int, index: int):
        self._asked, self._prompt, self._index = answer.asked, answer.asked.prompts[job], index
        self._logprobs = answer.logprobs(job)
        self._length = 0  # characters sent
        self._begun = False

    def take(self, update: SequenceUpdate) -> dict[str, Any] | None:
        """Return the entry in `choices` for an update; None where there is nothing to send yet."""
        asked, text, first = self._asked, update.text, not self._begun
        if first and asked.echo:
            text = self._prompt.text + text
        self._length += len(text)
        logprobs = self._take_logprobs(update, first)
        if not text and update.finish is None and not asked.return_token_ids and not (logprobs and logprobs["tokens"]):
            return None
        self._begun = True
        entry = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": update.finish}
        if asked.return_token_ids:
            entry |= {"prompt_token_ids": self._prompt.ids if first else None, "token_ids": update.ids}
        return entry

    def _take_logprobs(self, update: SequenceUpdate, first: bool) -> dict[str, Any] | None:
        logprobs = self._logprobs
        if logprobs is None:
            return None
        if first and self._asked.echo and update.prompt is not None:
            logprobs.add_prompt(update.prompt)
        logprobs.add(update.ids, update.logprobs, update.alternatives)
        return logprobs.take_shown(self._length) if update.finish is None else logprobs.take(self._length)


def _new_tokens(found: Sequence[Sequence[Completion]]) -> int:
    return sum(len(completion.ids) for sequences in found for completion in sequences)


def best(sequences: Sequence[Completion], count: int) -> list[Completion]:
    """Return the sequences, or the `count` of them whose tokens are the likeliest on average, the best first."""
    if len(sequences) == count:
        return list(sequences)
    return sorted(sequences, key=lambda found: -sum(found.logprobs) / max(1, len(found.logprobs)))[:count]
