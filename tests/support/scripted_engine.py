"""An engine that writes what a test tells it to, in rounds, as the real one would."""

from collections.abc import Callable
from dataclasses import replace

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import PromptJob, SequenceUpdate
from dtgpt.inference.scores.options import Score
from dtgpt.inference.sequence import ActiveJob

Script = Callable[[PromptJob, int], list[int]]  # (job, choice) -> endless or long enough ids


class ScriptedEngine(Engine):
    """Serves jobs in turn, `slots` rows at once, `steps` tokens a step. The log-probability of the i-th new token is
    -i."""

    def __init__(
        self,
        script: Script,
        slots: int = 4,
        steps: int = 3,
        tokenizer: Tokenizer | None = None,
        special: SpecialIds | None = None,
    ):
        self.script, self.slots, self.steps = script, slots, steps
        self.tokenizer, self.special = tokenizer, special
        self.requests: list[PromptJob] = []
        self.waiting: list[int] = []
        self.running: dict[tuple[int, int], int] = {}  # (number, choice) -> tokens so far
        self.released = False
        self.pings = 0
        self._active, self._ended = {}, []

    def submit(self, job: PromptJob) -> int:
        job, number = replace(job, special=self.special or job.special), len(self.requests)
        self.requests.append(job)
        self.waiting.append(number)
        self._active[number] = ActiveJob(number, job, self.tokenizer)
        return number

    def cancel(self, number: int) -> None:
        for row in [row for row in self.running if row[0] == number]:
            self._ended.append(self._end(*row, "cancelled"))
        if number in self.waiting:
            self.waiting.remove(number)
            self._ended += [self._end(number, i, "cancelled") for i in range(self.requests[number].choices)]

    def step(self) -> list[SequenceUpdate]:
        updates, self._ended = self._ended, []
        while self.waiting and len(self.running) + self.requests[self.waiting[0]].choices <= self.slots:
            number = self.waiting.pop(0)
            job = self.requests[number]
            if job.options.prompt_logprobs:
                count = len(job.ids) - 1
                score = Score(ids=job.ids, logprobs=[-1.0] * count, greedy=[True] * count)
                self._active[number].prompt = score
            self.running |= {(number, choice): 0 for choice in range(job.choices)}
        return updates + [self._extend_row(row) for row in list(self.running)]

    def _extend_row(self, row: tuple[int, int]) -> SequenceUpdate:
        job, done = self.requests[row[0]], self.running[row]
        script, new, finish = self.script(job, row[1]), [], None
        while finish is None and len(new) < self.steps:
            if done + len(new) == job.options.max_new_tokens:
                finish = "length"
                break
            new.append(script[done + len(new)])
            before = script[done + len(new) - 2] if done + len(new) > 1 else job.ids[-1]
            if job.options.ends_at(job.special, before, new[-1], done + len(new) - 1):
                finish = "stop"
        if finish is None and done + len(new) == job.options.max_new_tokens:
            finish = "length"
        self.running[row] += len(new)
        return self._end(*row, finish, new, [-float(i) for i in range(done, done + len(new))])

    def _end(self, number: int, choice: int, finish: str | None, *drawn: list) -> SequenceUpdate:
        active = self._active[number]
        new, logprobs = drawn or ([], [])
        alternatives: list = [[] for _ in new] if active.job.options.top_logprobs else []
        update = active.add(choice, finish, new, logprobs, alternatives)
        if update.finish:
            self.running.pop((number, choice), None)
        if not active.live:
            del self._active[number]
        return update

    def ping(self) -> None:
        self.pings += 1

    def release(self) -> None:
        self.released = True
        self.waiting, self.running = [], {}
