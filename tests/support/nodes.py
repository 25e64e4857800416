"""Several nodes on one machine, for tests: namespaces with a host name, processes, an address and a cache of their own,
joined by a bridge. Needs root and the commands of util-linux and iproute2.

The namespaces have no names: they belong to processes that end with the process that made them, however that ends, and
the links, mounts and processes of a node end with it. Clusters therefore never collide, and nothing is left behind.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
TOOLS = ("setpriv", "unshare", "nsenter", "ip", "tc", "mount")
NETWORK = "10.77.0"  # of every cluster: their networks are not connected to each other
ENVIRONMENT = ("PATH", "HOME", "LANG", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONPATH")  # what nodes inherit
# Named by GLOO_SOCKET_IFNAME, as on nodes with several networks: else gloo takes the address of the host name.
INTERFACE = "eth0"


@functools.cache
def why_no_nodes() -> str:
    """Return why this machine cannot make nodes; an empty text where it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs the command {missing[0]}"
    trial = "ip link add try0 type veth peer name try1 && ip link add try2 type bridge && "
    trial += "tc qdisc add dev try0 root tbf rate 1mbit burst 32kb latency 400ms"
    words = ["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c", trial]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    return f"needs root and network namespaces: {done.stderr.strip()}" if done.returncode else ""


