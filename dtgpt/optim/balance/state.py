"""The loads of experts in a step, and what follows from them: gradients of balance losses, corrections of the choice,
figures of a record.

Loads are whole numbers, the sums over the global batch, so that they have the same bits under every plan that has the
same choices. They are counted in backward: it runs once for each micro-batch, neither in evaluation nor when a pass is
computed again. The gradient of a loss of the global batch needs its loads before the backward pass of the first
micro-batch, which only a forward pass of all of them tells: `before` runs it, unless the batch is one micro-batch of
one process, whose own forward pass tells the same.

All state is on the device and changes by tensor operations in place: a CUDA graph may capture it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.moe.mixture import Router, routers
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.optim.balance.losses import (
    chosen_of,
    counted_tokens,
    probabilities,
    sequence_loads,
    through,
    token_weights,
)
from dtgpt.optim.step_state import StepState
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import layout_of
from dtgpt.util.torch_private import is_dtensor

if TYPE_CHECKING:
    from dtgpt.parallel.engine import TrainingEngine

# Over the batch, of each layer, beside loads and probabilities.
SUMS = ("sequence_loss", "z_loss", "entropy", "samples")


class _Watched(torch.autograd.Function):
    """The logits, whose gradient gets what balance losses add."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, experts: Tensor, counted: Tensor | None, balance: "Balance", leaf: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(logits, experts)
        ctx.counted, ctx.balance = counted, balance  # as they are in this pass, also where it runs again in backward
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        more = ctx.balance.take(*ctx.saved_tensors, ctx.counted)
        return grad if more is None else grad + more, None, None, None, None


class Balance:
    """What a `Router` has of it: rows of the tensors of all layers, so that code compiled for one layer is that of
    all."""

    def __init__(self, shared: "Balances", row: int, router: Router):
        self.shared, self.row, self.rule = shared, row, router.rule
        self.totals, self.ahead, self.loads = shared.totals[row], shared.ahead[row], shared.loads[row]
        self.correction = None if router.correction is None else shared.corrections[row]

    def watch(self, logits: Tensor, experts: Tensor) -> Tensor:
        shared = self.shared
        if not shared.adds:
            return logits
        trains = torch.is_grad_enabled()
        if shared.looks or (trains and shared.at_once):
            own = chosen_of(experts, logits, weights_of(shared.counted, logits)).sum((0, 1), dtype=torch.float64)
            own = own if shared.counts else torch.zeros_like(own)
            self.ahead.copy_(own if trains else self.ahead + own)  # a pass may be computed again in backward
        if not trains:
            return logits
        # Backward comes here also where nothing before a frozen router is trained.
        leaf = None if logits.requires_grad else shared.leaf
        return _Watched.apply(logits, experts, shared.counted, self, leaf)

    def take(self, logits: Tensor, experts: Tensor, counted: Tensor | None) -> Tensor | None:
        """Count the choices of a micro-batch, and return what its losses add to the gradient of logits `[B, T, E]`."""
        shared, score = self.shared, self.rule.score
        config, weights = shared.config, weights_of(counted, logits).expand(*logits.shape[:2], 1)
        chosen, own = chosen_of(experts, logits, weights), probabilities(logits, score)
        of_sample = shared.over_slices(torch.cat([chosen, weights], -1).sum(1, keepdim=True))
        per_sequence, each = sequence_loads(of_sample[..., :-1], of_sample[..., -1:], self.rule.chosen)
        log_sum, seen = logits.logsumexp(-1, keepdim=True), own * weights
        sums = [
            chosen.sum((0, 1), dtype=torch.float64),
            seen.sum((0, 1), dtype=torch.float64),
            (per_sequence * each * seen).sum(dtype=torch.float64)[None],
            (log_sum.square() * weights).sum(dtype=torch.float64)[None],
            (torch.special.entr(own) * weights).sum(dtype=torch.float64)[None],
            torch.full((1,), len(logits) / shared.slices, dtype=torch.float64, device=logits.device),
        ]
        if shared.counts:
            self.totals.add_(torch.cat(sums))
        # Of a token in the mean over all that count, which is that over micro-batches, as those of the loss are.
        samples = shared.samples or len(logits)
        part = (shared.share / (samples * logits.shape[1])).to(logits.dtype)
        made = []
        if config.loss:
            ahead = (shared.compared()[self.row] if shared.at_once else self.loads).to(logits.dtype) * part
            of_loads = ahead if config.looks_ahead else per_sequence * each * (shared.slices / samples)
            made.append(config.loss * through(own, logits, score, of_loads))
        if config.z_loss:
            made.append(2 * config.z_loss * part * log_sum * logits.softmax(-1))
        scale = 1.0 if shared.scale is None else shared.scale.to(logits.dtype)
        return sum(made) * weights * (scale / shared.layers) if made else None


