"""Choices of experts that rounding turns over.

Two experts of a token may have scores that are equal but for rounding. A right run may then choose the other one, and
whatever comes behind it differs by much more than rounding. So the reference writes its choices of every step; any
other run notes where its own differ, and goes on with those of the reference. What comes behind a choice stays
comparable, and loads of experts are equal to the bit. `dtgpt.compare.gate` asks of each choice of the first step that
differs whether the logits do, which it judges by themselves.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dtgpt.compare.torch_private import is_in_backward, unseen
from dtgpt.models.decoder import Decoder
from dtgpt.models.moe.mixture import Router, routers
from dtgpt.ops.experts.routing import scores_of
from dtgpt.optim.balance.state import Balances
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.train.trainer import Trainer

MOST = 1000  # choices that differ that are told one by one


class Flip(NamedTuple):
    """A token that has another expert than in the reference."""

    step: int
    module: str  # the router
    sample: int  # in the global batch
    token: int
    ours: int  # the expert that the run chose
    theirs: int  # and that of the reference in its place
    gap: float  # by which the score of the first is larger, in the run
    rank: int

    def __str__(self) -> str:
        layer = self.module.split(".")[1]
        return (
            f"token {self.token} of sample {self.sample}, layer {layer}: experts {self.ours} and {self.theirs} are "
            f"{self.gap:.0e} apart, step {self.step}"
        )


class Choices:
    """The choices of a run, beside those of its reference.

    size: samples of a micro-batch. first: the number in the global batch of this rank's first sample. theirs: those of
    the reference by step and block, int32 `[samples, T, k]`; None: this is the reference, which keeps its own. place:
    of the rank in its plan, where several have the same tokens, or slices of them.
    """

    def __init__(self, rank: int, size: int, theirs: dict[str, Tensor] | None, place: RankCoordinates | None = None):
        self.rank, self.size, self.first, self.theirs = rank, size, 0, theirs
        self.slice, self.slices = (0, 1) if place is None else (place.cp, place.plan.cp)
        self.notes = place is None or place.tp == 0  # one of the ranks that have the same tokens
        self.kept: dict[str, list[Tensor]] = defaultdict(list)
        self.flips: list[Flip] = []
        self.turned = self.compared = 0  # choices of tokens that differ, of all
        self._step: int | None = None
        self._passes: dict[tuple[int, bool], int] = defaultdict(int)
        # Of blocks in this step: what a pass chose, and what it got in its place, for the same pass in backward.
        self._replaced: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def attach(self, stages: list[Decoder]) -> None:
        for stage in stages:
            for index, block in stage.blocks.items():
                for router in routers(block):
                    name = next(name for name, module in stage.named_modules() if module is router)
                    router.seen = partial(self._see, int(index), name, router)

    @contextmanager
    def of_step(self, step: int, first: int = 0) -> Iterator[None]:
        """Compare the choices of passes while the context lasts. first: number of this rank's first sample."""
        self._step, self.first = step, first
        self._passes.clear()
        self._replaced.clear()
        try:
            yield
        finally:
            self._step = None

    @property
    def saw_all(self) -> bool:
        """Whether the passes of the step were seen: those of a captured graph are not."""
        return bool(self._passes)

    def _see(self, *given: Any) -> Tensor:
        with unseen():
            return self._replace(*given)

    def _replace(
        self, index: int, name: str, router: Router, logits: Tensor, experts: Tensor, correction: Tensor | None
    ) -> Tensor:
        captured = experts.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._step is None or captured:
            return experts
        if is_in_backward():  # which computes the pass again
            return next((to for own, to in self._replaced[index] if torch.equal(own, experts)), experts)
        trains = torch.is_grad_enabled()  # else a pass that looks at the batch before
        first = self.first + self._passes[index, trains] * self.size
        self._passes[index, trains] += 1
        key = f"{self._step}/{index}"
        if self.theirs is None:
            if trains:
                self.kept[key].append(experts.to("cpu", torch.int32))
            return experts
        theirs = self.theirs.get(key)
        theirs = theirs[first : first + len(experts)].to(experts) if theirs is not None else experts
        if theirs.shape[1] == self.slices * experts.shape[1]:
            theirs = theirs.chunk(self.slices, 1)[self.slice]
        if theirs.shape != experts.shape:  # of another number of experts or tokens
            return experts
        if trains and self.notes:
            self._note(experts, theirs, scores_of(logits.detach(), router.rule, correction), name, first)
        if torch.equal(experts, theirs):
            return experts  # whose place in memory is that of the same pass in backward
        if trains:
            self._replaced[index].append((experts, theirs))
        return theirs

    def _note(self, experts: Tensor, theirs: Tensor, scores: Tensor, name: str, first: int) -> None:
        others = (experts.sort(-1).values != theirs.sort(-1).values).any(-1)
        self.compared += others.numel()
        self.turned += int(others.sum())
        for sample, token in others.nonzero().tolist()[: MOST - len(self.flips)]:
            own, other = (each[sample, token].tolist() for each in (experts, theirs))
            row = scores[sample, token]
            ours = max((e for e in own if e not in other), key=lambda e: float(row[e]))
            instead = min((e for e in other if e not in own), key=lambda e: float(row[e]))
            gap, place = float(row[ours] - row[instead]), self.slice * experts.shape[1] + token
            self.flips.append(Flip(self._step or 0, name, first + sample, place, ours, instead, gap, self.rank))

    def save(self, file: Path) -> None:
        save_file({key: torch.cat(parts).contiguous() for key, parts in self.kept.items()}, file)

    def float64(self, model: Decoder, step: int) -> None:
        """Let another model of one process, whose micro-batches are the same, have the choices of a step."""
        made = {key: torch.cat(parts) for key, parts in self.kept.items() if key.startswith(f"{step}/")}
        other = Choices(0, self.size, made)
        other._step = step
        other.attach([model])


