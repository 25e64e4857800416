"""All shapes of steps once before a server listens, so that its first answers are as fast as all others."""

from typing import Any

from dtgpt.inference.options import MOST_SEQUENCES, Options
from dtgpt.inference.runner import BUCKETS, PROMPT_LENGTHS
from dtgpt.inference.session import Job, Session

SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"top_k": 40})  # of most requests; graphs of others are made on demand


def warm_up(session: Session, slots: int, positions: int, graphs: bool) -> None:
    """Run requests of every shape that graphs are captured for: numbers of rows up to `slots`, and lengths of prompts
    up to `positions`. Without `graphs`, run one small request, which loads what is loaded on first use."""
    if not graphs:
        _run(session, [_job(2, min(2, positions - 2))])
        return
    for length in PROMPT_LENGTHS:
        if length + 2 <= positions:
            _run(session, [_job(length + 1, 1)])
    rows = sorted({min(size, slots) for size in BUCKETS})
    for sampling in SAMPLINGS:
        for size in rows:
            parts = [min(MOST_SEQUENCES, size - done) for done in range(0, size, MOST_SEQUENCES)]
            _run(session, [_job(2, 2, part, sampling) for part in parts])


def _job(tokens: int, new_tokens: int, rows: int = 1, sampling: dict[str, Any] = SAMPLINGS[0]) -> Job:
    options = Options(max_new_tokens=new_tokens, num_return_sequences=rows, ends=False, **sampling)
    return Job([0] * tokens, options)


def _run(session: Session, jobs: list[Job]) -> None:
    for _ in session.run(jobs):
        pass
