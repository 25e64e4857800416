"""The engine of generation: it takes requests, runs the scheduler's rounds, and returns events.

`step` launches a round and then reads the results of the round before, so that the device never waits for the host.
The price: a round is launched before it is known which sequences the last one has ended. Tokens after the one that
ended a sequence are discarded, and its slot is free one round later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from dtgpt.inference.cache import SlotState
from dtgpt.inference.commands import (
    Begin,
    Channel,
    Command,
    Copy,
    Decode,
    Ping,
    Read,
    Release,
    follow,
)
from dtgpt.inference.options import SearchedRows
from dtgpt.inference.request import (
    NOT_FINITE,
    Alternatives,
    Event,
    PromptJob,
    Score,
    alternatives_of,
    key_of,
    variant_of,
)
from dtgpt.inference.scheduler import IDLE_TOKENS, PromptChunk, Round, Row, Scheduler, Start
from dtgpt.inference.step import Pending, Step
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams

COPIED = 1 << 16  # positions of slots that are copied at once, which takes as much memory for the time of a copy


class PromptScorer(Protocol):
    """What a capability has for log-probabilities of the tokens of prompts, at the seam `scorers`."""

    # (slot, first, ids, alternatives) -> the command that reads all of `ids` but the last one into a slot, from
    # position `first` on, and returns pending scores of all but the first one.
    command: type[Any]

    def event(self, handle: int, ids: Sequence[int], alternatives: int, chunks: Sequence[Any]) -> Event | None:
        """Return the event of a prompt, of whose chunks these are the scores; None where they are not finite."""

    def score(self, ids: list[int], event: Event, alternatives: int) -> Score:
        """Return what a user gets of that event."""


def prompt_scorer() -> PromptScorer:
    """Return what scores prompts. Raise UserError where there is nothing."""
    return seams.first("scorers", "prompt_logprobs needs what scores prompts, and this dtgpt has nothing; leave it out")


@dataclass
class _Active:
    """A request that is not finished."""

    request: PromptJob
    live: set[int]  # choices that are not finished
    ids: dict[int, list[int]]  # new tokens of each choice
    scores: list[Any] = field(default_factory=list)  # of the chunks of the prompt that are read, where asked for
    search: SearchedRows | None = None  # of a request that asks for one, once it has started


class _Launched(NamedTuple):
    """A round whose results have not been read."""

    work: Round
    scores: list[tuple[int, Pending[Any]]]  # by request
    drawn: Pending[Sampled] | None  # for its rows
    candidates: Pending[Sampled] | None  # for those of searches


class Engine:
    """Serves requests with the stages of a model. Every rank makes one; rank 0 then submits requests and takes steps,
    while all others `follow` until rank 0 releases them:

        handle = engine.submit(PromptJob([5, 900, 17], Options(max_new_tokens=8)))
        while engine.busy:
            events = engine.step()
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
    ):
        """Allocate the cache of `slots` sequences. `vocab_size`: ids that may be drawn and asked for, those of the
        tokenizer; None: of the model. `timeout`: seconds that collectives of the mesh wait, for messages. `graphs`:
        replay passes as CUDA graphs on a GPU; not for stages that are sharded over replicas. `exact`: give
        log-probabilities the bits of training's forward pass. Raise UserError where these cannot be."""
        self.stages, self.config, self.mesh, self.slots, self.timeout = stages, config, mesh, slots, timeout
        self.vocab_size = config.vocab_size if vocab_size is None else vocab_size
        kinds = seams.listed("rank_steps") if graphs and mesh.device.type == "cuda" else []
        kind: type[Step] = kinds[0] if kinds else Step
        self._rank_step = kind(stages, mesh, config, dtype, slots, vocab_size, exact)
        self._channel = Channel(mesh)
        self._submitted = 0
        self._forget()

    def _forget(self) -> None:
        """Forget all requests."""
        self._scheduler = Scheduler(self.slots, idle_tokens=IDLE_TOKENS if self.batch_tokens else None)
        self._requests: dict[int, _Active] = {}
        self._ended: list[Event] = []  # of choices that were cancelled since the last step
        self._launched: _Launched | None = None

    @property
    def batch_tokens(self) -> int:
        """The most tokens of prompts that are read in one pass; 0: each prompt has a pass of its own."""
        return self._rank_step.batch_tokens

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return bool(self._requests or self._ended or self._launched)

    def submit(self, request: PromptJob) -> int:
        """Take a request, and return the handle that its events have. Raises UserError, one sentence, for a request
        that can never be served."""
        request.validate(self.vocab_size, self.config.seq_length, self.slots)
        handle, self._submitted = self._submitted, self._submitted + 1
        choices = range(request.choices)
        self._requests[handle] = _Active(request, set(choices), {choice: [] for choice in choices})
        self._scheduler.add(
            request=handle,
            prefill=len(request.ids) - 1,
            choices=request.rows,
            new_tokens=request.options.max_new_tokens,
            searches=request.options.search is not None,
            client=request.client,
        )
        return handle

    def cancel(self, handle: int, choice: int | None = None) -> None:
        """End a choice of a request, or all of them; a search ends as a whole. The next step returns an event for
        each choice that was not finished."""
        active = self._requests.get(handle)
        if active is None:
            return
        ended = self._scheduler.cancel(handle, None if active.request.options.search else choice)
        for one in sorted(active.live) if active.request.options.search else ended:
            self._ended.append(Event(handle, one, [], [], [], "cancelled"))
            self._remove(handle, one)

    def step(self) -> list[Event]:
        """Launch the next round, and return the events of the round before."""
        with self._channel.failures_shared(self.timeout):
            work = self._scheduler.next_round()
            before, self._launched = self._launched, None if work is None else self._launch(work)
            events, self._ended = self._ended, []
            return events if before is None else events + self._collect(before)

    def ping(self) -> None:
        """Wait for an answer of all other ranks; raise UserError where one has ended. For times without steps."""
        with self._channel.failures_shared(self.timeout):
            self.command(Ping())
            self._channel.meet()

    def follow(self) -> None:
        """Execute the commands of rank 0 on another rank, until rank 0 calls `release`. Raises UserError where any
        other rank fails."""
        with self._channel.failures_shared(self.timeout):
            follow(self._rank_step, self._channel)

    def release(self) -> None:
        """Forget all requests, let the other ranks return from `follow`, and leave the stages as they were before."""
        self._forget()
        with self._channel.failures_shared(self.timeout):
            self.command(Release())

    def fail(self) -> None:
        """Let the other ranks fail, where this one cannot go on, and leave the stages as they were before."""
        self._forget()
        self._rank_step.detach()
        self._channel.close()

    def command(self, command: Command) -> Any:
        """Let every rank execute a command, on rank 0; return its result."""
        self._channel.send(command)
        return command.execute(self._rank_step)

    def _launch(self, work: Round) -> _Launched:
        # Prompts come first: a sequence that starts needs its prompt in the cache, and decodes in this very round.
        scores = self._read(work.chunks)
        self._start(work.starts)
        drawn, candidates = self._decode(work.rows, work.steps), self._decode(work.searched, steps=1)
        return _Launched(work, scores, drawn, candidates)

    def _read(self, chunks: Sequence[PromptChunk]) -> list[tuple[int, Pending[Any]]]:
        """Read chunks of prompts, several in a pass where these ask for no scores. Return the scores, by request."""
        asked = {chunk: self._requests[chunk.request].request for chunk in chunks}
        together = self._rank_step.group([chunk for chunk in chunks if not asked[chunk].options.prompt_logprobs])
        for group in together:
            self.command(Read([chunk.slot for chunk in group], [asked[chunk].ids[: chunk.stop] for chunk in group]))
        scores, done = [], {chunk for group in together for chunk in group}
        for chunk in chunks:
            one, (request, slot, first, stop) = asked[chunk], chunk
            if one.options.prompt_logprobs:  # which need the token after the chunk, too
                read = prompt_scorer().command(slot, first, one.ids[first : stop + 1], one.options.top_logprobs)
                scores.append((request, self.command(read)))
            elif chunk not in done:
                self.command(Read([slot], [one.ids[first:stop]], first))
        return scores

    def _decode(self, rows: Sequence[Row], steps: int) -> Pending[Sampled] | None:
        return self.command(Decode([row.slot for row in rows], steps, self._variant(rows))) if rows else None

    def _start(self, starts: Sequence[Start]) -> None:
        """Begin the choices of requests: the first of each in the slot that has read the prompt, the others as copies
        of it, many at once, with keys of their own."""
        copies: list[tuple[int, int, tuple[int, int]]] = []  # source, target, key
        longest = 0
        for start in starts:
            active = self._requests[start.request]
            asked, begun = active.request, list(zip(start.choices, start.slots, strict=True))
            if asked.options.search is not None:
                active.search = asked.options.search.begin(asked, start.slots)
                begun = begun[:1]  # a search begins with one row
            (choice, source), *others = begun
            payload = SlotState.encode(asked.ids, asked.options, asked.special, asked.prompt_index, choice)
            self.command(Begin(source, payload))
            if (len(copies) + len(others)) * max(longest, len(asked.ids)) > COPIED:
                self._copy(copies, longest)
                copies, longest = [], 0
            copies += [(source, slot, key_of(asked.options, asked.prompt_index, choice)) for choice, slot in others]
            longest = max(longest, len(asked.ids) - 1)
        self._copy(copies, longest)

    def _copy(self, copies: Sequence[tuple[int, int, tuple[int, int]]], length: int) -> None:
        """Copy the first `length` positions and the state of slots; copies: (source, target, key of the target)."""
        if copies:
            sources, targets, keys = zip(*copies, strict=True)
            self.command(Copy(sources, targets, length, keys))

    def _variant(self, rows: Sequence[Row]) -> Variant:
        """Return what the next steps must be able to do. Few variants, since each has graphs of its own."""
        active = [self._requests[row.request] for row in rows]
        searches = [one.search for one in active if one.search is not None]
        alternatives = max(
            [one.request.options.top_logprobs for one in active] + [one.alternatives for one in searches]
        )
        rounded = 1 << (alternatives - 1).bit_length() if alternatives else 0
        variant = variant_of([one.request.options for one in active], min(rounded, self.vocab_size))
        return variant._replace(beams=bool(searches))

    def _collect(self, launched: _Launched) -> list[Event]:
        events, work = list[Event](), launched.work
        for request, pending in launched.scores:
            if request in self._requests:
                self._requests[request].scores.append(pending.wait())
        for start in work.starts:
            if start.request in self._requests:
                events += self._begin(start)
        if launched.drawn is not None:
            results = launched.drawn.wait()
            tokens, logprobs = results.tokens.tolist(), results.logprobs.tolist()  # of all rows at once
            for index, row in enumerate(work.rows):
                active = self._requests.get(row.request)
                if active is not None and row.choice in active.live:
                    count = active.request.options.top_logprobs
                    likeliest = alternatives_of(Sampled(*(part[index] for part in results)), count) if count else []
                    events += self._extend(row, tokens[index], logprobs[index], likeliest)
        if launched.candidates is not None:
            results = launched.candidates.wait()
            for request in dict.fromkeys(row.request for row in work.searched):
                if request in self._requests:
                    own = {row.choice: index for index, row in enumerate(work.searched) if row.request == request}
                    events += self._search(request, own, results)
        return events

    def _search(self, request: int, rows: dict[int, int], results: Sampled) -> list[Event]:
        """Let a search choose from the results of its choices, whose `rows` those are. Return the events of its
        sequences where it is over."""
        active = self._requests[request]
        assert active.search is not None
        if results.logprobs[list(rows.values())].isnan().any():
            return self._break_off(request)
        ids, logprobs = results.top_ids[:, 0].tolist(), results.top_logprobs[:, 0].tolist()
        candidates = {choice: list(zip(ids[row], logprobs[row], strict=True)) for choice, row in rows.items()}
        if chosen := active.search.advance(candidates, self.command):
            self._scheduler.go_on(request, chosen)
            return []
        for choice in range(active.request.rows):
            self._scheduler.finish(request, choice)
        del self._requests[request]
        return active.search.events(request)

    def _begin(self, start: Start) -> list[Event]:
        """Return the event of the prompt's scores, if any, and those of choices that want no tokens."""
        active, events = self._requests[start.request], list[Event]()
        asked = active.request
        if asked.options.prompt_logprobs:
            event = prompt_scorer().event(start.request, asked.ids, asked.options.top_logprobs, active.scores)
            if event is None:
                return self._break_off(start.request)
            events.append(event)
        if asked.options.max_new_tokens == 0:
            for choice in sorted(active.live):
                events.append(Event(start.request, choice, [], [], [], "length"))
                self._scheduler.finish(start.request, choice)
                self._remove(start.request, choice)
        return events

    def _extend(
        self, row: Row, tokens: list[int], logprobs: list[float], alternatives: list[Alternatives]
    ) -> list[Event]:
        """Add new tokens to a choice, up to that which ends it."""
        active = self._requests[row.request]
        new, finish = active.request.accept(active.ids[row.choice], tokens, logprobs)
        if finish == NOT_FINITE:
            return self._break_off(row.request)
        event = Event(row.request, row.choice, tokens[:new], logprobs[:new], alternatives[:new], finish)
        active.ids[row.choice] += event.ids
        if finish:
            self._scheduler.finish(row.request, row.choice)
            self._remove(row.request, row.choice)
        return [event]

    def _break_off(self, handle: int) -> list[Event]:
        """End all choices of a request at logits that are not finite: those of the others are, or would be, too."""
        self._scheduler.cancel(handle)
        return [Event(handle, choice, [], [], [], NOT_FINITE) for choice in sorted(self._requests.pop(handle).live)]

    def _remove(self, request: int, choice: int) -> None:
        live = self._requests[request].live
        live.remove(choice)
        if not live:
            del self._requests[request]
