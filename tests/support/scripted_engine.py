"""An engine that writes what a test tells it to, in rounds, as the real one would."""

from collections.abc import Callable

from dtgpt.inference.request import PROMPT, Event, PromptJob

Script = Callable[[PromptJob, int], list[int]]  # (request, choice) -> endless or long enough ids


class ScriptedEngine:
    """Serves requests in turn, `slots` rows at once, `steps` tokens a step. The log-probability of the i-th new token
    is -i."""

    def __init__(self, script: Script, slots: int = 4, steps: int = 3):
        self.script, self.slots, self.steps = script, slots, steps
        self.requests: list[PromptJob] = []
        self.waiting: list[int] = []
        self.running: dict[tuple[int, int], int] = {}  # (handle, choice) -> tokens so far
        self.ended: list[Event] = []
        self.released = False
        self.pings = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def submit(self, request: PromptJob) -> int:
        self.requests.append(request)
        self.waiting.append(len(self.requests) - 1)
        return len(self.requests) - 1

    def cancel(self, handle: int, choice: int | None = None) -> None:
        for row in [row for row in self.running if row[0] == handle and choice in (None, row[1])]:
            del self.running[row]
            self.ended.append(Event(*row, [], [], [], "cancelled"))
        if handle in self.waiting and choice is None:
            self.waiting.remove(handle)
            self.ended += [Event(handle, i, [], [], [], "cancelled") for i in range(self.requests[handle].choices)]

    def step(self) -> list[Event]:
        events, self.ended = self.ended, []
        while self.waiting and len(self.running) + self.requests[self.waiting[0]].choices <= self.slots:
            handle = self.waiting.pop(0)
            request = self.requests[handle]
            if request.options.prompt_logprobs:
                scores = [-1.0] * (len(request.ids) - 1)
                events.append(Event(handle, PROMPT, request.ids[1:], scores, [], greedy=(True,) * len(scores)))
            self.running |= {(handle, choice): 0 for choice in range(request.choices)}
        for row in list(self.running):
            events.append(self._extend(row))
        return events

    def _extend(self, row: tuple[int, int]) -> Event:
        request, done = self.requests[row[0]], self.running[row]
        script, new, finish = self.script(request, row[1]), [], None
        while finish is None and len(new) < self.steps:
            if done + len(new) == request.options.max_new_tokens:
                finish = "length"
                break
            new.append(script[done + len(new)])
            before = script[done + len(new) - 2] if done + len(new) > 1 else request.ids[-1]
            if request.ends_with(before, new[-1], done + len(new) - 1):
                finish = "stop"
        if finish is None and done + len(new) == request.options.max_new_tokens:
            finish = "length"
        self.running[row] += len(new)
        if finish:
            del self.running[row]
        logprobs = [-float(i) for i in range(done, done + len(new))]
        return Event(*row, new, logprobs, [[] for _ in new], finish)

    def ping(self) -> None:
        self.pings += 1

    def release(self) -> None:
        self.released = True
