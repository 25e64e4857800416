"""All shapes of steps once before a server listens, so that its first answers are as fast as all others."""

from typing import Any

from dtgpt.inference.base_options import MOST_SEQUENCES
from dtgpt.inference.captured.prompt_batches import PROMPT_LENGTHS, batch_sizes
from dtgpt.inference.captured.step import ROWS_OF_SHORT_STEPS
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob
from dtgpt.inference.scheduler import LONGEST_ROUND
from dtgpt.inference.step import BUCKETS

SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"top_k": 40})  # of most requests; graphs of others are made on demand


def warm_up(engine: Engine, slots: int, positions: int, graphs: bool) -> None:
    """Run requests of every shape that graphs are captured for: numbers of rows up to `slots`, and lengths of prompts
    up to `positions`, alone and together. Without `graphs`, run one small request, which loads what is loaded on first
    use."""
    begin = min(2, positions - 1)  # tokens of a short prompt
    if not begin:  # a model of one position scores prompts, and generates nothing
        return
    if not graphs:
        _run(engine, [_job(begin, min(2, positions - begin))])
        return
    for length in [size for size in PROMPT_LENGTHS if size <= positions]:
        prompt = _job(min(length + 1, positions - 1), 1)  # all of it but its last token is prefilled
        for size in batch_sizes(length, engine.batch_tokens):
            if size <= slots:
                _run(engine, [prompt] * size)
    rows = sorted({min(size, slots) for size in BUCKETS})
    for sampling in SAMPLINGS:
        for size in rows:
            parts = [min(MOST_SEQUENCES, size - done) for done in range(0, size, MOST_SEQUENCES)]
            # A sequence begins with a round of one step. Few rows have a graph of a whole round, too.
            steps = 1 + LONGEST_ROUND if size <= ROWS_OF_SHORT_STEPS else 2
            _run(engine, [_job(begin, min(steps, positions - begin), part, sampling) for part in parts])


def _job(tokens: int, new_tokens: int, rows: int = 1, sampling: dict[str, Any] = SAMPLINGS[0]) -> PromptJob:
    options = Options(max_new_tokens=new_tokens, num_return_sequences=rows, ends=False, **sampling)
    return PromptJob([0] * tokens, options)


def _run(engine: Engine, jobs: list[PromptJob]) -> None:
    for job in jobs:
        engine.submit(job)
    while engine.busy:  # logits that are not finite end a request, and not the server
        engine.step()
