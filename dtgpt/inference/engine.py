"""The engine of generation: it takes jobs, runs the scheduler's rounds, and returns what is new of their sequences.

`step` launches a round and then reads the results of the round before, so that the device never waits for the host.
The price: a round is launched before it is known which sequences the last one has ended. Tokens after the one that
ended a sequence are discarded, and its slot is free one round later.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import torch

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference import commands
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import SlotState
from dtgpt.inference.commands import Channel, follow
from dtgpt.inference.request import (
    NOT_FINITE,
    Alternatives,
    NotFinite,
    PromptJob,
    SequenceUpdate,
    alternatives_of,
    key_of,
    variant_of,
)
from dtgpt.inference.scheduler import IDLE_TOKENS, PromptChunk, Round, Row, Scheduler, Start
from dtgpt.inference.sequence import ActiveJob
from dtgpt.inference.step import Step, step_kind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams

P = ParamSpec("P")
R = TypeVar("R")
COPIED = 1 << 16  # positions of slots that are copied at once, which takes as much memory for the time of a copy


class _Launched(NamedTuple):
    """A round whose results have not been read."""

    work: Round
    read: Any  # what `_read` returned
    drawn: Any  # what `_decode` returned


class Engine:
    """Serves jobs with the stages of a model. Capabilities may serve more: `Engine(...)` is an object of their classes,
    too. Every rank makes one; rank 0 then submits jobs and takes steps, while all
    others `follow` until rank 0 releases them:

        number = engine.submit(PromptJob([5, 900, 17], Options(max_new_tokens=8)))
        while engine.busy:
            updates = engine.step()
        engine.release()

    Before `release` the stages must not be used otherwise; after it the engine may serve again. Compiled stages of a
    run in training need `torch.compiler.set_stance("force_eager")` around all of it: their code is made for a batch.
    """

    turns = Scheduler  # which job gets which slot

    def __new__(cls, *_: Any, **options: Any) -> Self:
        return super().__new__(seams.with_kinds("engines", cls) if cls is Engine else cls)

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
        self.scheduler = self.turns(self.slots, idle_tokens=IDLE_TOKENS if self.batch_tokens else None)
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
            asked=job,
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
        read = self._read(work.chunks)
        self._start(work.starts)
        return _Launched(work, read, self._decode(work.rows, work.steps))

    def _read(self, chunks: Sequence[PromptChunk]) -> Any:
        """Read chunks of prompts, several in a pass. Return what `_take_read` is to wait for, here nothing."""
        for group in self._rank_step.group(chunks):
            prompts = [self._active[chunk.request].job.ids[chunk.first : chunk.stop] for chunk in group]
            self.command(commands.read, [chunk.slot for chunk in group], prompts, group[0].first)

    def _take_read(self, read: Any) -> None:
        """Take what is known of prompts, now that `_read` is done."""

    def _decode(self, rows: Sequence[Row], steps: int) -> Any:
        """Decode steps of rows. Return what `_extend_rows` is to wait for."""
        return self.command(commands.decode, [row.slot for row in rows], steps, self._variant(rows)) if rows else None

    def _start(self, starts: Sequence[Start]) -> None:
        """Begin the choices of requests: the first of each in the slot that has read the prompt, the others as copies
        of it, many at once, with keys of their own."""
        copies: list[tuple[int, int, tuple[int, int]]] = []  # source, target, key
        longest = 0
        for start in starts:
            asked, (source, *others) = self._active[start.request].job, start.slots
            payload = SlotState.encode(asked.ids, asked.options, asked.special, asked.prompt_index, choice=0)
            self.command(commands.begin, source, payload)
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
        alternatives = max(map(self._alternatives, active))
        rounded = 1 << (alternatives - 1).bit_length() if alternatives else 0
        return variant_of([one.job.options for one in active], min(rounded, self.vocab_size))

    def _alternatives(self, active: ActiveJob) -> int:
        """Return the number of likeliest tokens that a job needs in place of each of its own."""
        return active.job.options.top_logprobs

    def _collect(self, launched: _Launched) -> list[SequenceUpdate]:
        updates, work = list[SequenceUpdate](), launched.work
        self._take_read(launched.read)
        for start in work.starts:
            if start.request in self._active:
                updates += self._begin(self._active[start.request])
        return updates + self._extend_rows(work.rows, launched.drawn)

    def _begin(self, active: ActiveJob) -> list[SequenceUpdate]:
        """Return the ends of choices that want no tokens."""
        return [] if active.job.options.max_new_tokens else self.end_all(active, "length")

    def _extend_rows(self, rows: Sequence[Row], drawn: Any) -> list[SequenceUpdate]:
        """Add what was drawn for rows to their choices."""
        if drawn is None:
            return []
        updates, results = list[SequenceUpdate](), drawn.wait()
        tokens, logprobs = results.tokens.tolist(), results.logprobs.tolist()  # of all rows at once
        for index, row in enumerate(rows):
            active = self._active.get(row.request)
            if active is not None and active.sequences[row.choice].finish is None:
                count = active.job.options.top_logprobs
                likeliest = alternatives_of(Sampled(*(part[index] for part in results)), count) if count else []
                updates += self._extend(active, row.choice, tokens[index], logprobs[index], likeliest)
        return updates

    def _extend(
        self, active: ActiveJob, choice: int, tokens: list[int], logprobs: list[float], alternatives: list[Alternatives]
    ) -> list[SequenceUpdate]:
        """Add new tokens to a choice, up to that which ends it."""
        new, finish = self._accept(active, choice, tokens, logprobs)
        if finish == NOT_FINITE:
            return self.end_all(active, NOT_FINITE)
        update = active.add(choice, finish, tokens[:new], logprobs[:new], alternatives[:new])
        if update.finish:
            self.scheduler.finish(active.number, choice)
        if not active.live:
            del self._active[active.number]
        return [update]

    def _accept(
        self, active: ActiveJob, choice: int, tokens: list[int], logprobs: list[float]
    ) -> tuple[int, str | None]:
        """Return how many new tokens continue a choice, and the reason of its end by these; None where it goes on."""
        return active.job.accept(active.sequences[choice].ids, tokens, logprobs)

    def drop(self, active: ActiveJob) -> None:
        """Let a job take no further step."""
        self.scheduler.cancel(active.number)
        del self._active[active.number]

    def end_all(self, active: ActiveJob, finish: str) -> list[SequenceUpdate]:
        """End all choices of a job: where logits of one are not finite, those of the others are, or would be, too."""
        self.drop(active)
        return [active.end(choice, finish) for choice in active.live]