def file_of_choices(shared: Path) -> Path:
    return shared.with_name(f"{shared.name}-choices")


def open_choices(trainer: Trainer, shared: Path, is_reference: bool) -> Choices | None:
    """Return what sees the choices of a run; None where its model has no experts, or the reference wrote none."""
    file, theirs = file_of_choices(shared), None
    if not hasattr(trainer.settings.model, "num_experts") or not (is_reference or file.exists()):
        return None
    if not is_reference:
        with safe_open(file, "pt") as saved:
            theirs = {key: saved.get_tensor(key) for key in saved.keys()}  # noqa: SIM118
    choices = Choices(trainer.mesh.rank, trainer.settings.micro_batch_size, theirs, trainer.mesh.place)
    choices.attach(trainer.stages)
    return choices


def choices_of_ranks(mesh: Mesh, choices: Choices | None) -> dict[str, Any]:
    """Return, as fields of a record, the choices of all ranks that differ from those of the reference."""
    own = ([], 0, 0) if choices is None else (choices.flips, choices.turned, choices.compared)
    flips, turned, compared = zip(*mesh.gather(own), strict=True)
    return {"flips": sorted(flip for each in flips for flip in each), "turned": sum(turned), "chosen": sum(compared)}


def loads_of(trainer: Trainer) -> dict[str, list[int]]:
    """Return how many tokens of the last step chose each expert, by the block; none where nothing counts them."""
    found = next((state for state in trainer.optimizer.states if isinstance(state, Balances)), None)
    if found is None:
        return {}
    loads = found.last[:, : found.experts].long().tolist()
    return {str(block): own for block, own in zip(found.blocks, loads, strict=True)}


def as_the_run(trainer: Trainer, choices: Choices | None, model: Decoder) -> None:
    """Give a model in float64 what routers of the trainer have beside their weights, in the first step."""
    for state in trainer.optimizer.states:
        if isinstance(state, Balances):
            state.twin(model, trainer.settings.micro_batch_size)
    if choices is not None:
        choices.float64(model, 1)
