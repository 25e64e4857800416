"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon),
with the scale and decay of Moonlight (Liu et al. 2025, section 2.2). The config class and the rule.

Every weight of a block is split into its logical matrices (q, k, v; gate and up; those of a stack). Each is
orthogonalised on one rank.
Embeddings, the head, norms and biases are AdamW's.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Shape, inventory
from dtgpt.models.roles import Role
from dtgpt.models.shared.packed import Rows, pieces
from dtgpt.ops.optim.adamw import AdamW, Slot
from dtgpt.ops.optim.optimizer import checked
from dtgpt.optim.muon.matrices import Matrices, Pending, is_orthogonalized
from dtgpt.optim.muon.newton_schulz import COEFFICIENTS, flops, orthogonalize
from dtgpt.parallel.layout import slices
from dtgpt.parallel.shards import Shard, Shards
from dtgpt.util.field_types import Bounds, Pattern

TABLES = (Role.VOCABULARY, Role.POSITIONS)


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of blocks. `lr` is theirs, `beta1`, `beta2` and `eps` are AdamW's for everything else."""

    takes: ClassVar[Mapping[str, Mapping[str, str | None]]] = {"adamw": {"momentum": "exp_avg"}, "normuon": {}}

    kind: Annotated[str, "optimizer", Pattern("muon", "is another optimizer; use muon")] = "muon"
    momentum: Annotated[float, "decay rate of the momentum of matrices", Bounds(0, below=1)] = 0.95
    nesterov: Annotated[bool, "look ahead by one step of the momentum"] = True
    newton_schulz: Annotated[
        Literal["quintic", "convergent"],
        "coefficients of the iterations; quintic: 3.4445, -4.775, 2.0315, fast; convergent: 2, -1.5, 0.5, exact after "
        "about 12 steps",
    ] = "quintic"
    newton_schulz_steps: Annotated[int, "number of iterations that orthogonalise a matrix", Bounds(1, 20)] = 5
    adjust_lr: Annotated[
        Literal["match_rms_adamw", "original"],
        "factor of lr for a matrix [R, C]; match_rms_adamw: 0.2 sqrt(max(R, C)), so that learning rates of AdamW fit; "
        "original: sqrt(max(1, R / C))",
    ] = "match_rms_adamw"
    per_head: Annotated[bool, "orthogonalise each head of queries, keys and values by itself"] = False
    embedding_lr: Annotated[float | None, "peak learning rate of embeddings; none: lr", Bounds(above=0)] = None
    head_lr: Annotated[
        float | None, "peak learning rate of an output projection that is not tied; none: lr", Bounds(above=0)
    ] = None
    vector_lr: Annotated[float | None, "peak learning rate of norms and biases; none: lr", Bounds(above=0)] = None
    table_weight_decay: Annotated[
        float | None, "weight decay of embeddings and output projection; none: weight_decay", Bounds(0)
    ] = None
    vector_weight_decay: Annotated[float, "weight decay of norms and biases", Bounds(0)] = 0.0

    def make(self, shards: Shards) -> "Muon":
        return Muon(self, shards)

    def notes(self, model: ModelConfig) -> list[str]:
        if self.head_lr is None or not model.tied:
            return []
        return [
            f"optimizer.head_lr={self.head_lr:g} has no effect: the output projection is tied to the embedding, whose "
            "rate is optimizer.embedding_lr"
        ]

    def state_bytes(self, shape: Shape, role: Role | None) -> int:
        return 4 if self.needs_whole(shape, role) else 8

    def needs_whole(self, shape: Shape, role: Role | None) -> bool:
        return is_orthogonalized(shape, role)

    def whole_flops(self, shape: Shape, role: Role | None) -> int:
        if not self.needs_whole(shape, role):
            return 0
        return math.prod(shape[:-2]) * flops(shape[-2], shape[-1], self.newton_schulz_steps)

    def update_bytes(self, model: ModelConfig, blocks: tuple[int, ...], ranks: int, parts: int, width: int) -> int:
        from dtgpt.optim.muon.memory import update_bytes  # here, since who trains does not ask

        return update_bytes(self.newton_schulz_steps, self.per_head, model, blocks, ranks, parts, width)

    def factor(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate for a matrix."""
        if self.adjust_lr == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def rate_of(self, role: Role | None, dimensions: int) -> float:
        """Return the peak learning rate of a parameter that AdamW updates."""
        own = self.vector_lr
        if role in TABLES:
            own = self.embedding_lr
        elif role is Role.OUTPUT and dimensions > 1:
            own = self.head_lr
        return self.lr if own is None else own

    def decay_of(self, dimensions: int) -> float:
        """Return the weight decay of a parameter that AdamW updates."""
        if dimensions < 2:
            return self.vector_weight_decay
        return self.weight_decay if self.table_weight_decay is None else self.table_weight_decay


class Muon:
    """An `Optimizer` (`dtgpt.ops.optim.optimizer`). The state of a matrix is `momentum`, fp32."""

    kind, takes = MuonConfig.kind, MuonConfig.takes

    def __init__(self, config: MuonConfig, shards: Shards):
        self.config, self.device = config, shards.mesh.device
        self.updates = torch.zeros((), dtype=torch.float64, device=self.device)
        known = {p.name: p for p in inventory(shards.config).parameters()}
        self.shards = list(shards)
        chosen = [s for s in shards if config.needs_whole(known[s.name].shape, known[s.name].role)]
        self.momentum = {s.index: torch.zeros_like(s.local) for s in chosen}
        self.pieces: dict[int, list[Tensor]] = {}  # of each weight, the rows of each matrix in it
        self.factors: dict[int, Tensor] = {}  # of the learning rate, for each row `[.., rows, 1]` of the shard
        costs = []
        for shard in chosen:
            packed = pieces(shards.config, known[shard.name], config.per_head)
            shape = known[shard.name].shape
            self.pieces[shard.index] = [_indices(rows, self.device) for rows in packed]
            self.factors[shard.index] = self._factors(shard, packed, shape)
            costs.append(sum(flops(sum(map(len, rows)), shape[-1], config.newton_schulz_steps) for rows in packed))
        self.dtype = torch.bfloat16 if shards.dtype.itemsize < 4 else torch.float32
        self.orderless = shards.sums.orderless
        self.matrices = Matrices(shards, chosen, costs, self.dtype)
        self.others = self._make_others(
            {
                s.index: (config.rate_of(known[s.name].role, s.dimensions), config.decay_of(s.dimensions))
                for s in shards
                if s.index not in self.momentum
            }
        )

    def _factors(self, shard: Shard, pieces: Sequence[Rows], shape: Shape) -> Tensor:
        factors = torch.empty(math.prod(shape[:-1]))
        for rows in pieces:
            factor = self.config.factor(sum(map(len, rows)), shape[-1])
            for part in rows:
                factors[part.start : part.stop : part.step] = factor
        return factors.view(*shape[:-1], 1)[slices(shard.region[:-1])].to(self.device)

    def _make_others(self, groups: Mapping[int, tuple[float, float]]) -> list[tuple[float, list[int], AdamW]]:
        """Return (factor of the learning rate, shards, rule) of what AdamW updates, by rate and weight decay."""
        made = []
        for rate, decay in dict.fromkeys(groups.values()):
            indices = [index for index, own in groups.items() if own == (rate, decay)]
            held = [self.shards[index] for index in indices]
            slots = [Slot(s.local, s.low_precision, decay=decay > 0) for s in held]
            own = self.config
            rule = AdamW(slots, own.beta1, own.beta2, own.eps, decay)
            made.append((rate / own.lr, indices, rule))
        return made

    def state(self, index: int) -> dict[str, Tensor]:
        """Return the momentum of a matrix, the moments of any other shard."""
        if index in self.momentum:
            return {"momentum": self.momentum[index]}
        return next(rule.state(held.index(index)) for _, held, rule in self.others if index in held)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: Tensor, scale: Tensor, skip: Tensor | None = None) -> None:
        """Apply one update; see `Optimizer.step`. Messages of one round travel while another is computed."""
        gradients = checked(gradients, [shard.local for shard in self.shards])
        for factor, indices, rule in self.others:
            rule.updates.copy_(self.updates)
            rule.step([gradients[index] for index in indices], lr * factor, scale, skip)
        sent = (self._send_directions(indices, gradients, scale, skip) for indices in self.matrices.rounds)
        nothing: Pending = dict
        arriving, leaving = next(sent, nothing), nothing
        for indices in self.matrices.rounds:
            wholes = arriving()
            arriving = next(sent, nothing)  # of the next round, while this one is computed
            parts = self.matrices.scatter(self._orthogonalize(wholes, skip), indices)
            self._apply(leaving(), lr, skip)
            leaving = parts
        self._apply(leaving(), lr, skip)
        self.updates += 1 if skip is None else ~skip

    def _send_directions(
        self, indices: Sequence[int], gradients: Sequence[Tensor], scale: Tensor, skip: Tensor | None
    ) -> Pending:
        """Update the momentum of these shards and send their directions to the owners."""
        own, directions = self.config, {}
        for index in indices:
            gradient = gradients[index].float() * scale
            momentum = self.momentum[index]
            new = torch.lerp(momentum, gradient, 1 - own.momentum)
            direction = torch.lerp(gradient, new, own.momentum) if own.nesterov else new
            momentum.copy_(new if skip is None else torch.where(skip, momentum, new))
            directions[index] = direction.to(self.dtype)
        return self.matrices.gather(directions)

    def _orthogonalize(self, wholes: Mapping[int, Tensor], skip: Tensor | None) -> dict[int, Tensor]:
        """Return the weights with each matrix in them orthogonalised. skip: as in
        `step`, for a rule that keeps a state of whole matrices."""
        by_shape: dict[Shape, list[tuple[int, Tensor]]] = {}
        for index, whole in wholes.items():
            for rows in self.pieces[index]:
                by_shape.setdefault((len(rows), whole.shape[-1]), []).append((index, rows))
        own = self.config
        made = {index: torch.empty_like(whole) for index, whole in wholes.items()}
        given, taken = ({i: whole.flatten(0, -2) for i, whole in each.items()} for each in (wholes, made))  # stacks
        for packed in self._batches(by_shape.values()):
            stacked = torch.stack([given[index].index_select(0, rows) for index, rows in packed])
            for (index, rows), result in zip(
                packed, orthogonalize(stacked, own.newton_schulz_steps, COEFFICIENTS[own.newton_schulz]), strict=True
            ):
                taken[index].index_copy_(0, rows, result)
        return made

    def _batches(self, groups: Iterable[list[tuple[int, Tensor]]]) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield what is orthogonalised in one batch. How many matrices a rank owns follows from the plan, and the bits
        of a product from the size of its batch: one matrix at a time where plans have the same bits."""
        for group in groups:
            size = 1 if self.orderless else len(group)
            yield from (group[first : first + size] for first in range(0, len(group), size))

    def _apply(self, parts: Mapping[int, Tensor], lr: Tensor, skip: Tensor | None) -> None:
        for index, part in parts.items():
            shard = self.shards[index]
            new = shard.local * (1 - lr * self.config.weight_decay) - lr * self.factors[index] * part
            shard.local.copy_(new if skip is None else torch.where(skip, shard.local, new))
            if shard.low_precision is not None:
                shard.low_precision.copy_(shard.local)


def _indices(rows: Rows, device: torch.device) -> Tensor:
    """Return the numbers of the rows."""
    return torch.cat([torch.arange(part.start, part.stop, part.step, device=device) for part in rows])
