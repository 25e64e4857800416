"""Many jobs on an engine, as many ahead as keep its slots filled."""

from collections import deque
from collections.abc import Iterable, Iterator

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import Completion, PromptJob

AHEAD = 2  # jobs that wait or run, for each slot


def run_jobs(engine: Engine, jobs: Iterable[PromptJob]) -> Iterator[list[Completion]]:
    """Yield the sequences of each job, in the order of the jobs, as they are finished."""
    source, order = iter(jobs), deque[int]()
    running, done = set[int](), dict[int, list[Completion]]()
    while True:
        while len(running) < AHEAD * engine.slots and (job := next(source, None)) is not None:
            order.append(engine.submit(job))
            running.add(order[-1])
        if not order:
            return
        for update in engine.finite_step():
            if update.completions is not None:
                done[update.job] = update.completions
                running.discard(update.job)
        while order and order[0] in done:
            yield done.pop(order.popleft())


def segments(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return the text of each token alone: a character that two tokens share shows as U+FFFD in both."""
    return [tokenizer.decode([i]) for i in ids]
