"""A job on its way through the engine: new tokens of its sequences become text.

A text may end within a token, or with several of them, which the device cannot see: the sequence then ends here, and
what steps under way have added to it is discarded.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.prompts import TextStream, text_stream
from dtgpt.inference.request import Alternatives, Completion, PromptJob, SequenceUpdate


class TextEnd(Protocol):
    """What ends the text of a sequence within a token: what `text_end` of the options makes."""

    found: bool  # whether the text has ended

    def read(self, stream: TextStream, ids: Sequence[int], before: int) -> tuple[str, int]:
        """Return the text of ids that is certain, and how many of them there are up to the one that ends it. before:
        the new tokens that the sequence has already."""

    def rest(self, text: str) -> str:
        """Return what is left of a text that ends with `text`."""


class ActiveSequence:
    """One continuation on its way."""

    def __init__(self, job: PromptJob, tokenizer: Tokenizer | None):
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives: list[Alternatives] = []
        self.finish: str | None = None  # the reason of its end
        self.score: float | None = None  # of a search
        self._text = ""
        self._ends = job.special.ends
        self._stream = text_stream(tokenizer, job.ids) if tokenizer else None
        self._end: TextEnd | None = job.options.text_end(job)

    def take(self, ids: list[int], finish: str | None) -> tuple[str, int]:
        """Return the new text of ids, and how many of them belong to the sequence. finish: the reason of its end by the
        ids alone."""
        text, taken = "", len(ids)
        if self._stream is not None:
            # The token that ends a text, such as the end of text, is no part of it.
            hidden = finish == "stop" and ids[-1] in self._ends
            text, taken = self._read(self._stream, ids[:-1] if hidden else ids, finish, taken)
        self.finish = "stop" if self._end is not None and self._end.found else finish
        self._text += text
        return text, taken

    def _read(self, stream: TextStream, ids: list[int], finish: str | None, whole: int) -> tuple[str, int]:
        if self._end is None:
            text = stream.extend(ids)
            return (text if finish is None else text + stream.finish()), whole
        text, read = self._end.read(stream, ids, len(self.ids))
        if self._end.found:
            return text, read
        return (text if finish is None else text + self._end.rest(stream.finish())), whole

    def completion(self, prompt: Any) -> Completion:
        """Return the sequence as it is now, its text None without a tokenizer. prompt: the scores of the prompt."""
        return Completion(
            text=None if self._stream is None else self._text,
            ids=self.ids,
            logprobs=self.logprobs,
            finish_reason=self.finish or "",
            alternatives=self.alternatives,
            prompt=prompt,
            score=self.score,
        )


class ActiveJob:
    """A job that is not finished."""

    def __init__(self, number: int, job: PromptJob, tokenizer: Tokenizer | None):
        self.number, self.job = number, job
        self.sequences = [ActiveSequence(job, tokenizer) for _ in range(job.choices)]
        self.prompt: Any = None  # the scores of the prompt, where asked for

    @property
    def live(self) -> list[int]:
        """The choices that are not finished."""
        return [choice for choice, sequence in enumerate(self.sequences) if sequence.finish is None]

    def add(
        self,
        choice: int,
        finish: str | None,
        ids: list[int],
        logprobs: list[float],
        alternatives: list[Alternatives],
        score: float | None = None,
    ) -> SequenceUpdate:
        """Add new tokens to a sequence, up to the one with which a text that ends it is complete."""
        sequence = self.sequences[choice]
        text, taken = sequence.take(ids, finish)
        ids, logprobs, alternatives = ids[:taken], logprobs[:taken], alternatives[:taken]
        sequence.ids += ids
        sequence.logprobs += logprobs
        sequence.alternatives += alternatives
        sequence.score = score
        completions = None if self.live else [one.completion(self.prompt) for one in self.sequences]
        return SequenceUpdate(
            self.number, choice, ids, text, logprobs, alternatives, sequence.finish, self.prompt, completions
        )

    def end(self, choice: int, finish: str) -> SequenceUpdate:
        """End a sequence with the tokens that it has."""
        return self.add(choice, finish, [], [], [])
