"""A server from its start to its end: rank 0 answers, the others do what it commands."""

import gc
import socket
from functools import partial

from dtgpt.inference.engine import Engine
from dtgpt.inference.model import Model, Need
from dtgpt.serve.app import make_app
from dtgpt.serve.http import HttpServer, allow_many_connections
from dtgpt.serve.service import Service
from dtgpt.serve.signals import EndBySignal, end_where_a_rank_is_silent
from dtgpt.serve.warm_up import warm_up
from dtgpt.util.console import say, say_error


class Server:
    """A service that answers on a listener. The thread that calls `serve` runs the engine."""

    def __init__(self, service: Service, listener: socket.socket, host: str):
        self.model, self._service, self._host = service.model, service, host
        several = self.model.mesh.world > 1
        watch = partial(end_where_a_rank_is_silent, service.worker) if several else (lambda: None)
        self._http = HttpServer(make_app(service), listener, watch, service.worker.stop)

    def serve(self, engine: Engine, warm: bool, drain: float) -> None:
        """Serve until a signal ends it and running requests are finished, within `drain` seconds. `warm`: run steps of
        all shapes before the port opens."""
        model = self.model
        if warm:
            graphs = model.mesh.device.type == "cuda"
            if graphs:
                say_error("preparing steps of all shapes, which takes up to a minute (--warm-up off: at first use)")
            warm_up(engine, model.slots, model.config.seq_length, graphs)
        allow_many_connections()
        gc.collect()
        gc.freeze()  # what was imported need not be searched for garbage again, which takes as long as many steps
        EndBySignal(self._service.worker, drain).install()
        self._http.start()
        served = f"{self._service.model_id} is served at {self.address}: page /, PUT /api, POST /v1/completions"
        self._service.worker.run(engine, ready=lambda: say(served))

    def close(self) -> None:
        """Send the answers that are under way, and close all connections."""
        self._http.stop()
        gc.unfreeze()  # Triton's objects would be reported at exit as leaked, a page on stderr

    @property
    def address(self) -> str:
        """The address for a browser."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._http.port}"


def lead(server: Server, need: Need, warm: bool, drain: float) -> None:
    """Serve, on rank 0."""
    model = server.model

    def work(engine: Engine, _: None) -> None:
        model.describe()
        server.serve(engine, warm, drain)

    try:
        model.run(lambda: (need, None), work)
    finally:
        server.close()


def follow(model: Model, need: Need, drain: float) -> None:
    """Do what rank 0 commands, until it ends."""
    EndBySignal(None, drain).install()
    model.run(lambda: (need, None), lambda engine, _: None)
