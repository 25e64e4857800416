"""`dtgpt serve`: answer requests over HTTP with a model."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from dtgpt.commands.command import Command
from dtgpt.commands.model_options import Addend, OpenOptions, open_as_asked
from dtgpt.config.execution import MOST_SLOTS
from dtgpt.inference.model import Model, Need
from dtgpt.serve.explanations import KEY
from dtgpt.serve.limits import RequestLimits
from dtgpt.serve.weights import WEIGHTS, has_finite_weights
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import Bounds, Pattern
from dtgpt.util.hardware import memory_errors_as_user_errors
from dtgpt.util.peers import Process
from dtgpt.util.shared.optional import optional_package

LONGEST_NAME = 200  # characters
SWITCH_INTERVAL = 0.0005  # seconds; Python's own 5 ms let the event loop hold the engine up for the length of a step


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where the server listens, who may ask, and for how much."""

    host: Annotated[str, "address to listen on; one that other machines can reach needs --api-key"] = "127.0.0.1"
    port: Annotated[int, "port; 0: any free one, which is printed", Bounds(0, 65535)] = 5000
    name: Annotated[str | None, "name of the model in /v1/models; none: that of the folder"] = None
    api_key: Annotated[
        str | None, f"key that requests must have; several, with commas: one for each client; none: ${KEY}"
    ] = None
    open: Annotated[bool, "allow an address that other machines reach without a key"] = False
    slots: Annotated[
        str,
        f"texts at the same time; auto: as many as memory allows, up to {MOST_SLOTS}",
        Pattern("auto|[1-9][0-9]{0,2}", f"is not a number of texts; use 1 to {MOST_SLOTS}, or auto"),
    ] = "auto"
    queue: Annotated[int, "texts that may wait or run; further requests are refused", Bounds(1, 100_000)] = 1024
    seconds: Annotated[float, "time limit of a request", Bounds(above=0)] = 300.0
    drain: Annotated[float, "seconds that running requests have when the server ends", Bounds(0, 3600)] = 20.0
    log_prompts: Annotated[bool, "write prompts to the log"] = False


@dataclass(frozen=True, kw_only=True)
class ServeOptions(OpenOptions, Serving):  # fields are listed from the last base on
    """Answer requests over HTTP with a model: those of Megatron-LM's clients (PUT /api), of OpenAI's clients
    (/v1/completions), and a web page. MODEL is a run folder, whose newest checkpoint is used, or any model that `dtgpt
    convert` reads. Under torchrun, the processes share the model by a plan.

    New requests join the batch that is running. An answer depends on its request alone, not on other requests or
    the plan.

    SIGTERM or Ctrl-C ends the server: running requests have --drain seconds. A second one ends it at once.
    """

    headings: ClassVar[dict[str, str]] = {  # in `--help`, from the named field on
        "host": "address",
        "api_key": "access",
        "slots": "limits",
        "log_prompts": "log",
        "plan": "execution",
        "max_length": "limits",
        "tokenizer": "tokenizer",
        "adapter": "execution",
    }

    adapter: Addend = None
    warm_up: Annotated[bool, "run steps of all shapes before the port opens"] = True


@memory_errors_as_user_errors("serve fewer texts at the same time (--slots) or shorter ones (--max-length)")
def serve(path: Path, options: ServeOptions) -> None:
    for package in ("starlette", "uvicorn"):
        optional_package(package, "dtgpt serve", extra="serve")
    from dtgpt.serve.access import is_loopback, names_of
    from dtgpt.serve.http import bind
    from dtgpt.serve.server import Server, follow, lead
    from dtgpt.serve.service import Service
    from dtgpt.serve.worker import EngineWorker

    slots, key, name = slots_of(options), key_of(options), name_of(options, path)
    leads = Process.from_environment().rank == 0
    listener = bind(options.host, options.port) if leads else None
    if listener is not None:
        check_access(options, is_loopback(listener.getsockname()[0]), key)
    source, settings, mesh, tokenizer = open_as_asked(path, options)
    model = Model.read(source, settings, mesh, path, slots, tokenizer, options.exact)
    if not all(mesh.gather(has_finite_weights(model.stages, mesh, model.config))):
        raise UserError(f"{path}: {WEIGHTS}")
    need = Need(rows=slots or MOST_SLOTS, at_once=1)
    sys.setswitchinterval(SWITCH_INTERVAL)
    if listener is None:
        follow(model, need, options.drain)
        return
    worker = EngineWorker(model.check, lambda: model.slots, RequestLimits(queue=options.queue, seconds=options.seconds))
    hosts = names_of(options.host, listener)
    service = Service(model, worker, name, api_key=key, hosts=hosts, log_prompts=options.log_prompts)
    lead(Server(service, listener, options.host), need, options.warm_up, options.drain)


def slots_of(options: ServeOptions) -> int | None:
    """Return the number of slots that is asked for; None: as many as fit. Raise UserError for too many."""
    if options.slots == "auto":
        return None
    if int(options.slots) > MOST_SLOTS:
        raise UserError(f"--slots {options.slots} is too large; use 1 to {MOST_SLOTS}, or auto")
    return int(options.slots)


def key_of(options: ServeOptions) -> str | None:
    """Return the key that requests must have. Raise UserError for one that no header can hold."""
    key = os.environ.get(KEY) or None if options.api_key is None else options.api_key
    if key is not None and not (key.isascii() and key.isprintable() and all(key.split(",")) and " " not in key):
        raise UserError("the API key is empty or has characters other than visible ASCII; use letters and digits")
    return key


def name_of(options: ServeOptions, path: Path) -> str:
    """Return the model's name, which answers and the log have. Raise UserError for one that they cannot have."""
    if options.name is None:
        folder = path.resolve().name[:LONGEST_NAME]
        return "".join(character if character.isprintable() else "_" for character in folder) or "model"
    if not (options.name and options.name.isprintable() and len(options.name) <= LONGEST_NAME):
        rule = f"use 1 to {LONGEST_NAME} printable characters"
        raise UserError(f"--name {shown(options.name)} is not a name of a model; {rule}")
    return options.name


def check_access(options: ServeOptions, is_local: bool, key: str | None) -> None:
    """Raise UserError where other machines could use the server and nothing says that they may."""
    if not is_local and key is None and not options.open:
        raise UserError(
            f"--host {shown(options.host)} lets other machines use the server; give a key with --api-key or ${KEY}, or "
            "allow everybody with --open on"
        )


command = Command("serve MODEL", ServeOptions, serve, "runs/gpt2_tiny-001 --port 5000")
