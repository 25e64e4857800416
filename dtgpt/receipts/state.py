"""The state of the step that takes digests: of the batch, of gradients, and of weights and the optimizer's state.

Where the digests of a step stand: a step adds to its row those of its batch, when that is taken, and of its gradients,
before the update. Those of its weights are added before the *next* update, or when lines are collected, since a state
of the step sees no step after its update: nothing changes weights in between. All of it is queued on the device, and
only `collect` waits.
"""

import base64
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtgpt.models.batch import Batch
from dtgpt.optim.step_state import StepState
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Region, Shard
from dtgpt.receipts.answers import Answers, keep_answers
from dtgpt.receipts.config import NAME, ReceiptsConfig
from dtgpt.receipts.digest import Piece
from dtgpt.receipts.sums import Digests
from dtgpt.train.trainer import Trainer

ROWS = 512  # steps of which a rank keeps the digests at most
BATCH = ("tokens", "targets", "loss_weights", "by_token", "by_sample")  # fields of a batch that have digests
GRADIENT, WEIGHT = "gradient", "weight"  # of a label, KIND/NAME; other kinds are states of the optimizer


class Receipts(StepState):
    """The digests of the last steps on this rank, once it is bound to a trainer."""

    name = NAME

    def __init__(self, mesh: Mesh, parts: int):
        self.mesh, self.parts = mesh, parts
        self.trainer: Trainer | None = None
        self.pending: list[dict[str, Any]] = []  # lines that are collected and not written, on every rank the same
        self.answers: Answers | None = None  # those that steps draw, where they make their samples
        self.sync: Callable[[], None] = lambda: None  # waits, on rank 0, until the disk has the lines that are written

    def bind(self, trainer: Trainer) -> None:
        """Take the digests of the steps of this trainer from now on. Every rank calls it."""
        self.trainer, device = trainer, self.mesh.device
        self.labels = labels_of(trainer, self.parts)
        slots = {label: (slot, part) for slot, (part, label) in enumerate(self._in_order(), len(BATCH))}
        own = list(_held(trainer))
        pieces = [Piece(f"{kind}/{s.name}", *slots[f"{kind}/{s.name}"], *place) for kind, s, place, _ in own]
        is_gradient = [kind == GRADIENT for kind, *_ in own]
        self._rows_of = [(s.index, rows) for (kind, s, _, rows) in own if kind == GRADIENT]
        self._held = [_state(trainer, kind, s)[rows] for kind, s, _, rows in own if kind != GRADIENT]
        self._gradients = Digests([p for p, g in zip(pieces, is_gradient, strict=True) if g], self.parts, device)
        self._states = Digests([p for p, g in zip(pieces, is_gradient, strict=True) if not g], self.parts, device)
        self._sums = torch.zeros(ROWS, len(BATCH) + len(slots), dtype=torch.int64, device=device)
        self._figures = torch.zeros(ROWS, 4, dtype=torch.float64, device=device)  # loss, norm, rate, whether empty
        # Rows and parts of this step and of the one before, which a captured update reads on the device.
        self._now = torch.zeros(4, dtype=torch.int64, device=device)
        self.row, self.part, self.row_before, self.part_before = self._now.unbind()
        self._batch: tuple[Any, Digests] | None = None
        self.collected: int | None = None  # the newest step whose line was made
        take = trainer.objective.take
        trainer.objective.take = partial(self._take, take)  # type: ignore[method-assign]
        self.answers = keep_answers(trainer.objective, self.mesh.rank)

    def _in_order(self) -> Iterator[tuple[int, str]]:
        yield from ((part, label) for part, labels in enumerate(self.labels) for label in labels)

    @property
    def bytes_of_parts(self) -> list[int]:
        """The bytes that this rank reads in the step of each part."""
        both = zip(self._gradients.bytes_of_parts, self._states.bytes_of_parts, strict=True)
        return [sum(pair) for pair in both]

    def held(self) -> Iterator[tuple[str, tuple[int, ...], Region, Tensor]]:
        """Yield (label, shape of the whole, global indices, values) of the weights and states that this rank adds."""
        for piece, values in zip(self._states.pieces, self._held, strict=True):
            yield piece.label, piece.shape, piece.region, values

    def _at(self, step: int) -> None:
        """Let the rows and parts be those of `step`."""
        numbers = step % ROWS, step % self.parts, (step - 1) % ROWS, (step - 1) % self.parts
        for cell, number in zip(self._now.unbind(), numbers, strict=True):
            cell.fill_(number)

    @torch.no_grad()
    def _take(self, take: Any, step: int) -> tuple[Batch, Tensor | None]:
        """Take the batch after `step` steps, and add its digests to a new row."""
        if self.collected is None:
            self.collected = step
        batch, empty = take(step)
        self._at(step + 1)
        self._sums.index_fill_(0, self.row.view(1), 0)
        place = self.mesh.place
        if place.tp == place.pp == 0 and self.answers is None:
            self._add_batch(batch)
        return batch, empty

    def _add_batch(self, batch: Batch) -> None:
        found = {n: v for n, v in zip(Batch._fields, batch, strict=True) if v is not None and n in BATCH}
        shapes = {name: value.shape for name, value in found.items()}
        if self._batch is None or self._batch[0] != shapes:  # the number of samples may ramp up
            pieces = [_piece_of_batch(name, shape, batch, self.mesh) for name, shape in shapes.items()]
            self._batch = shapes, Digests(pieces, 1, self.mesh.device)
        self._batch[1].add([value.float() for value in found.values()], self._batch[1].all, self._sums, self.row)

    @torch.no_grad()
    def update(self, loss: Tensor, norm: Tensor, empty: Tensor | None = None) -> Tensor | None:
        if self.trainer is None:
            return None
        self._states.add(self._held, self.part_before, self._sums, self.row_before)
        gradients = self.trainer.shards.gradients
        self._gradients.add([gradients[i][rows] for i, rows in self._rows_of], self.part, self._sums, self.row)
        none = torch.zeros((), device=self.mesh.device) if empty is None else empty
        figures = torch.stack([x.double() for x in (loss, norm, self.trainer.optimizer.lr, none)])
        self._figures.index_copy_(0, self.row.view(1), figures.view(1, -1))
        return None

    @torch.no_grad()
    def collect(self) -> list[dict[str, Any]]:
        """Return the lines of the steps since the last call. Every rank calls it; waits for the device."""
        assert self.trainer is not None
        now = self.trainer.step
        if self.collected is None or self.collected == now:
            return []
        steps = range(max(self.collected, now - ROWS) + 1, now + 1)
        self.collected = now
        self._at(now + 1)
        self._states.add(self._held, self.part_before, self._sums, self.row_before)
        rows = torch.tensor([step % ROWS for step in steps], device=self.mesh.device)
        sums = self.mesh.all_reduce(self._sums[rows]).cpu().numpy()
        figures = self._figures[rows]
        losses = (self.mesh.all_reduce(figures[:, 0].clone()) / self.mesh.copies_of_loss).tolist()
        return [self._line(step, *row) for step, *row in zip(steps, sums, losses, figures[:, 1:].tolist(), strict=True)]

    def _line(self, step: int, sums: np.ndarray, loss: float, figures: list[float]) -> dict[str, Any]:
        norm, rate, empty = figures
        first = len(BATCH) + sum(map(len, self.labels[: step % self.parts]))
        own = sums[first : first + len(self.labels[step % self.parts])]
        batch = {name: f"{number & (1 << 64) - 1:016x}" for name, number in zip(BATCH, sums.tolist(), strict=False)}
        line = {"step": step, "loss": None if empty else number_of(loss), "norm": number_of(norm), "lr": rate}
        if self.answers is not None:
            return line | {"answers": self.answers.digests.pop(step, None), "digests": encoded(own)}
        return line | {"batch": batch, "digests": encoded(own)}

    @torch.no_grad()
    def table(self) -> dict[str, Any]:
        """Return the line of a checkpoint of now, with the digests of all weights and states. Every rank calls it."""
        assert self.trainer is not None
        sums = torch.zeros_like(self._sums[:1])
        self._states.add(self._held, self._states.all, sums, torch.zeros_like(self.row))
        found = self.mesh.all_reduce(sums)[0].cpu().numpy()[len(BATCH) :]
        kept = [not label.startswith(f"{GRADIENT}/") for _, label in self._in_order()]
        trainer = self.trainer
        numbers = {
            "updates": int(trainer.optimizer.rule.updates.item()),
            "samples": trainer.samples_before(trainer.step),
        }
        return {"checkpoint": trainer.step, **numbers, "digests": encoded(found[np.array(kept, dtype=bool)])}

    def state(self) -> list[dict[str, Any]] | None:
        """Return the lines that are not written yet, so that a run which goes on has them, and that of the checkpoint;
        None where no receipts are written."""
        if self.trainer is None:
            return None
        self.pending += [*self.collect(), self.table()]
        self.sync()
        return list(self.pending)

    def restore(self, saved: list[dict[str, Any]] | None) -> None:
        self.pending = list(saved or [])


