"""What ranks do in tests/parallel/shared_memory/test_edges.py."""

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.parallel import pipeline
from dtgpt.parallel.collectives import transport
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shared_memory.edge_stage import EdgeStage
from dtgpt.parallel.shared_memory.edges import Edges, edges_of
from tests.support.bodies_exact import bits_of_steps


class GlooMessages:
    """In place of `Messages`: gloo sends what copy engines would, a tag for each place."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, places: int):
        self.mesh, self.shape, self.dtype, self.places = mesh, shape, dtype, places
        self.sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, message: Tensor, rank: int, index: int, after: int | None = None) -> None:
        message = message.contiguous()
        target = self.mesh.place.neighbour(rank)
        self.sent.append((dist.isend(message, target, group=self.mesh.pp_group, tag=index), message))

    def signal(self, rank: int, index: int) -> None:
        pass

    def receive(self, index: int) -> Tensor:
        place, found = self.mesh.place, torch.empty(self.shape, dtype=self.dtype)
        beside, _ = edges_of(place)[index // self.places]
        dist.recv(found, place.neighbour(place.plan.stage_rank(beside)), group=self.mesh.pp_group, tag=index)
        return found

    def flush(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def bits_over_edges(recipe: Recipe) -> tuple[dict[str, str], int]:
    """Return the bits of steps whose stages send over `Edges`, and the number of these stages on this rank."""
    made = []

    def open_edges(settings: Settings, mesh: Mesh, shape: tuple[int, ...], places: int) -> Edges:
        return Edges(mesh.place, GlooMessages(mesh, shape, settings.dtype, places), places)

    def note(self, *args) -> None:
        made.append(self)
        take_places(self, *args)

    take_places = EdgeStage._take_places
    over_edges = replace(transport(), open_edges=open_edges)
    with (
        mock.patch.object(pipeline, "transport", lambda: over_edges),
        mock.patch.object(EdgeStage, "_take_places", note),
    ):
        return bits_of_steps(recipe), len(set(map(id, made)))
