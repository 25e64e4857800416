"""The processes that torchrun started come together as a mesh, and part again.

What can be wrong on one rank alone (another recipe, code or torch) is compared here, before the first collective of the
run: ranks that differ would not fail, but wait for each other, or train something else.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtgpt.config.execution import Settings
from dtgpt.config.plan import Plan
from dtgpt.parallel import mesh as mesh_module
from dtgpt.parallel.mesh import Mesh, agree
from dtgpt.util.console import say
from dtgpt.util.peers import Process, Watch, peers
from dtgpt.util.torch_private import set_group_timeout

# NCCL's watchdog then names the rank and the collective that hangs, and keeps the last ones for a post-mortem.
NCCL_REPORTS = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",  # of validation losses, which pass stages in turn
}

was_in_group = False  # this process, at any time


@contextmanager
def open_mesh(
    settings: Settings, timeout: float, process: Process, values: dict[str, str], watch: Watch | None = None
) -> Iterator[Mesh]:
    """Yield the mesh of the plan, after all processes agreed that they run the same: `values` of the recipe, plan, code
    and torch. Ends the process group if it began it. `timeout`: seconds that a collective may wait. `watch`: of all
    processes, which meet in its store, and are told of an exception that leaves the context."""
    plan, device = settings.plan, settings.device
    started, mesh, watch = plan.world > 1 and not dist.is_initialized(), None, watch or Watch()
    if started:
        start_process_group(device, timeout, watch.store, process)
    try:
        if plan.world > 1:
            agree_on_run(values, plan, device)
        mesh = Mesh(plan, device)
        mesh.set_timeout(timeout)  # of each group: torch gives new groups its own default
        if process.local_world % plan.tp and plan.world > 1:
            say(
                f"tp={plan.tp} does not divide the {process.local_world} ranks of a node: tp crosses nodes",
                warning=True,
            )
        yield mesh
    except BaseException as error:
        watch.tell(error)
        raise
    finally:
        # Memory that ranks share goes before the process group, through which they tell each other that it does.
        for release in mesh.before_end if mesh else []:
            release()
        if started:
            end_process_group()


def start_process_group(
    device: torch.device,
    timeout: float,
    store: dist.Store | None = None,
    process: Process | None = None,
    **arguments: Any,
) -> None:
    """Join the other processes in `store`, in which all have met, as `process`, None: that of the environment; or as
    the `arguments` of `init_process_group` say (rank, world_size). store: None for a new one. Small messages between
    CPUs go through gloo, on GPUs in a group of their own: of a group with two backends, torch 2.11 splits both, and
    gives gloo NCCL's options."""
    others = peers(2)  # who begins a group is not alone
    others.check(device.type)
    if not arguments:
        process = process or Process.from_environment()
        store = dist.PrefixStore("group", store or others.meet(process, timeout))
        arguments = {"rank": process.rank, "world_size": process.world}
    waits = timedelta(seconds=others.patience(timeout))
    settings: dict[str, Any] = {"backend": "gloo", "timeout": waits, "store": store, **arguments}
    if device.type == "cuda":
        for name, value in NCCL_REPORTS.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
        settings |= {"backend": "nccl", "device_id": device}
    global was_in_group
    was_in_group = True
    try:
        dist.init_process_group(**settings)
        set_group_timeout(timedelta(seconds=timeout), dist.group.WORLD)
        if device.type == "cuda":
            mesh_module.messages = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise others.explained(error, timeout) from None


def end_process_group() -> None:
    mesh_module.messages = None
    dist.destroy_process_group()


def agree_on_run(values: dict[str, str], plan: Plan, device: torch.device) -> None:
    """Raise UserError, the same on every rank, where a rank differs from rank 0 in `values`, plan, code or torch."""
    more = {"the plan": json.dumps(asdict(plan), default=repr), "torch": torch.__version__}
    more |= {f"the code of {name}": digest for name, digest in code_digests().items()}
    agree(
        {**values, **more, "the kind of device": device.type}, "start every rank with the same command on the same code"
    )


@cache
def code_digests() -> dict[str, str]:
    """Return a short digest of each source file of dtgpt."""
    root = Path(__file__).parents[1]
    files = sorted(f for f in root.rglob("*") if f.suffix in (".py", ".cu", ".cuh"))
    return {str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest()[:12] for f in files}
