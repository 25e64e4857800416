"""Log-probabilities of the tokens of prompts: an engine that reads these prompts by a command of its own.

A chunk of a prompt is scored as it is read. The head computes logits of all its tokens, which are gathered and scored
a few rows at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.inference.cache import Chunk
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import NOT_FINITE, SequenceUpdate, alternatives_of
from dtgpt.inference.scheduler import PromptChunk
from dtgpt.inference.scores.options import Score
from dtgpt.inference.scores.tokens import Scores, token_scores
from dtgpt.inference.sequence import ActiveJob
from dtgpt.inference.step import Pending, Step, exact_bits, gather_columns

SCORED_ROWS = 256  # rows of logits that are gathered and scored at once
TYPES = (torch.float32, torch.bool, torch.int64, torch.float32)  # of the fields of `Scores`


@torch.no_grad()
def read_and_score(step: Step, slot: int, first: int, ids: Sequence[int], alternatives: int) -> Pending[Scores]:
    """Read a chunk of a prompt, all of `ids` but the last one, and score all but the first one, with the ids and
    log-probabilities of the `alternatives` likeliest tokens in place of each."""
    step.attach()
    tokens = step.tensor(ids)
    count = len(tokens) - 1
    logits = step.chunk_logits(tokens[:-1], Chunk(slot, first, count), head_rows=count)
    scores = None if logits is None else _scores(step, logits, tokens[1:], alternatives)
    return Pending(step.from_last_stage(Scores, TYPES, scores, count, alternatives))


def _scores(step: Step, logits: Tensor, targets: Tensor, alternatives: int) -> Scores:
    """Return the scores of targets `[T]` under this rank's columns of logits `[T, V_local]`."""
    pieces, config, mesh = [], step.config, step.mesh
    for first in range(0, len(targets), SCORED_ROWS):
        own, wanted = logits[first : first + SCORED_ROWS], targets[first : first + SCORED_ROWS]
        columns = gather_columns(own, mesh, config.padded_vocab_size)
        scores = token_scores(columns, wanted, config.vocab_size, alternatives)
        if step.exact:
            scores = scores._replace(**exact_bits().exact_scores(own, wanted, scores.top_ids, step.stages, mesh))
        pieces.append(scores)
    return Scores(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


class ScoringEngine(Engine):
    """An engine for jobs that ask for scores of their prompts, which are read by themselves: a pass over several has
    logits of none."""

    def _forget(self) -> None:
        super()._forget()
        self._chunks: dict[int, list[Scores]] = {}  # of prompts that are being read, by number of the job

    def drop(self, active: ActiveJob) -> None:
        super().drop(active)
        self._chunks.pop(active.number, None)

    def _read(self, chunks: Sequence[PromptChunk]) -> list[tuple[int, Pending[Scores]]]:
        """Return the scores, by number of the job."""
        jobs = {chunk: self._active[chunk.request].job for chunk in chunks}
        super()._read([chunk for chunk, job in jobs.items() if not job.options.prompt_logprobs])
        scores = []
        for chunk, job in jobs.items():
            if job.options.prompt_logprobs:  # which need the token after the chunk, too
                ids, alternatives = job.ids[chunk.first : chunk.stop + 1], job.options.top_logprobs
                read = self.command(read_and_score, chunk.slot, chunk.first, ids, alternatives)
                scores.append((chunk.request, read))
        return scores

    def _take_read(self, read: list[tuple[int, Pending[Scores]]]) -> None:
        for number, pending in read:
            if number in self._active:
                self._chunks.setdefault(number, []).append(pending.wait())

    def _begin(self, active: ActiveJob) -> list[SequenceUpdate]:
        """Take the scores of the prompt, if any, before its choices begin."""
        job = active.job
        if job.options.prompt_logprobs:
            active.prompt = score_of(job.ids, job.options.top_logprobs, self._chunks.pop(active.number, []))
            if active.prompt is None:
                return self.end_all(active, NOT_FINITE)
        return super()._begin(active)


def score_of(ids: list[int], alternatives: int, chunks: Sequence[Scores]) -> Score | None:
    """Return the scores of a prompt, of whose chunks these are the results; None where they are not finite."""
    if any(chunk.logprobs.isnan().any() for chunk in chunks):
        return None
    return Score(
        ids=ids,
        logprobs=[value for chunk in chunks for value in chunk.logprobs.tolist()],
        greedy=[flag for chunk in chunks for flag in chunk.greedy.tolist()],
        alternatives=[row for chunk in chunks for row in alternatives_of(chunk, alternatives)] if alternatives else [],
    )
