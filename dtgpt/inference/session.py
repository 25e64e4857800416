"""Prompts on an engine, on the rank that leads it: tokens become text.

The engine knows ids alone. A session keeps, for each sequence, its ids and the text that is certain so far. A text may
end within a token, or with several of them, which the engine cannot see: the session then cancels the sequence, and
discards what steps under way have added to it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.engine import Engine, prompt_scorer
from dtgpt.inference.prompts import TextStream
from dtgpt.inference.request import (
    NOT_FINITE,
    PROMPT,
    Alternatives,
    Completion,
    Event,
    NotFinite,
    PromptJob,
    Score,
    SpecialIds,
)
from dtgpt.util import seams
from dtgpt.util.errors import UserError

AHEAD = 2  # requests that wait in the engine, for each slot


class SequenceUpdate(NamedTuple):
    """What a step added to a sequence. `completions`: with the last update of a job, all of its sequences."""

    job: int  # the number that `Session.submit` returned
    choice: int
    ids: list[int]  # new tokens, with the one that ends the sequence
    text: str  # new text, whole characters alone; what may become a stop string is held back
    logprobs: list[float]  # of each of `ids`, before filters and penalties, at temperature 1
    alternatives: list[Alternatives]  # in place of each of `ids`, where asked for
    finish: str | None  # the reason of the end, with the last update of a sequence; NOT_FINITE ends all of a job
    prompt: Score | None  # the scores of the prompt with every update, where asked for
    completions: list[Completion] | None


class Session:
    """Jobs in an engine, on rank 0."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, special: SpecialIds):
        self.engine, self._tokenizer, self._special = engine, tokenizer, special
        self._open: dict[int, _OpenJob] = {}
        self._closed = False

    def submit(self, job: PromptJob) -> int:
        """Hand a job to the engine; return its number."""
        job = replace(job, special=self._special)
        handle = self.engine.submit(job)
        self._open[handle] = _OpenJob(job, self._tokenizer)
        return handle

    def step(self) -> list[SequenceUpdate]:
        """Let the engine work; return what it has made since. Raise UserError where the session was closed."""
        if self._closed:
            raise UserError("the model was used again before a stream had ended; read it to its end, or close it first")
        return [update for event in self.engine.step() if (update := self._take(event)) is not None]

    def finite_step(self) -> list[SequenceUpdate]:
        """Let the engine work; return what it has made since. Raise NotFinite where logits end a job."""
        updates = self.step()
        if any(update.finish == NOT_FINITE for update in updates):
            raise NotFinite
        return updates

    def close(self) -> None:
        """End all jobs, and let the other ranks go on without the engine."""
        self._closed = True
        for number in self._open:
            self.engine.cancel(number)
        self.engine.release()

    def fail(self) -> None:
        """Let the other ranks fail, too."""
        self._closed = True
        self.engine.fail()

    @property
    def busy(self) -> bool:
        """Whether any job is not finished."""
        return bool(self._open)

    def stream(self, job: PromptJob, stopped: Callable[[], bool] = lambda: False) -> Iterator[SequenceUpdate]:
        """Yield what each step adds to a job, to its end, or to that of the step after which `stopped` is true."""
        number = self.submit(job)
        while self.busy:
            yield from self.finite_step()
            if stopped():
                self.engine.cancel(number)  # of what has ended, nothing

    def run(self, jobs: Iterable[PromptJob]) -> Iterator[list[Completion]]:
        """Yield the sequences of each job, in the order of the jobs, as they are finished."""
        source, order, done = iter(jobs), deque[int](), {}
        while True:
            while len(self._open) < AHEAD * self.engine.slots and (job := next(source, None)) is not None:
                order.append(self.submit(job))
            if not order:
                return
            for update in self.finite_step():
                if update.completions is not None:
                    done[update.job] = update.completions
            while order and order[0] in done:
                yield done.pop(order.popleft())

    def _take(self, event: Event) -> SequenceUpdate | None:
        job = self._open.get(event.request)
        if job is None:
            return None
        if event.choice == PROMPT:
            job.prompt = prompt_scorer().score(job.job.ids, event, job.job.options.top_logprobs)
            return None
        sequence = job.sequences[event.choice]
        if sequence.finish is not None:  # steps that were under way when a stop string was found
            return None
        before = len(sequence.ids)
        text = sequence.take(event)
        if sequence.finish is not None and event.finish is None:
            self.engine.cancel(event.request, event.choice)
        whole = all(one.finish is not None for one in job.sequences)
        completions = [one.completion(job.prompt) for one in job.sequences] if whole else None
        if completions is not None:
            del self._open[event.request]
        return SequenceUpdate(
            event.request,
            event.choice,
            sequence.ids[before:],
            text,
            sequence.logprobs[before:],
            sequence.alternatives[before:],
            sequence.finish,
            job.prompt,
            completions,
        )


