"""Which process of a run is lost: decided from heartbeats and verdicts, without threads, sockets or a clock of its own.

Times are seconds of any clock that does not go back. Time in which this process was suspended counts as a moment, so
that it accuses nobody of its own silence.
"""

import json
from typing import NamedTuple

from torch.distributed import Store

BEAT = 2.0  # seconds between two heartbeats
TICK = 1.0  # seconds between two looks at whether the store answers
ENDED = "ended"  # in place of a heartbeat: the process has finished its part of the run


class Accuse(NamedTuple):
    """Write a verdict into the store, unless there is one: the first says what happened."""

    verdict: str

    def write(self, store: Store) -> None:
        store.compare_set("verdict", "", self.verdict)


class End(NamedTuple):
    """End this process, because of what the rank `by` has found."""

    text: str
    by: int


class _Clock:
    """Measure the seconds between calls, each at most twice the `interval` in which they are due."""

    def __init__(self, now: float, interval: float):
        self._last, self._most = now, 2 * interval

    def passed(self, now: float) -> float:
        seconds = min(now - self._last, self._most)
        self._last = now
        return seconds


class Peers:
    """What one process knows of the others, and what it must do: follow the process of the next rank, and obey the
    verdicts of all.

    gone: whether a closed connection says that the next process has ended.

    The thread of the heartbeat calls `own_beat` and `hear`, another one `wait`, and the main thread `fail`. `hear` and
    `wait` write `_alone`, the seconds since the store answered: if one write is lost, it is wrong by an interval at
    most. `_step` is written as a whole, by `own_beat` and `fail`.
    """

    def __init__(self, rank: int, host: str, next_rank: int, next_host: str, lost_after: float, now: float):
        """lost_after: seconds without a sign of life after which the next process, or the store, is lost."""
        self.rank, self.host, self.gone = rank, host, False
        self._next_rank, self._next_host, self._lost_after = next_rank, next_host, lost_after
        self._beats, self._step, self._heard = 0, 0, ""
        self._silent = self._alone = 0.0
        self._since_beat, self._since_tick = _Clock(now, BEAT), _Clock(now, TICK)

    def own_beat(self, step: int) -> str:
        """Return the next heartbeat of this process: a count, so that it differs from the last one, and its step."""
        self._beats, self._step = self._beats + 1, step
        return f"{self._beats} {step}"

    def hear(self, now: float, beat: str, verdict: str) -> Accuse | End | None:
        """Take the last heartbeat of the next process and the verdict, "" where there is none, from the store."""
        passed = self._since_beat.passed(now)
        self._alone = 0.0
        self._silent = self._silent + passed if beat == self._heard else 0.0
        self._heard = beat
        if verdict:
            return End(**json.loads(verdict))
        if beat == ENDED:
            self.gone = False
        elif self.gone or self._silent >= self._lost_after:
            why = "its process has ended" if self.gone else f"no sign of life for {self._lost_after:g} s"
            step = beat.partition(" ")[2]
            return self._accuse(f"rank {self._next_rank} on {self._next_host} (last step {step}) is lost: {why}")
        return None

    def hear_nothing(self, now: float, store_has_ended: bool) -> End | None:
        """Take note that the store did not answer. store_has_ended: for certain, and rank 0 had it. Rank 1 then reports
        the loss, since the first rank of rank 0's node may be the lost one."""
        self._since_beat.passed(now)
        lost = f"rank 0 (last step {self._step}) is lost: its process has ended"
        return End(lost, by=1) if store_has_ended else None

    def wait(self, now: float, store: str) -> End | None:
        """Take note of the time. End this process where the store, at the address `store`, has not answered."""
        self._alone += self._since_tick.passed(now)
        if self._alone < self._lost_after + BEAT:
            return None
        what = f"has not reached the store of the run at {store} for {self._lost_after:g} s"
        return End(f"{self._name()} {what}: its node, or the network, is lost", by=self.rank)

    def fail(self, reason: str, step: int) -> Accuse:
        """Return the verdict that this process ends with an error after this step."""
        self._step = step
        return self._accuse(f"{self._name()} ended: {reason}")

    def _name(self) -> str:
        return f"rank {self.rank} on {self.host} (last step {self._step})"

    def _accuse(self, text: str) -> Accuse:
        return Accuse(json.dumps({"text": text, "by": self.rank}))
