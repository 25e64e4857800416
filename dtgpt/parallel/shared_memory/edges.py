"""What goes over the edges between pipeline stages: activations and their gradients, to places in the memory of the
rank that receives them. Each edge has as many places as micro-batches are under way, which use them in turn."""

from typing import Any

from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.parallel.shared_memory.message import Messages, open_messages


def edges_of(place: RankCoordinates) -> list[tuple[int, int]]:
    """Return pairs of a stage on another rank and the stage beside it on this rank: over each goes an activation, and
    its gradient comes back."""
    pairs = [(beside, stage) for stage in place.stages for beside in (stage - 1, stage + 1)]
    return [(beside, stage) for beside, stage in pairs if place.rank_of(beside) is not None]


class Edges:
    """The messages of a rank's stages to ranks of the same host, with so many `places` on each edge."""

    def __init__(self, place: RankCoordinates, messages: Messages, places: int):
        self.place, self.messages, self.places, self._edges = place, messages, places, edges_of(place)
        self._signals = most_edges(place) * places  # the first of them
        self._closed: set[tuple[int, int]] = set()

    def make_stage(self, *args: Any, **kwargs: Any) -> Any:
        """Return a stage of torch's pipelines that sends and receives here. Arguments: those of `PipelineStage`."""
        from dtgpt.parallel.shared_memory.edge_stage import EdgeStage  # half a second to import

        stage = EdgeStage(*args, **kwargs)
        stage.edges = self
        return stage

    def begin(self) -> None:
        """Begin a step: nothing of the one before is needed any more in the places of this rank."""
        for beside, stage in self._edges:
            there = self._at(beside)
            self.messages.signal(there.pp, self._signals + edges_of(there).index((stage, beside)))
        self._closed = set(self._edges)

    def send(self, tensor: Tensor, source: int, target: int, micro_batch: int) -> None:
        """Send from a stage of this rank to a stage beside it on another rank."""
        there, edge = self._at(target), (target, source)
        after = self._signals + self._edges.index(edge) if edge in self._closed else None
        self._closed.discard(edge)
        self.messages.send(tensor, there.pp, self._index(there, source, target, micro_batch), after)

    def joins(self, source: int, target: int) -> bool:
        """Return whether an edge goes from `source`, on another rank, to a stage of this rank."""
        return (source, target) in self._edges

    def receive(self, source: int, target: int, micro_batch: int) -> Tensor:
        """Wait for what a stage of another rank sends to a stage of this one, and return it: valid until this stage has
        run the micro-batch backward."""
        return self.messages.receive(self._index(self.place, source, target, micro_batch))

    def end(self) -> None:
        """Hold the current stream until all is sent."""
        self.messages.flush()

    def _at(self, stage: int) -> RankCoordinates:
        """Return where the pipeline's rank of a stage is."""
        return RankCoordinates(self.place.plan, self.place.neighbour(self.place.plan.stage_rank(stage)))

    def _index(self, place: RankCoordinates, source: int, target: int, micro_batch: int) -> int:
        return edges_of(place).index((source, target)) * self.places + micro_batch % self.places


def most_edges(place: RankCoordinates) -> int:
    """Return the largest number of edges of a rank of the pipeline."""
    plan = place.plan
    return max(len(edges_of(RankCoordinates(plan, place.neighbour(pp)))) for pp in range(plan.pp))


def open_edges(settings: Settings, mesh: Mesh, shape: tuple[int, ...], places: int) -> Edges | None:
    """Return the messages of this rank, of `shape`; None where NCCL or gloo sends them. All ranks take part."""
    edges = most_edges(mesh.place)
    messages = open_messages(mesh, mesh.pp_group, edges * places, edges, shape, settings.dtype)
    return Edges(mesh.place, messages, places) if messages else None
