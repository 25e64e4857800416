"""The engine of generation: it takes jobs, runs the scheduler's rounds, and returns what is new of their sequences.

`step` launches a round and then reads the results of the round before, so that the device never waits for the host.
The price: a round is launched before it is known which sequences the last one has ended. Tokens after the one that
ended a sequence are discarded, and its slot is free one round later.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference import commands
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import SlotState
from dtgpt.inference.commands import Channel, follow
from dtgpt.inference.request import (
    NOT_FINITE,
    Alternatives,
    Completion,
    NotFinite,
    PromptJob,
    Score,
    SequenceUpdate,
    alternatives_of,
    key_of,
    variant_of,
)
from dtgpt.inference.scheduler import IDLE_TOKENS, PromptChunk, Round, Row, Scheduler, Start
from dtgpt.inference.sequence import ActiveJob, ActiveSequence
from dtgpt.inference.step import Pending, Step, step_kind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams

P = ParamSpec("P")
R = TypeVar("R")
AHEAD = 2  # jobs that wait, for each slot
COPIED = 1 << 16  # positions of slots that are copied at once, which takes as much memory for the time of a copy


class PromptScorer(Protocol):
    """What a capability has for log-probabilities of the tokens of prompts, at the seam `scorers`."""

    # The command (slot, first, ids, alternatives) that reads all of `ids` but the last one into a slot, from position
    # `first` on, and returns pending scores of all but the first one.
    command: Callable[..., Any]

    def score(self, ids: list[int], alternatives: int, chunks: Sequence[Any]) -> Score | None:
        """Return the scores of a prompt, of whose chunks these are the results; None where they are not finite."""


def prompt_scorer() -> PromptScorer:
    """Return what scores prompts. Raise UserError where there is nothing."""
    return seams.first("scorers", "prompt_logprobs needs what scores prompts, and this dtgpt has nothing; leave it out")


class _Launched(NamedTuple):
    """A round whose results have not been read."""

    work: Round
    scores: list[tuple[int, Pending[Any]]]  # by request
    drawn: Pending[Sampled] | None  # for its rows
    candidates: Pending[Sampled] | None  # for those of searches


class Engine:
    """Serves jobs with the stages of a model. Every rank makes one; rank 0 then submits jobs and takes steps, while all
    others `follow` until rank 0 releases them:

        number = engine.submit(PromptJob([5, 900, 17], Options(max_new_tokens=8)))
        while engine.busy:
            updates = engine.step()
        engine.release()

    Before `release` the stages must not be used otherwise; after it the engine may serve again. Compiled stages of a
    run in training need `torch.compiler.set_stance("force_eager")` around all of it: their code is made for a batch.
    """

    def __init__(
        self,
        stages: list[Decoder],
        mesh: Mesh,
        config: ModelConfig,
        dtype: torch.dtype,
        slots: int,
        vocab_size: int | None = None,
        timeout: float = 600.0,
        graphs: bool = False,
        exact: bool = False,
        tokenizer: Tokenizer | None = None,
        special: SpecialIds | None = None,
    ):
        """Allocate the cache of `slots` sequences. `vocab_size`: ids that may be drawn and asked for, those of the
        tokenizer; None: of the model. `timeout`: seconds that collectives of the mesh wait, for messages. `graphs`:
        replay passes as CUDA graphs on a GPU; not for stages that are sharded over replicas. `exact`: give
        log-probabilities the bits of training's forward pass. `tokenizer`: which makes texts of ids, on rank 0; None:
        there are none. `special`: the ids that rules look for; None: those of each job. Raise UserError where these
        cannot be."""
        self.stages, self.config, self.mesh, self.slots, self.timeout = stages, config, mesh, slots, timeout
        self.tokenizer, self.special = tokenizer, special
        self.vocab_size = config.vocab_size if vocab_size is None else vocab_size
        kind = step_kind(mesh.device, graphs, exact)
        self._rank_step = kind(stages, mesh, config, dtype, slots, vocab_size, exact)
        self._channel = Channel(mesh)
        self._submitted = 0
        self._forget()

    def _forget(self) -> None:
        """Forget all jobs."""
        self.scheduler = Scheduler(self.slots, idle_tokens=IDLE_TOKENS if self.batch_tokens else None)
        self._active: dict[int, ActiveJob] = {}  # by number
        self._ended: list[SequenceUpdate] = []  # of choices that were cancelled since the last step
        self._launched: _Launched | None = None

    @property
    def batch_tokens(self) -> int:
        """The most tokens of prompts that are read in one pass; 0: each prompt has a pass of its own."""
        return self._rank_step.batch_tokens

    @property
    def busy(self) -> bool:
        """Whether any job is not finished, or its end not told."""
        return bool(self._active or self._ended)

    def submit(self, job: PromptJob) -> int:
        """Take a job, and return the number that its updates have. Raises UserError, one sentence, for a job that can
        never be done."""
        job = replace(job, special=self.special or job.special)
        job.validate(self.vocab_size, self.config.seq_length, self.slots)
        number, self._submitted = self._submitted, self._submitted + 1
        self._active[number] = ActiveJob(number, job, self.tokenizer)
        self.scheduler.add(
            request=number,
            prefill=len(job.ids) - 1,
            choices=job.rows,
            new_tokens=job.options.max_new_tokens,
            searches=job.options.search is not None,
            client=job.client,
            waits=job.options.is_guided,
        )
        return number

    def cancel(self, number: int) -> None:
        """End a job. The next step returns an update for each choice that was not finished."""
        if number in self._active:
            self._ended += self.end_all(self._active[number], "cancelled")

    def step(self) -> list[SequenceUpdate]:
        """Launch the next round, and return what the round before added."""
        with self._channel.failures_shared(self.timeout):
            work = self.scheduler.next_round()
            before, self._launched = self._launched, None if work is None else self._launch(work)
            ended, self._ended = self._ended, []
            return ended if before is None else ended + self._collect(before)

    def finite_step(self) -> list[SequenceUpdate]:
        """Take a step. Raise NotFinite where logits end a job."""
        updates = self.step()
        if any(update.finish == NOT_FINITE for update in updates):
            raise NotFinite
        return updates

    def stream(self, job: PromptJob, stopped: Callable[[], bool] = lambda: False) -> Iterator[SequenceUpdate]:
        """Yield what each step adds to a job, to its end, or to that of the step after which `stopped` is true."""
        number = self.submit(job)
        while self.busy:
            yield from self.finite_step()
            if stopped():
                self.cancel(number)  # of what has ended, nothing

    def run(self, jobs: Iterable[PromptJob]) -> Iterator[list[Completion]]:
        """Yield the sequences of each job, in the order of the jobs, as they are finished."""
        source, order, done = iter(jobs), deque[int](), {}
        while True:
            while len(self._active) < AHEAD * self.slots and (job := next(source, None)) is not None:
                order.append(self.submit(job))
            if not order:
                return
            for update in self.finite_step():
                if update.completions is not None:
                    done[update.job] = update.completions
            while order and order[0] in done:
                yield done.pop(order.popleft())

    def ping(self) -> None:
        """Wait for an answer of all other ranks; raise UserError where one has ended. For times without steps."""
        with self._channel.failures_shared(self.timeout):
            self.command(commands.ping)

    def follow(self) -> None:
        """Execute the commands of rank 0 on another rank, until rank 0 calls `release`. Raises UserError where any
        other rank fails."""
        with self._channel.failures_shared(self.timeout):
            follow(self._rank_step, self._channel)

    def release(self) -> None:
        """Forget all requests, let the other ranks return from `follow`, and leave the stages as they were before."""
        self._forget()
        with self._channel.failures_shared(self.timeout):
            self.command(commands.release)

    def fail(self) -> None:
        """Let the other ranks fail, where this one cannot go on, and leave the stages as they were before."""
        self._forget()
        self._rank_step.detach()
        self._channel.close()

    def command(self, command: Callable[Concatenate[Step, P], R], *arguments: P.args, **none: P.kwargs) -> R:
        """Let every rank execute a command, on rank 0; return its result."""
        self._channel.send(command, arguments)
        return command(self._rank_step, *arguments, **none)

    def _launch(self, work: Round) -> _Launched:
        # Prompts come first: a sequence that starts needs its prompt in the cache, and decodes in this very round.
        scores = self._read(work.chunks)
        self._start(work.starts)
        drawn, candidates = self._decode(work.rows, work.steps), self._decode(work.searched, steps=1)
        return _Launched(work, scores, drawn, candidates)

    def _read(self, chunks: Sequence[PromptChunk]) -> list[tuple[int, Pending[Any]]]:
        """Read chunks of prompts, several in a pass where these ask for no scores. Return the scores, by request."""
        jobs = {chunk: self._active[chunk.request].job for chunk in chunks}
        for group in self._rank_step.group([chunk for chunk in chunks if not jobs[chunk].options.prompt_logprobs]):
            prompts = [jobs[chunk].ids[chunk.first : chunk.stop] for chunk in group]
            self.command(commands.read, [chunk.slot for chunk in group], prompts, group[0].first)
        scores = []
        for chunk, job in jobs.items():
            if job.options.prompt_logprobs:  # which need the token after the chunk, too
                ids, alternatives = job.ids[chunk.first : chunk.stop + 1], job.options.top_logprobs
                read = self.command(prompt_scorer().command, chunk.slot, chunk.first, ids, alternatives)
                scores.append((chunk.request, read))
        return scores

    def _decode(self, rows: Sequence[Row], steps: int) -> Pending[Sampled] | None:
        return self.command(commands.decode, [row.slot for row in rows], steps, self._variant(rows)) if rows else None

    def _start(self, starts: Sequence[Start]) -> None:
        """Begin the choices of requests: the first of each in the slot that has read the prompt, the others as copies
        of it, many at once, with keys of their own."""
        copies: list[tuple[int, int, tuple[int, int]]] = []  # source, target, key
        longest = 0
        for start in starts:
            active = self._active[start.request]
            asked, (source, *others) = active.job, start.slots
            if asked.options.search is not None:
                active.search = asked.options.search.begin(asked, start.slots)
                others = []  # a search begins with one row
            payload = SlotState.encode(asked.ids, asked.options, asked.special, asked.prompt_index, choice=0)
            self.command(commands.begin, source, payload)
            self._guide([(source, active.sequences[0])])  # the same for all choices
            if (len(copies) + len(others)) * max(longest, len(asked.ids)) > COPIED:
                self._copy(copies, longest)
                copies, longest = [], 0
            keys = [key_of(asked.options, asked.prompt_index, choice) for choice, _ in enumerate(others, 1)]
            copies += [(source, slot, key) for slot, key in zip(others, keys, strict=True)]
            longest = max(longest, len(asked.ids) - 1)
        self._copy(copies, longest)

    def _copy(self, copies: Sequence[tuple[int, int, tuple[int, int]]], length: int) -> None:
        """Copy the first `length` positions and the state of slots; copies: (source, target, key of the target)."""
        if copies:
            sources, targets, keys = zip(*copies, strict=True)
            self.command(commands.copy, sources, targets, length, keys)

    def _variant(self, rows: Sequence[Row]) -> Variant:
        """Return what the next steps must be able to do. Few variants, since each has graphs of its own."""
        active = [self._active[row.request] for row in rows]
        searches = [one.search for one in active if one.search is not None]
        alternatives = max([one.job.options.top_logprobs for one in active] + [one.alternatives for one in searches])
        rounded = 1 << (alternatives - 1).bit_length() if alternatives else 0
        variant = variant_of([one.job.options for one in active], min(rounded, self.vocab_size))
        return variant._replace(beams=bool(searches))

    def _collect(self, launched: _Launched) -> list[SequenceUpdate]:
        updates, work = list[SequenceUpdate](), launched.work
        for number, pending in launched.scores:
            if number in self._active:
                self._active[number].chunks.append(pending.wait())
        for start in work.starts:
            if start.request in self._active:
                updates += self._begin(self._active[start.request])
        if launched.drawn is not None:
            results = launched.drawn.wait()
            tokens, logprobs = results.tokens.tolist(), results.logprobs.tolist()  # of all rows at once
            for index, row in enumerate(work.rows):
                active = self._active.get(row.request)
                if active is not None and active.sequences[row.choice].finish is None:
                    count = active.job.options.top_logprobs
                    likeliest = alternatives_of(Sampled(*(part[index] for part in results)), count) if count else []
                    updates += self._extend(active, row.choice, tokens[index], logprobs[index], likeliest)
            self._go_on(work.rows)
        if launched.candidates is not None:
            results = launched.candidates.wait()
            for number in dict.fromkeys(row.request for row in work.searched):
                active = self._active.get(number)
                if active is not None and active.search is not None:
                    own = {row.choice: index for index, row in enumerate(work.searched) if row.request == number}
                    updates += active.search.advance(self, active, own, results)
        return updates

    def _go_on(self, rows: Sequence[Row]) -> None:
        """Let those of the rows that are guided, and have not ended, take a further step."""
        live = [(row, self._active[row.request].sequences[row.choice]) for row in rows if row.request in self._active]
        guided = [(row, one) for row, one in live if one.guide is not None and one.finish is None]
        self._guide([(row.slot, one) for row, one in guided])
        for row, _ in guided:
            self.scheduler.go_on(row.request, [row.choice])

    def _guide(self, rows: Sequence[tuple[int, ActiveSequence]]) -> None:
        """Tell all ranks which ids may come next in slots whose sequences are guided."""
        words = {slot: one.guide.allowed() for slot, one in rows if one.guide is not None}
        if words:
            self.command(commands.allow, list(words), torch.stack(list(words.values())))

    def _begin(self, active: ActiveJob) -> list[SequenceUpdate]:
        """Take the scores of the prompt, if any. Return the ends of choices that want no tokens."""
        job = active.job
        if job.options.prompt_logprobs:
            active.prompt = prompt_scorer().score(job.ids, job.options.top_logprobs, active.chunks)
            if active.prompt is None:
                return self.end_all(active, NOT_FINITE)
        return [] if job.options.max_new_tokens else self.end_all(active, "length")

    def _extend(
        self, active: ActiveJob, choice: int, tokens: list[int], logprobs: list[float], alternatives: list[Alternatives]
    ) -> list[SequenceUpdate]:
        """Add new tokens to a choice, up to that which ends it."""
        new, finish = active.job.accept(active.sequences[choice].ids, tokens, logprobs)
        if finish == NOT_FINITE:
            return self.end_all(active, NOT_FINITE)
        new, finish = active.sequences[choice].guided(tokens, new, finish)
        update = active.add(choice, finish, tokens[:new], logprobs[:new], alternatives[:new])
        if update.finish:
            self.scheduler.finish(active.number, choice)
        if not active.live:
            del self._active[active.number]
        return [update]

    def drop(self, active: ActiveJob) -> None:
        """Let a job take no further step."""
        self.scheduler.cancel(active.number)
        del self._active[active.number]

    def end_all(self, active: ActiveJob, finish: str) -> list[SequenceUpdate]:
        """End all choices of a job: where logits of one are not finite, those of the others are, or would be, too."""
        self.drop(active)
        return [active.end(choice, finish) for choice in active.live]
