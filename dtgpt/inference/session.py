"""Prompts on an engine, on the rank that leads it: tokens become text, and stop strings end it."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.completion import Alternatives, Completion, Score
from dtgpt.inference.engine import Engine
from dtgpt.inference.finite import NotFinite
from dtgpt.inference.options import Options
from dtgpt.inference.request import NOT_FINITE, PROMPT, Event, Request
from dtgpt.inference.sampling import SpecialIds
from dtgpt.inference.text import StopSearch, TextStream
from dtgpt.util.errors import UserError

AHEAD = 2  # requests that wait in the engine, for each slot


class PromptJob(NamedTuple):
    """A prompt and what is wanted of it."""

    ids: list[int]
    options: Options
    prompt_index: int = 0  # enters the draws: equal prompts get different texts
    client: str = ""  # who shares the slots fairly with others
    stops: tuple[str, ...] = ()  # of a chat's template, besides those of the options

    @property
    def rows(self) -> int:
        """The slots of the cache that it takes."""
        options = self.options
        return options.num_return_sequences if options.search is None else options.search.rows

    def request(self, special: SpecialIds) -> Request:
        """Return what the engine is asked for. `special`: the tokenizer's."""
        options = self.options
        return Request(
            ids=self.ids, sampling=options, special=special, prompt_index=self.prompt_index,
            choices=options.num_return_sequences, score_prompt=options.prompt_logprobs,
            alternatives=options.top_logprobs, search=options.search, client=self.client,
        )  # fmt: skip


class SequenceUpdate(NamedTuple):
    """What a step added to a sequence. `completions`: with the last update of a job, all of its sequences."""

    job: int  # as `Session.submit` numbers it
    choice: int
    ids: list[int]  # new tokens, with the one that ends the sequence
    text: str  # new text, whole characters alone; what may become a stop string is held back
    logprobs: list[float]  # of each of `ids`, as in `Completion`
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
        handle = self.engine.submit(job.request(self._special))
        self._open[handle] = _OpenJob(job, self._tokenizer, self._special)
        return handle

    def step(self) -> list[SequenceUpdate]:
        """Let the engine work; return what it has made since. Raise UserError where the session was closed."""
        if self._closed:
            raise UserError("the model was used again before a stream had ended; read it to its end, or close it first")
        return [update for event in self.engine.step() if (update := self._take(event)) is not None]

    def finite_step(self) -> list[SequenceUpdate]:
        """Do what `step` does. Raise NotFinite where logits that are not finite end a job."""
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

    def stream(self, job: PromptJob) -> Iterator[SequenceUpdate]:
        """Yield what each step adds to a job, to its end."""
        self.submit(job)
        while self.busy:
            yield from self.finite_step()

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
            job.take_scores(event)
            return None
        sequence = job.sequences[event.choice]
        if sequence.finish is not None:  # steps that were under way when a stop string was found
            return None
        before = len(sequence.ids)
        text = sequence.take(event)
        if sequence.finish is not None and event.finish is None:
            self.engine.cancel(event.request, event.choice)
        completions = job.completions() if all(s.finish is not None for s in job.sequences) else None
        if completions is not None:
            del self._open[event.request]
        return SequenceUpdate(
            event.request, event.choice, sequence.ids[before:], text, sequence.logprobs[before:],
            sequence.alternatives[before:], sequence.finish, job.prompt, completions,
        )  # fmt: skip


class _OpenJob:
    """A job that is not finished."""

    def __init__(self, job: PromptJob, tokenizer: Tokenizer | None, special: SpecialIds):
        self._job = job
        self.sequences = [_Sequence(job, tokenizer, special) for _ in range(job.options.num_return_sequences)]
        self.prompt: Score | None = None

    def take_scores(self, event: Event) -> None:
        """Keep the scores of the prompt."""
        alternatives = event.alternatives if self._job.options.top_logprobs else []
        self.prompt = Score(
            ids=self._job.ids, logprobs=event.logprobs, greedy=list(event.greedy), alternatives=alternatives
        )

    def completions(self) -> list[Completion]:
        return [self._completion(sequence) for sequence in self.sequences]

    def _completion(self, sequence: "_Sequence") -> Completion:
        return Completion(
            text=sequence.text,
            ids=sequence.ids,
            logprobs=sequence.logprobs,
            finish_reason=sequence.finish or "",
            alternatives=sequence.alternatives,
            prompt=self.prompt,
            score=sequence.score,
        )


class _Sequence:
    """One continuation on its way."""

    def __init__(self, job: PromptJob, tokenizer: Tokenizer | None, special: SpecialIds):
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives: list[list[tuple[int, float]]] = []
        self.finish: str | None = None
        self.score: float | None = None
        self._pieces: list[str] = []
        self._ends, self._wants_alternatives = special.ends, job.options.top_logprobs > 0
        self._least = job.options.min_new_tokens
        self._stream = TextStream(tokenizer, job.ids) if tokenizer else None
        self._search = StopSearch((*job.options.stop_strings, *job.stops), line_ends(job.options, special))

    def take(self, event: Event) -> str:
        """Add the tokens of an event, up to the one with which a stop string is complete. Return the new text."""
        text, taken = "", len(event.ids)
        if self._stream is not None:
            ends = event.finish == "stop" and event.ids[-1] in self._ends
            text, read = self._read(self._stream, event.ids[:-1] if ends else event.ids)
            if self._search.found:
                taken = read
            elif event.finish is not None:
                text += self._search.add(self._stream.finish()) + self._search.finish()
        self.ids += event.ids[:taken]
        self.logprobs += event.logprobs[:taken]
        if self._wants_alternatives:
            self.alternatives += map(list, event.alternatives[:taken])
        self.finish = "stop" if self._search.found else event.finish
        self.score = event.score
        self._pieces.append(text)
        return text

    def _read(self, stream: TextStream, ids: Sequence[int]) -> tuple[str, int]:
        """Return the text of ids, and how many of them there are up to the one that completes a stop string."""
        if not self._search.strings:
            return stream.extend(ids), len(ids)
        before, text = stream.mark(), stream.extend(ids)
        if not self._search.ends(text):
            return self._search.add(text), len(ids)
        stream.go_back(before)
        pieces: list[str] = []
        while not self._search.found and len(pieces) < len(ids):
            ends = len(self.ids) + len(pieces) >= self._least
            pieces.append(self._search.add(stream.add(ids[len(pieces)]), ends))
        return "".join(pieces), len(pieces)

    @property
    def text(self) -> str | None:
        """The text so far, None without a tokenizer."""
        return None if self._stream is None else "".join(self._pieces)


def line_ends(options: Options, special: SpecialIds) -> tuple[str, ...]:
    """Return the texts behind which a rule of line ends stops, where the tokenizer has no token for them."""
    if special.newline is not None:
        return ()
    if options.stop_on_double_eol:
        return ("\n\n",)
    return ("\n",) if options.stop_on_eol else ()