class Balances(StepState):
    """Of all layers that have experts; a rank has the routers of its stages. Ranks of tensor parallelism see the same
    tokens: one of them counts. It alone adds to gradients, where these are summed over them, and each where not.

    totals: fp64 `[L, 2E + 4]`, sums over this rank's part of the batch so far: loads, probabilities, SUMS. last: the
    same over the whole batch of the last step. ahead: loads of this step's batch, before its gradients. loads: what the
    loss of a batch compares, E f_e. corrections: fp32 `[L, E]`, of the rows of this rank's routers. share: fp32, all
    tokens of the batch through those that count. scale: what gradients of the loss of a micro-batch are multiplied by.
    """

    name = "balance"

    def __init__(
        self,
        model: ExpertsConfig,
        config: BalanceConfig,
        mesh: Mesh,
        device: torch.device | None = None,
        alone: bool = False,
        each_adds: bool = False,
    ):
        self.model, self.config, self.mesh = model, config, mesh
        self.blocks = [index for index in range(model.num_layers) if model.has_experts(index)]
        self.layers, self.experts = len(self.blocks), model.num_experts
        self.counts, self.slices = mesh.place.tp == 0, mesh.plan.cp  # slices: of a sample, on as many ranks
        self.adds = self.counts or each_adds
        shape, device = (self.layers, self.experts), device or mesh.device
        wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.totals, self.last = (torch.zeros(self.layers, 2 * self.experts + len(SUMS), **wide) for _ in range(2))
        self.ahead, self.loads = torch.zeros(shape, **wide), torch.zeros(shape, **wide)
        self.corrections = torch.zeros(shape, device=device)
        self.share = torch.ones((), device=device)
        self.leaf = torch.zeros((), device=device, requires_grad=True)  # of autograd's graph; its gradient is None
        self.scale: Tensor | None = None
        self.counted: Tensor | None = None  # bool [B, T], of the present pass; None: all tokens
        self.knows_padding = True  # whether samples say which of their tokens count
        self.samples: int | None = None  # of a micro-batch; None: as many as a pass has
        self.looks = False  # whether a pass is run for the loads of the batch alone
        # Whether a pass that trains has the whole batch; `alone`: whether its choices are those of one for loads alone.
        self.at_once = False
        self.alone = alone
        self.parameters: dict[int, nn.Parameter] = {}  # of the corrections of this rank's routers, by row
        self._knows = False  # whether `corrections` are those of the parameters

    def attach(self, stages: Iterable[Decoder]) -> None:
        for stage in stages:
            stage.register_forward_pre_hook(self._begin, with_kwargs=True)
            for index, block in stage.blocks.items():
                for router in routers(block):
                    self._attach(router, self.blocks.index(int(index)))

    def _attach(self, router: Router, row: int) -> None:
        if router.correction is not None:
            self.parameters[row] = router.correction.bias
        router.balance = Balance(self, row, router)

    def twin(self, model: Decoder, samples: int) -> None:
        """Attach to another whole model, on the CPU, what has the loads and factors of this step. samples: of a
        micro-batch, of which passes may have a part."""
        twin = Balances(self.model, self.config, self.mesh, torch.device("cpu"))
        twin.samples = samples
        twin.loads, twin.share = (self.compared() if self.at_once else self.loads).cpu(), self.share.cpu()
        twin.scale = None if self.scale is None else self.scale.cpu()
        twin.attach([model])

    def scaled_by(self, scale: Tensor) -> None:
        self.scale = scale

    @torch.no_grad()
    def _begin(self, module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        """Take note of a pass through a stage."""
        fields = {**dict(zip(Batch._fields, inputs, strict=False)), **named}
        weights = token_weights(fields.get("loss_weights"), fields.get("by_token"))
        self.counted = self._counted(fields.get("document_bounds"), weights)
        self._know()

    def _counted(self, bounds: Tensor | None, weights: Tensor | None) -> Tensor | None:
        """Return which tokens of this rank count. Whether a document has a loss tells its whole sample."""
        if bounds is None or weights is None or weights.shape[1] == bounds.shape[1]:
            return counted_tokens(bounds, weights)
        parts = [torch.empty_like(weights) for _ in range(self.slices)]
        dist.all_gather(parts, weights.contiguous(), group=self.mesh.cp_group)
        counted = counted_tokens(bounds, torch.cat(parts, 1))
        return None if counted is None else counted.chunk(self.slices, 1)[self.mesh.place.cp]

    def over_slices(self, counts: Tensor) -> Tensor:
        """Return the counts of whole samples, of those of this rank's slices, where the loss of a sequence needs
        them."""
        if self.slices > 1 and self.config.loss and self.config.over == "sequence":
            dist.all_reduce(counts, group=self.mesh.cp_group)
        return counts

    def _know(self) -> None:
        """Read the corrections, of which each rank may hold a part: ranks of a stage call this together."""
        if not self._knows:
            for row, parameter in self.parameters.items():
                whole: Any = parameter.detach()
                self.corrections[row] = whole.full_tensor() if is_dtensor(whole) else whole
        self._knows = True

    @torch.no_grad()
    def before(self, engine: "TrainingEngine", batch: Batch, micro_batches: int) -> None:
        self._know()
        counted = self._counted(batch.document_bounds, token_weights(batch.loss_weights, batch.by_token))
        if counted is not None:
            plan = self.mesh.plan
            tokens = self.mesh.sum(counted.sum())[0] / (plan.tp * plan.pp)
            self.share.copy_(counted.numel() * plan.data_ranks / tokens.clamp(min=1))
        self.at_once = self.alone and self.config.looks_ahead and micro_batches == 1
        if self.config.looks_ahead and not self.at_once:
            self._look(engine, batch, micro_batches)

    def _look(self, engine: "TrainingEngine", batch: Batch, micro_batches: int) -> None:
        self.ahead.zero_()
        self.looks = True
        for piece in batch.chunk(micro_batches):
            engine.evaluate(piece)
        self.looks = False
        self.mesh.all_reduce(self.ahead)
        self.loads.copy_(self.compared())

    def compared(self) -> Tensor:
        """Return `loads` of the choices in `ahead`, when all layers have counted theirs."""
        loads = self.ahead.mean(0, keepdim=True) if self.config.layers == "together" else self.ahead
        tokens = self.ahead.sum(1, keepdim=True) / self.model.experts_per_token
        return loads * self.experts / tokens.clamp(min=1)

    @torch.no_grad()
    def update(self, loss: Tensor, norm: Tensor, empty: Tensor | None = None) -> None:
        """Take the loads of the step, and move the corrections."""
        self.last.copy_(self.mesh.all_reduce(self.totals))
        self.totals.zero_()
        if self.config.bias_step:
            loads = self.last[:, : self.experts]
            below = loads.sum(1, keepdim=True) - self.experts * loads  # whole numbers
            self.corrections.add_(below.sign().float(), alpha=self.config.bias_step)
            for row, parameter in self.parameters.items():
                whole: Any = parameter
                rows = layout_of(parameter, self.mesh.plan).region(self.mesh.rank)[0]
                local = whole.to_local() if is_dtensor(whole) else whole
                local.copy_(self.corrections[row, rows.start : rows.stop])

    def metrics(self) -> dict[str, float]:
        """Return the losses, and of each layer that has experts the loads of the fullest and the emptiest, in even
        shares, the mean entropy of its router in nats, and how many experts no token of the last step chose; nothing
        where padding would count."""
        last = self.last.cpu()
        loads, chances, sums = last.split([self.experts, self.experts, len(SUMS)], 1)
        tokens = loads.sum(1) / self.model.experts_per_token
        if not self.knows_padding or not tokens.min() > 0:
            return {}
        shares = loads * self.experts / loads.sum(1, keepdim=True)
        found = {"load_max": shares.amax(1), "load_min": shares.amin(1), "router_entropy": sums[:, 2] / tokens}
        found["dead_experts"] = (loads == 0).sum(1).double()
        whole = {"load_max": "max", "load_min": "min", "router_entropy": "mean", "dead_experts": "sum"}
        figures = self._losses(loads, chances, sums, tokens)
        figures |= {name: float(getattr(found[name], how)()) for name, how in whole.items()}
        for place, block in enumerate(self.blocks):
            figures |= {f"{name}_{block}": float(values[place]) for name, values in found.items()}
        figures = {name: np.float32(value).item() for name, value in figures.items()}  # without what an order adds
        return {name: int(value) if name.startswith("dead") else value for name, value in figures.items()}

    def _losses(self, loads: Tensor, chances: Tensor, sums: Tensor, tokens: Tensor) -> dict[str, float]:
        """Return the losses that the recipe has, without their coefficients."""
        found, config = {}, self.config
        if config.loss:
            if config.over == "sequence":
                found["balance_loss"] = (sums[:, 0] / sums[:, 3]).mean()
            else:
                parts = (loads / tokens[:, None], chances / tokens[:, None])
                chosen, chance = (part.mean(0) for part in parts) if config.layers == "together" else parts
                found["balance_loss"] = self.experts * (chosen * chance).sum(-1).mean()
        if config.z_loss:
            found["z_loss"] = (sums[:, 1] / tokens).mean()
        return {name: float(value) for name, value in found.items()}

    def state(self) -> None:
        """Return None: corrections are parameters, which a checkpoint has."""

    def restore(self, saved: Any) -> None:
        """Read the corrections again."""
        self._knows = False


def weights_of(counted: Tensor | None, logits: Tensor) -> Tensor:
    """Return 1 for tokens that count, 0 for others, `[B, T, 1]`, or of one token for all."""
    return logits.new_ones(1, 1, 1) if counted is None else counted[..., None].to(logits.dtype)
