"""Log-probabilities of the tokens of prompts, as the engine asks for them: prompts are read by a command of their own.

A chunk of a prompt is scored as it is read. The head computes logits of all its tokens, which are gathered and scored
a few rows at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtgpt.inference.cache import Chunk
from dtgpt.inference.request import Score, alternatives_of
from dtgpt.inference.scores.tokens import Scores, token_scores
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
            scores = scores._replace(**exact_bits().exact_scores(own, wanted, scores.top_ids, mesh, config))
        pieces.append(scores)
    return Scores(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


class _Scorer:
    command = staticmethod(read_and_score)

    def score(self, ids: list[int], alternatives: int, chunks: Sequence[Scores]) -> Score | None:
        if any(chunk.logprobs.isnan().any() for chunk in chunks):
            return None
        return Score(
            ids=ids,
            logprobs=[value for chunk in chunks for value in chunk.logprobs.tolist()],
            greedy=[flag for chunk in chunks for flag in chunk.greedy.tolist()],
            alternatives=[row for chunk in chunks for row in alternatives_of(chunk, alternatives)]
            if alternatives
            else [],
        )


SCORER = _Scorer()
