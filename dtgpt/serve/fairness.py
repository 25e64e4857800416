"""Slots are shared fairly between clients.

Next comes the client for which the fewest tokens were read and generated (the virtual token counter of Sheng et al.,
2024), and of its requests the one that came first.
"""

from typing import Any

from dtgpt.inference.scheduler import PromptChunk, Queued, Scheduler

MOST_CLIENTS = 1000  # whose tokens are kept; of more, those without a request begin anew


def client_of(asked: Any) -> str:
    """Return who asked for a `PromptJob`; empty where nothing is said of it."""
    return "" if asked is None else asked.client


class FairScheduler(Scheduler):
    """A scheduler that counts the tokens of each client."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._clients: list[str] = []  # that wait, in the order in which they began to
        self._tokens: dict[str, int] = {}  # of each client, from where others were when it came
        self._fewest = 0  # tokens of the client that was admitted last

    def add(self, request: int, prefill: int, choices: int, new_tokens: int, asked: Any = None) -> None:
        # Clients come and go for days: of many, only those with a request are remembered.
        if len(self._tokens) > MOST_CLIENTS:
            at_work = {client_of(job.asked) for job in self._prefilling}
            at_work |= {client_of(running.asked) for running in self._running.values()}
            self._tokens = {name: self._tokens[name] for name in at_work.union(self._clients)}
        client = client_of(asked)
        if client not in self._clients:  # who did not wait has no claim to what others used meanwhile
            self._clients.append(client)
            self._tokens[client] = max(self._fewest, self._tokens.get(client, 0))
        super().add(request, prefill, choices, new_tokens, asked)

    def cancel(self, request: int) -> None:
        super().cancel(request)
        self._forget_clients()

    def _first(self) -> Queued:
        client = min(self._clients, key=self._tokens.__getitem__)
        return next(job for job in self._waiting if client_of(job.asked) == client)

    def _take(self, job: Queued) -> None:
        super()._take(job)
        self._fewest = self._tokens[client_of(job.asked)]
        self._forget_clients()

    def _forget_clients(self) -> None:
        """Keep the clients that wait."""
        waiting = {client_of(job.asked) for job in self._waiting}
        self._clients = [client for client in self._clients if client in waiting]

    def _count(self, asked: Any, tokens: int) -> None:
        self._tokens[client_of(asked)] += tokens

    def _take_chunks(self) -> list[PromptChunk]:
        self._prefilling.sort(key=lambda job: self._tokens[client_of(job.asked)])
        return super()._take_chunks()
