"""The network interfaces over which the processes of a run connect, as the environment names them."""

import ipaddress
import os
import socket
from contextlib import suppress

from dtgpt.util.errors import UserError, shown_name

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_interfaces(device_type: str) -> None:
    """Raise UserError where this machine lacks the interfaces that `GLOO_SOCKET_IFNAME` and, on GPUs,
    `NCCL_SOCKET_IFNAME` name. Gloo takes exact names; NCCL takes beginnings of names, with `=` in front exact names,
    with `^` in front those that it leaves out."""
    present = [name for _, name in socket.if_nameindex()]
    wanted = os.environ.get(GLOO, "")
    if missing := [name for name in wanted.split(",") if wanted and name not in present]:
        raise _no_interface(GLOO, wanted, missing[0], present)
    wanted = os.environ.get(NCCL, "") if device_type == "cuda" else ""
    if wanted and not any(_nccl_takes(wanted, name) for name in present):
        raise _no_interface(NCCL, wanted, wanted, present)


def _nccl_takes(wanted: str, name: str) -> bool:
    kind = wanted[0] if wanted[0] in "^=" else ""
    listed = wanted.removeprefix("^").removeprefix("=").split(",")
    found = name in listed if "=" in wanted[:2] else any(name.startswith(word) for word in listed)
    return found != (kind == "^")


def _no_interface(variable: str, wanted: str, missing: str, present: list[str]) -> UserError:
    return UserError(
        f"{variable}={shown_name(wanted)}: {socket.gethostname()} has no network interface {shown_name(missing)}; "
        f"name one of {', '.join(present)}, the one that joins the nodes"
    )


def cannot_connect(error: RuntimeError) -> UserError | None:
    """Return the UserError for an error of gloo that says that processes could not connect to each other; None for any
    other error."""
    _, sign, reason = str(error).partition("connectFullMesh failed with ")
    if not sign:
        return None
    cause = reason.splitlines()[0].rpartition("] ")[2] or "no reason given"
    present = ", ".join(name for _, name in socket.if_nameindex())
    return UserError(
        f"a process of the run cannot be reached from {socket.gethostname()} ({cause}); see whether it has ended, else "
        f"set {GLOO} on every node to the interface that joins the nodes (here: {present})"
    )


def own_address() -> str:
    """Return the address of this machine in the network of `MASTER_ADDR`; on the machine that has it, that name."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    with suppress(OSError, ValueError):
        family, _, _, _, target = socket.getaddrinfo(master, int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = probe.getsockname()[0]
            if address != target[0] and not ipaddress.ip_address(address).is_loopback:
                return address
    return master