def make_state(recipe: Any, settings: Any, mesh: Mesh) -> Receipts:
    """Return the state that takes the digests of steps."""
    return Receipts(mesh, recipe.section(ReceiptsConfig).parts)


def number_of(value: float) -> float | str:
    """Return a number that JSON can hold, with all its bits; else its name."""
    return value if np.isfinite(value) else repr(value)


def encoded(sums: np.ndarray) -> str:
    """Return int64 sums as text, eight bytes each, in base64."""
    return base64.b64encode(sums.astype("<i8").tobytes()).decode()


def decoded(text: str) -> list[int]:
    """Return the sums that `encoded` wrote. Raises ValueError for another text."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<i8").tolist()


def labels_of(trainer: Trainer, parts: int) -> list[list[str]]:
    """Return the labels of each part, the same under every plan: tensors of one parameter are in one part, and the
    parts are of nearly the same size."""
    own: dict[str, tuple[int, set[str]]] = {}
    for kind, shard, *_ in _held(trainer, all_of_them=True):
        own.setdefault(shard.name, (shard.parameter.numel(), set()))[1].add(kind)
    found: dict[str, tuple[int, set[str]]] = {}
    for each in trainer.mesh.gather(own):
        for name, (size, kinds) in each.items():
            found.setdefault(name, (size, set()))[1].update(kinds)
    labels: list[list[str]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for name, (size, kinds) in sorted(found.items(), key=lambda item: (-item[1][0], item[0])):
        part = sizes.index(min(sizes))
        sizes[part] += size * len(kinds)
        labels[part] += [f"{kind}/{name}" for kind in sorted(kinds)]
    return labels


Place = tuple[tuple[int, ...], Region]  # shape of a whole, and what is here of it


def _held(trainer: Trainer, all_of_them: bool = False) -> Iterator[tuple[str, Shard, Place, slice]]:
    """Yield (kind, shard, place, rows here) of all tensors of which this rank has elements that it alone adds;
    all_of_them: of the others, too."""
    for shard in trainer.shards:
        part, rows = shard.own
        own = (tuple(shard.parameter.shape), part), rows
        found = {GRADIENT: own, WEIGHT: own}
        for name, value in trainer.optimizer.rule.state(shard.index).items():
            place = shard.place_of(value)
            found[name] = own if place[1] == shard.region else (place, slice(None))
        for kind, (place, rows) in found.items():
            if all_of_them or all(map(len, place[1])):
                yield kind, shard, place, rows


def _state(trainer: Trainer, kind: str, shard: Shard) -> Tensor:
    return shard.local if kind == WEIGHT else trainer.optimizer.rule.state(shard.index)[kind]


def _piece_of_batch(name: str, shape: torch.Size, batch: Batch, mesh: Mesh) -> Piece:
    """Return which elements of the global batch a rank has of a field: samples of its replica, tokens of its slice."""
    place, plan = mesh.place, mesh.plan
    rows, rest = len(range(shape[0])), [range(size) for size in shape[1:]]
    sizes = list(shape)
    if name in ("tokens", "targets", "by_token") or (name == "loss_weights" and batch.by_token is None):
        sizes[1] *= plan.cp
        rest[0] = range(place.cp * shape[1], (place.cp + 1) * shape[1])
    elif place.cp:
        rows = 0
    region = range(place.dp * rows, (place.dp + 1) * rows), *rest
    return Piece(f"batch/{name}", BATCH.index(name), 0, (sizes[0] * plan.dp, *sizes[1:]), region)