class Namespace:
    """A process that holds namespaces; everything in them ends with it."""

    def __init__(self, name: str):
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--pid", "--mount", "--mount-proc"]
        words += ["--fork", "--kill-child", "sh", "-c", f"hostname {name} && echo ready && exec sleep infinity"]
        self.name = name
        self._holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if self._holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the namespaces of {name} cannot be made: {why_no_nodes()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.pid = int(children)

    def inside(self, *words: str, folder: Path = Path("/")) -> list[str]:
        """Return the command line that runs `words` in these namespaces, in this folder."""
        entered = ["--net", "--uts", "--pid", "--mount", f"--wd={folder}"]
        return ["nsenter", "--target", str(self.pid), *entered, "--", *words]

    def sh(self, script: str) -> None:
        """Run a short script to its end. Raises RuntimeError where it fails."""
        run_to_end(self.inside("sh", "-ec", script))

    def network(self, script: str) -> None:
        """The same in the network of this namespace alone: the script names other namespaces by their process."""
        run_to_end(["nsenter", "--target", str(self.pid), "--net", "--", "sh", "-ec", script])

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.kill()
        self._holder.wait()
        self._holder.stdout.close()


def run_to_end(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


class Node:
    """One node: `Nodes` makes it. Its folder holds what only this node sees: its cache and the log of its commands."""

    def __init__(self, index: int, folder: Path, hosts: Path, hub: Namespace, environment: dict[str, str]):
        self.index, self.name, self.address = index, f"node{index}", f"{NETWORK}.{index + 1}"
        self.port, self.log = f"port{index}", folder / "log"
        self._hosts, self._hub, self._folder = hosts, hub, folder
        self._environment = environment | {"DTGPT_CACHE": str(folder / "cache")}
        self.commands: list[subprocess.Popen] = []
        self.namespace: Namespace | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.boot()

    def boot(self) -> None:
        """Make the node's namespaces and its link. After `kill`, the node is back under its name and address."""
        self.namespace = Namespace(self.name)
        self._hub.network(
            f"ip link add {self.port} type veth peer name {INTERFACE} address 02:00:00:00:01:{self.index:02x} "
            f"netns {self.namespace.pid}\n"
            f"ip link set {self.port} master bridge0 up"
        )
        self.namespace.sh(
            f"mount --bind {self._hosts} /etc/hosts\n"
            f"ip address add {self.address}/24 dev {INTERFACE}\n"
            f"ip link set lo up; ip link set {INTERFACE} up"
        )

    def start(self, *words: str | Path, cwd: Path, **environment: str) -> subprocess.Popen:
        """Start a command on the node. Its output is appended to the node's log."""
        given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        given |= self._environment | environment
        with open(self.log, "ab") as log:
            command = subprocess.Popen(
                self.namespace.inside(*map(str, words), folder=cwd),
                env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.commands.append(command)
        return command

    def output(self) -> str:
        """Return what all commands of the node have written."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def processes(self, *words: str) -> list[int]:
        """Return the ids, outside of the node, of its processes whose command line contains all these words, oldest
        first."""
        found = []
        here = os.stat(f"/proc/{self.namespace.pid}/ns/pid").st_ino
        for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
            with contextlib.suppress(OSError):
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line and all(word in line for word in words) and os.stat(path / "ns/pid").st_ino == here:
                    found.append(int(path.name))
        return found

    def workers(self) -> list[int]:
        """Return the ids of the processes that torchrun started on the node."""
        agents = self.agents()
        return [pid for pid in self.processes("python") if parent_of(pid) in agents]

    def agents(self) -> list[int]:
        """Return the ids of the node's torchrun processes."""
        started = self.processes("torchrun") + self.processes("torch.distributed.run")
        return [pid for pid in started if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]

    def kill(self) -> None:
        """End the node at once, with all of its processes, as when its power fails: no packet says so."""
        self.cut()
        self.namespace.end()
        for command in self.commands:
            command.wait(30)
        with contextlib.suppress(RuntimeError):  # it may have gone with the node's end of it
            self._hub.sh(f"ip link delete {self.port}")

    def cut(self) -> None:
        """Pull the node's cable."""
        self._hub.sh(f"ip link set {self.port} down")

    def restore(self) -> None:
        """Plug the node's cable back in."""
        self._hub.sh(f"ip link set {self.port} up")

    def slow(self, megabits: float) -> None:
        """Let at most so many megabits per second leave the node, and as many enter it."""
        shape = f"root tbf rate {megabits}mbit burst 64kb latency 200ms"
        self._hub.sh(f"tc qdisc replace dev {self.port} {shape}")
        self.namespace.sh(f"tc qdisc replace dev {INTERFACE} {shape}")


class Nodes:
    """A cluster: nodes 0 to n - 1, called node0, node1, ..., with the addresses 10.77.0.1, 10.77.0.2, ...; a context.

    `shared` is a folder that all nodes see at the same path. A further host of the network, `login`, never fails.
    """

    def __init__(self, count: int, folder: Path, **environment: str):
        folder = folder.resolve()
        self.shared, hosts = folder / "shared", folder / "hosts"
        self.shared.mkdir(parents=True, exist_ok=True)
        names = [f"{NETWORK}.{index + 1} node{index}" for index in range(count)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", f"{NETWORK}.254 login", *names]) + "\n")
        self.nodes: list[Node] = []
        self._outside: list[subprocess.Popen] = []
        self.hub = Namespace("login")
        try:
            self.hub.sh(
                f"mount --bind {hosts} /etc/hosts; ip link set lo up\n"
                "for b in bridge0 bridge1; do ip link add $b type bridge; ip link set $b up; done\n"
                f"ip address add {NETWORK}.254/24 dev bridge0"
            )
            named = {"GLOO_SOCKET_IFNAME": INTERFACE, **environment}
            for index in range(count):
                self.nodes.append(Node(index, folder / f"node{index}", hosts, self.hub, named))
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def start_on_login(self, *words: str) -> None:
        """Start a command on the host `login`, which ends with the cluster."""
        self._outside.append(subprocess.Popen(self.hub.inside(*words)))

    def end(self) -> None:
        for node in self.nodes:
            node.namespace.end()
        self.hub.end()
        for command in [*self._outside, *(command for node in self.nodes for command in node.commands)]:
            command.wait(30)

    def partition(self, *indices: int) -> None:
        """Let these nodes reach each other, and the others each other, but no node of one side one of the other. The
        links stay up."""
        for index in indices:
            self.hub.sh(f"ip link set {self.nodes[index].port} master bridge1")

    def heal(self) -> None:
        """End the partition."""
        for node in self.nodes:
            self.hub.sh(f"ip link set {node.port} master bridge0")

    def outputs(self) -> str:
        """Return the logs of all nodes, for the message of a failed test."""
        return "\n".join(f"--- {node.name}\n{node.output()[-6000:]}" for node in self.nodes)

    def wait_until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until `condition()` is true. Raises TimeoutError with the logs after so many seconds."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {seconds:g} s\n{self.outputs()}")
            time.sleep(0.1)


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def torchrun(*words: str) -> list[str]:
    """Return the command line of torchrun of this Python."""
    return [sys.executable, "-m", "torch.distributed.run", *words]
