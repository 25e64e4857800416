"""An engine and a scheduler for jobs of which some are guided: before each of their steps the host says which ids may
come, as it knows them when it has seen the ids before.

A guided row waits after each step until its guide has seen the result, and others run ahead as they do without it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dtgpt.inference.cache import ALL, SlotState
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import PromptJob, SequenceUpdate
from dtgpt.inference.scheduler import Row, Scheduler, Start
from dtgpt.inference.sequence import ActiveJob
from dtgpt.inference.step import Step
from dtgpt.util.hardware import to_device


class Guide(Protocol):
    """Which ids may come next in a sequence."""

    ended: bool  # whether the text is complete, and nothing may come

    def allowed(self) -> Tensor:
        """Return int32 `[W]` on the CPU: bit i % 32 of word i // 32 says whether id i may come next."""

    def take(self, token: int) -> bool:
        """Take the next id. Return False where it is none of these: rules have banned all of them."""


def allow(step: Step, slots: Sequence[int], words: Tensor | list[list[int]]) -> None:
    """Let the next token of each slot be one of the ids whose bits are set in its row of `words`, on a rank."""
    allow_ids(step.cache.state, slots, torch.as_tensor(words, dtype=torch.int32), step.vocab_size)


def allow_ids(state: SlotState, slots: Sequence[int], words: Tensor, vocab_size: int) -> None:
    """Write int32 `[B, W]` into the rows of `slots`, with no id from `vocab_size` on."""
    width = -(-vocab_size // 32)
    if not state.allowed.shape[1]:  # once: CUDA graphs read this memory
        state.allowed = torch.full((len(state.token), width), ALL, dtype=torch.int32, device=state.device)
    fitted = torch.zeros(len(words), width, dtype=torch.int32)
    fitted[:, : words.shape[1]] = words[:, :width]
    state.allowed[state.rows([slots])[0]] = to_device(fitted, state.device)


class GuidedScheduler(Scheduler):
    """A scheduler of requests of which some are guided."""

    def allow_step(self, request: int, choice: int) -> None:
        """Let a guided row take the next step."""
        self._running[request, choice].left = 1

    @property
    def waits_for_host(self) -> bool:
        return super().waits_for_host or any(_is_guided(running.asked) for running in self._running.values())

    def _start(self) -> list[Start]:
        starts = super()._start()
        for start in starts:
            for choice, _ in enumerate(start.slots):
                running = self._running[start.request, choice]
                running.left = 1 if _is_guided(running.asked) else running.left
        return starts


class GuidedEngine(Engine):
    """An engine for jobs of which some are guided."""

    def _forget(self) -> None:
        super()._forget()
        self._guides: dict[tuple[int, int], Guide] = {}  # by job and choice, of those that have not ended

    def submit(self, job: PromptJob) -> int:
        guides = list[Guide]()
        if _is_guided(job):
            whole = replace(job, special=self.special or job.special)
            guides = [whole.options.guide(whole, self.tokenizer) for _ in range(job.choices)]
        number = super().submit(job)
        self._guides |= {(number, choice): guide for choice, guide in enumerate(guides)}
        return number

    def drop(self, active: ActiveJob) -> None:
        super().drop(active)
        for choice in range(active.job.choices):
            self._guides.pop((active.number, choice), None)

    def _start(self, starts: Sequence[Start]) -> None:
        super()._start(starts)
        self._allow([Row(one.request, choice, slot) for one in starts for choice, slot in enumerate(one.slots)])

    def _allow(self, rows: Sequence[Row]) -> None:
        """Tell all ranks which ids may come next in those of the rows that are guided."""
        words = {row.slot: self._guides[row[:2]].allowed() for row in rows if row[:2] in self._guides}
        if words:
            self.command(allow, list(words), torch.stack(list(words.values())))

    def _accept(
        self, active: ActiveJob, choice: int, tokens: list[int], logprobs: list[float]
    ) -> tuple[int, str | None]:
        new, finish = super()._accept(active, choice, tokens, logprobs)
        guide = self._guides.get((active.number, choice))
        if guide is None or not new or finish == "stop":
            return new, finish
        if not guide.take(tokens[0]):  # rules have banned all that may come
            return 0, "length"
        return new, "stop" if guide.ended else finish

    def _extend_rows(self, rows: Sequence[Row], drawn: Any) -> list[SequenceUpdate]:
        updates = super()._extend_rows(rows, drawn)
        guided = [row for row in rows if row[:2] in self._guides] if self._guides else []
        live = [row for row in guided if self._goes_on(row)]
        for row in live:
            self.scheduler.allow_step(row.request, row.choice)  # type: ignore[attr-defined]
        for row in set(guided) - set(live):
            del self._guides[row[:2]]
        self._allow(live)
        return updates

    def _goes_on(self, row: Row) -> bool:
        active = self._active.get(row.request)
        return active is not None and active.sequences[row.choice].finish is None


def _is_guided(asked: Any) -> bool:
    """Return whether a `PromptJob` is guided."""
    return asked is not None and asked.options.is_guided
