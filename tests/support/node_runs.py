"""A run of a tiny recipe over nodes, started on each node by a loop that starts torchrun again until it succeeds."""

import re
import shlex
from pathlib import Path

from dtgpt.run.records import read_records
from tests.support.nodes import ROOT, Node, Nodes, torchrun
from tests.support.programs import TORCHRUN, run_program

RECIPE = ROOT / "tests" / "support" / "slow_recipe.py"
PORT = 29500
PAUSE = 1  # seconds before torchrun is started again
SETTINGS = "last_call_timeout=5"  # seconds in which torchrun waits for further nodes, once there are enough
OUTSIDE = f"{SETTINGS},read_timeout=300"  # the same, and that it waits for a rendezvous outside of the nodes
# The Python program that keeps a rendezvous outside of the nodes: the line of docs/cluster.md.
(STORE,) = re.findall(r"^python -c '(.*TCPStore.*)'$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE)


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(400)))


def reference(folder: Path, *options: str, processes: int = 1) -> dict[int, float]:
    """Return the losses of an uninterrupted run of so many processes, by step."""
    write_text(folder)
    runs = f"whole-{processes}"
    start = [] if processes == 1 else [*TORCHRUN, "--nproc-per-node", str(processes)]
    done = run_program([*start, RECIPE, "--runs", runs, *options], folder, timeout=600)
    assert done.returncode == 0, done.stderr
    return losses(folder / runs)


def losses(runs: Path) -> dict[int, float]:
    """Return the losses of the only run in the folder, by step."""
    folders = sorted(runs.glob("slow-*"))
    if not folders:
        return {}
    assert len(folders) == 1, f"the run began {len(folders)} times: {folders}"
    path = folders[0] / "metrics.jsonl"
    return {r["step"]: r["loss"] for r in read_records(path) if "loss" in r} if path.exists() else {}


class NodeRun:
    """The commands of one run on the nodes. `options` follow the recipe; `wanted` is torchrun's --nnodes.
    forks: whether torchrun forks its processes, which is cheaper than to start them."""

    def __init__(
        self, nodes: Nodes, wanted: str, *options: str, per_node: int = 1, host: str = "node0",
        settings: str = SETTINGS, restarts: int = 1000, step_seconds: float = 0.0, forks: bool = False,
    ):  # fmt: skip
        self.nodes, self.runs = nodes, nodes.shared / "runs"
        write_text(nodes.shared)
        self.words = [str(RECIPE), "--resume", "auto", *options]
        command = torchrun(
            "--nnodes", wanted, "--nproc-per-node", str(per_node), "--max-restarts", str(restarts),
            "--rdzv-backend", "c10d", "--rdzv-id", "17", "--rdzv-endpoint", f"{host}:{PORT}",
            "--rdzv-conf", settings, *self.words,
        )  # fmt: skip
        if forks:
            command[1:1] = ["-m", "tests.support.programs"]
        again = f"echo starting torchrun again; sleep {PAUSE}"
        self.loop = f"until [ -e over ]; do {shlex.join(command)} && touch over || {{ {again}; }}; done"
        self.environment = {"STEP_SECONDS": str(step_seconds), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        # Else a node that joins later is never told the address of rank 0 by agents that were there before.
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(self, *chosen: Node) -> None:
        """Start the loop on these nodes, or on all."""
        for node in chosen or self.nodes:
            node.start("bash", "-c", self.loop, cwd=self.nodes.shared, **self.environment)

    def hurry(self) -> None:
        """Let the steps from now on last no longer than they need."""
        new = self.nodes.shared / "pace.new"
        new.write_text("0")
        new.rename(new.with_name("pace"))

    def losses(self) -> dict[int, float]:
        return losses(self.runs)

    def step(self) -> int:
        """Return the newest step that is on record."""
        return max(self.losses(), default=0)

    def wait_for_step(self, step: int, seconds: float) -> None:
        self.nodes.wait_until(lambda: self.step() >= step, seconds, f"step {step}")

    def resumed(self) -> list[int]:
        """Return the steps from which the run went on, in the order of each node's log."""
        found = (re.findall(r"^run     .*, from step (\d+)$", node.output(), re.MULTILINE) for node in self.nodes)
        return [int(step) for steps in found for step in steps]

    def ended(self) -> bool:
        """Return whether the last loop that was started on each node has succeeded."""
        return all(node.commands and node.commands[-1].poll() == 0 for node in self.nodes)

    def wait_for_end(self, seconds: float) -> None:
        self.nodes.wait_until(self.ended, seconds, "the end of the run")
