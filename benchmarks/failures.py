"""Does a run over several nodes survive what happens to clusters, without a person, and on the same curve?

    python benchmarks/failures.py                                   # five failures, ten times each
    python benchmarks/failures.py --failures link --times 5
    python benchmarks/failures.py --failures node link --outside    # the rendezvous is on a machine that stays

The nodes are network namespaces of this machine (root only), joined by a bridge; the backend is gloo. On each node a
loop starts torchrun again until it succeeds, as docs/cluster.md shows. A run of a tiny model, with a checkpoint every
10 steps, meets five failures of a kind, one after the other: each at a random moment, at a random step or while it
starts again. Every second one hits the node that hosts the rendezvous. Of each kind, every second run keeps its number
of nodes (it waits for the node that is gone), the others go on with the nodes that are left, and take the lost one in
when it is back.

    worker      a training process is killed (SIGKILL)
    agent       a torchrun is killed
    node        a node loses power, and boots again 3 to 20 s later
    link        a cable is out for 2 to 60 s
    partition   one of three nodes cannot reach the others for 2 to 60 s, with all links up

Prints a row for each kind: failures, runs that ended by themselves at their last step, the longest time from a failure
(or from its end, where the nodes that are needed were out) to a step that the run had not done before, the most steps
that were done again, and the largest relative difference of a loss from those of an uninterrupted run of one process.
Runs that keep their number of nodes must have the very losses of an uninterrupted run of as many processes.
The exit code is 1 where a run does not end, repeats more than the interval of checkpoints and what 60 s hold, or leaves
the curve.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.node_runs import OUTSIDE, STORE, NodeRun, reference
from tests.support.nodes import Node, Nodes, why_no_nodes

FAILURES = ("worker", "agent", "node", "link", "partition")
PER_RUN = 5  # failures that a run meets
STEP = 0.5  # seconds
STEPS = 140
INTERVAL = 10  # steps from one checkpoint to the next
IMPATIENT = 0.3  # how often the next failure does not wait until the run has gone on
LIMIT = 300.0  # seconds for a run to go on, or to end
TOLERANCE = 1e-5


def nodes_of(kind: str) -> int:
    return 3 if kind == "partition" else 2


def strike(kind: str, run: NodeRun, node: Node, chance: random.Random) -> float:
    """Let a failure happen to the node, and what it broke come back without help of a person. Returns for how many
    seconds the node was out."""
    outage = chance.uniform(3, 20) if kind == "node" else chance.uniform(2, 60)
    if kind == "worker":
        kill(node.workers, chance)
    elif kind == "agent":
        kill(node.agents, chance)
    elif kind == "node":
        node.kill()
        time.sleep(outage)
        node.boot()
        run.start(node)  # as a service of its operating system would
    elif kind == "link":
        node.cut()
        time.sleep(outage)
        node.restore()
    else:
        run.nodes.partition(node.index)
        time.sleep(outage)
        run.nodes.heal()
    return 0.0 if kind in ("worker", "agent") else outage


def kill(processes: Callable[[], list[int]], chance: random.Random) -> None:
    end = time.monotonic() + LIMIT
    while not (found := processes()):  # it is just being started
        if time.monotonic() > end:
            raise TimeoutError("there was no process to kill")
        time.sleep(0.05)
    os.kill(chance.choice(found), signal.SIGKILL)


class Progress:
    """What is seen of a run from outside: when it took a step that it had not taken before, and what it did again."""

    def __init__(self, run: NodeRun):
        self._run, self._ended = run, threading.Event()
        self.step, self.again, self._starts = 0, 0, 0
        self.times = [time.monotonic()]
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            if (step := self._run.step()) > self.step:
                self.step = step
                self.times.append(time.monotonic())
            starts = self._run.resumed()
            if len(starts) > self._starts:
                self.again = max(self.again, *(self.step - start for start in starts[self._starts :]))
                self._starts = len(starts)

    def longest_pause(self, since: float) -> float:
        """Return the longest time, in seconds, without a new step from `since` on."""
        marks = [since, *(moment for moment in self.times if moment > since), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(marks))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="failures-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def attempt(kind: str, number: int, seed: int, outside: bool) -> dict[str, Any]:
    """Return what happened to one run: a dict for JSON."""
    chance = random.Random(f"{kind} {number} {seed}")
    count, elastic = nodes_of(kind), number % 2 == 1
    found: dict[str, Any] = {"kind": kind, "number": number, "elastic": elastic, "failures": [], "ended": False}
    with folder() as path, Nodes(count, path) as nodes:
        place = {"host": "login", "settings": OUTSIDE} if outside else {}
        if outside:
            nodes.start_on_login(sys.executable, "-c", STORE)
        run = NodeRun(nodes, f"1:{count}" if elastic else str(count), "--steps", str(STEPS), step_seconds=STEP, **place)
        run.start()
        progress = Progress(run)
        try:
            nodes.wait_until(lambda: progress.step > INTERVAL, LIMIT, "the first checkpoint")
            for index in range(PER_RUN):
                node = nodes[0 if (index + number) % 2 == 0 else chance.randrange(1, count)]
                found["failures"].append(one_failure(kind, run, progress, node, chance))
            nodes.wait_until(lambda: progress.step == STEPS, LIMIT, "the last step")
            nodes.wait_until(run.ended, LIMIT, "the end")
            found["ended"] = True
        except TimeoutError as error:
            found["error"] = str(error)[:200]
        progress.end()
        found |= {"losses": run.losses(), "again": progress.again, "starts": len(run.resumed())}
        if not found["ended"]:
            Path(f"failures-{kind}-{number}.log").write_text("\n".join(f"--- {n.name}\n{n.output()}" for n in nodes))
    return found


def one_failure(kind: str, run: NodeRun, progress: Progress, node: Node, chance: random.Random) -> dict[str, Any]:
    """Let one failure happen, and wait until the run has gone on, or now and then not, so that the next failure finds
    it while it starts again."""
    time.sleep(chance.uniform(0, STEP * INTERVAL))
    began, step = time.monotonic(), progress.step
    outage = strike(kind, run, node, chance)
    after = time.monotonic()
    if chance.random() < IMPATIENT:
        time.sleep(chance.uniform(0, 15))
    else:
        # An orphan takes further steps, and a short outage stops nothing.
        starts, patience = len(run.resumed()), step + INTERVAL

        def gone_on() -> bool:
            again = outage or len(run.resumed()) > starts or progress.step > patience
            return progress.step == STEPS or (progress.step > step and bool(again))

        run.nodes.wait_until(gone_on, LIMIT, f"a step after {step}")
    pause = progress.longest_pause(began)
    return {"node": node.name, "step": step, "out": round(after - began, 1), "pause": round(pause, 1)}


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--failures", nargs="+", choices=FAILURES, default=FAILURES)
    words.add_argument("--times", type=int, default=10, help="of each failure, rounded up to full runs")
    words.add_argument("--beside", type=int, default=2, help="runs at the same time")
    words.add_argument("--outside", action="store_true", help="keep the rendezvous on a machine that is not a node")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--output", type=Path, help="a file for a line of JSON for each run")
    options = words.parse_args()
    if why := why_no_nodes():
        sys.exit(f"no nodes can be made: {why}")
    with folder() as place:
        counts = {1, *(nodes_of(kind) for kind in options.failures)}
        whole = {count: reference(place, "--steps", str(STEPS), processes=count) for count in sorted(counts)}
    runs = -(-options.times // PER_RUN)
    cases = [(kind, number, options.seed, options.outside) for number in range(runs) for kind in options.failures]
    good, found = True, []
    with ProcessPoolExecutor(options.beside) as pool:
        for result in pool.map(attempt, *zip(*cases, strict=True)):
            losses = {int(step): loss for step, loss in result.pop("losses").items()}
            expected, complete = whole[1], losses.keys() == whole[1].keys()
            result["bitwise"] = losses == whole[nodes_of(result["kind"])]
            result["difference"] = max((abs(losses[s] / expected[s] - 1) for s in losses), default=1.0)
            result["good"] = result["ended"] and complete and result["difference"] < TOLERANCE
            good &= (
                result["good"] and (result["bitwise"] or result["elastic"]) and result["again"] <= INTERVAL + 60 / STEP
            )
            found.append(result)
            print(json.dumps(result), flush=True)
            if options.output:
                with open(options.output, "a") as file:
                    file.write(json.dumps(result) + "\n")
    for kind in options.failures:
        print(row(kind, [result for result in found if result["kind"] == kind]))
    return 0 if good else 1


def row(kind: str, results: list[dict[str, Any]]) -> str:
    failures = [failure for result in results for failure in result["failures"]]
    ended = sum(result["good"] for result in results)
    longest = max((failure["pause"] - failure["out"] for failure in failures), default=0)
    most = max((result["again"] for result in results), default=0)
    difference = max((result["difference"] for result in results), default=0)
    return (
        f"| {kind} | {len(failures)} | {ended} of {len(results)} | {longest:.0f} s | {most} steps | {difference:.1e} |"
    )


if __name__ == "__main__":
    sys.exit(main())