class _OpenJob:
    """A job that is not finished."""

    def __init__(self, job: PromptJob, tokenizer: Tokenizer | None):
        self.job = job
        self.sequences = [_Sequence(job, tokenizer) for _ in range(job.choices)]
        self.prompt: Score | None = None


class TextEnd(Protocol):
    """What ends the text of a sequence within a token: what a capability makes at the seam `text_ends`."""

    found: bool  # whether the text has ended

    def read(self, stream: TextStream, ids: Sequence[int], before: int) -> tuple[str, int]:
        """Return the text of ids that is certain, and how many of them there are up to the one that ends it. before:
        the new tokens that the sequence has already."""

    def rest(self, text: str) -> str:
        """Return what is left of a text that ends with `text`."""


class _Sequence:
    """One continuation on its way."""

    def __init__(self, job: PromptJob, tokenizer: Tokenizer | None):
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives: list[list[tuple[int, float]]] = []
        self.finish: str | None = None
        self._score: float | None = None
        self._pieces: list[str] = []
        self._ends, self._wants_alternatives = job.special.ends, job.options.top_logprobs > 0
        self._stream = TextStream(tokenizer, job.ids) if tokenizer else None
        found = (make(job) for make in seams.listed("text_ends"))
        self._end: TextEnd | None = next(filter(None, found), None)

    def take(self, event: Event) -> str:
        """Add the tokens of an event, up to the one with which a text that ends it is complete. Return the new text."""
        text, taken = "", len(event.ids)
        if self._stream is not None:
            # The token that ends a text, such as the end of text, is no part of it.
            hidden = event.finish == "stop" and event.ids[-1] in self._ends
            ids = event.ids[:-1] if hidden else event.ids
            text, taken = self._read(self._stream, ids, event)
        self.ids += event.ids[:taken]
        self.logprobs += event.logprobs[:taken]
        if self._wants_alternatives:
            self.alternatives += map(list, event.alternatives[:taken])
        self.finish = "stop" if self._end is not None and self._end.found else event.finish
        self._score = event.score
        self._pieces.append(text)
        return text

    def _read(self, stream: TextStream, ids: list[int], event: Event) -> tuple[str, int]:
        """Return the text of the ids of an event, and how many of its tokens belong to the sequence."""
        if self._end is None:
            text = stream.extend(ids)
            return (text if event.finish is None else text + stream.finish()), len(event.ids)
        text, read = self._end.read(stream, ids, len(self.ids))
        if self._end.found:
            return text, read
        return (text if event.finish is None else text + self._end.rest(stream.finish())), len(event.ids)

    def completion(self, prompt: Score | None) -> Completion:
        """Return the sequence as it is now, its text None without a tokenizer. prompt: the scores of the prompt."""
        return Completion(
            text=None if self._stream is None else "".join(self._pieces),
            ids=self.ids,
            logprobs=self.logprobs,
            finish_reason=self.finish or "",
            alternatives=self.alternatives,
            prompt=prompt,
            score=self._score,
        )
