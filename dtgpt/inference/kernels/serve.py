"""Steps of generation by kernels, and which stages they serve."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.inference.cache import Cache, DecodeRows, LayerCache
from dtgpt.inference.kernels.stages import ExactStage, FusedStage, parts_of
from dtgpt.inference.kernels.weights import computes_rows_apart, decode_weights, has_own_code
from dtgpt.inference.step import Step
from dtgpt.models.batch import Batch
from dtgpt.models.binding import bound_of
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import Core, attention_cores, inventory
from dtgpt.models.layers import Output
from dtgpt.ops.attention.core import AttentionRule
from dtgpt.ops.kernels.attention.cached import HEAD_SIZES, exact_attention
from dtgpt.ops.kernels.decode.blocks import next_rows
from dtgpt.ops.kernels.devices import has_triton
from dtgpt.ops.loss.cross_entropy import losses_of, over_group, real_columns, row_terms, to_loss_and_gradient_
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.stages import run_in_turn
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Is, Missing, Rule, Rules, check_rules

NO_KERNELS = (
    "exact=True serves blocks of GPT-2 and LLaMA, with tanh-GELU or SwiGLU, and of mixtures of experts, whose heads "
    "have 16, 32, 64 or 128 columns and see all earlier tokens, and this model has others; leave exact out"
)


class ExactRows(NamedTuple):
    """One token each of several sequences, whose attention has the bits of training's."""

    slots: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]

    def attend(self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Keep k and v `[1, B, N_kv, D]` of the tokens, and return their attention `[1, B, N, D]`."""
        grouped = q[0].unflatten(1, (k.shape[2], -1))
        return exact_attention(grouped, k[0], v[0], layer.keys, layer.values, *self, rule)[None]


class KernelStep(Step):
    """A `Step` whose rows are decoded by kernels, where they know the model; with the bits of training's forward pass
    where these are asked for."""

    @staticmethod
    def serves(graphs: bool) -> bool:
        """Return whether steps are of this kind, where CUDA graphs may hold them or not."""
        return True

    def __init__(self, *arguments: Any, **options: Any):
        """Take the arguments of `Step`. Raise UserError for a model that cannot have the bits that are asked for."""
        super().__init__(*arguments, **options)
        self.fused = fuse(self.stages, self.mesh, self.cache, self.exact)
        if self.exact and self.fused is None and not runs_rows_apart(self.stages, self.mesh, self.cache):
            raise UserError(NO_KERNELS)

    def row_logits(self, slots: Tensor) -> Tensor | None:
        if self.fused is None and not self.exact:
            return super().row_logits(slots)
        tokens, positions = next_rows(slots, self.cache.state.token, self.cache.state.position)
        if self.fused is None:
            return self.logits(Batch(tokens[None], positions=positions[None]), ExactRows(slots, positions), len(slots))
        logits = run_in_turn(self.fused, self.mesh, (tokens[None], DecodeRows(slots, positions)), self.dtype)
        return None if logits is None else logits[0]

    def choose(self, logits: Tensor, slots: Tensor, variant: Variant) -> Sampled:
        drawn = super().choose(logits, slots, variant)
        if not self.exact:
            return drawn
        return drawn._replace(**BITS.exact_scores(logits, drawn.tokens, drawn.top_ids, self.stages, self.mesh))


EXACT: Rules = (
    Rule(
        "exact=True cannot hold on device={device.type}: its matrix products choose the order of sums by the number of "
        "rows; use a GPU with Triton, or leave exact out",
        Missing("has_kernels"),
    ),
    Rule(
        "exact=True cannot hold in fp32 under tp={plan.tp}: training's products with matrices that are cut split their "
        "sums for some numbers of rows; use precision bf16 or fp16, or tp=1",
        Is("plan.tp", ">", 1),
        Is("dtype", "==", torch.float32),
    ),
)
SUMS: Rules = (
    Rule(
        "exact=True cannot hold under tp={plan.tp}: sums over more than two ranks have no order of their own in "
        "training with reduce={reduce}; use tp=2 with pp, a run with --reduce exact_tp, or leave exact out",
        Is("plan.tp", ">", 2),
        Is("spans_tp", "==", False),
    ),
    Rule(
        "exact=True cannot hold in fp32 for a run with reduce={reduce}: training's products of pieces split their sums "
        "for some numbers of rows; use precision bf16 or fp16, or leave exact out",
        Is("dtype", "==", torch.float32),
        Is("spans_tp", "==", True),
    ),
)


class ExactBits:
    """Log-probabilities with the bits of training's forward pass."""

    def check_exact(self, device: torch.device, plan: ResolvedPlan, dtype: torch.dtype) -> None:
        """Raise UserError where generation cannot have these bits."""
        has_kernels = has_triton(torch.empty(0, device=device))
        check_rules(EXACT, {"device": device, "plan": plan, "dtype": dtype, "has_kernels": has_kernels})

    def check_sums(self, settings: Settings) -> None:
        """Raise UserError where generation cannot have the bits of a run with these settings."""
        part = seams.added("sums").get(settings.reduce)
        values = {name: getattr(settings, name) for name in ("plan", "dtype", "reduce")}
        check_rules(SUMS, values | {"spans_tp": part is not None and seams.load(part).spans_tp})

    def check_blocks(self, config: ModelConfig) -> None:
        """Raise UserError for a model whose blocks cannot have them."""
        parts = inventory(config)
        kinds = set(parts.examples)
        with torch.device("meta"):
            blocks = [config.make_block(index) for index in kinds]
        apart = all(map(computes_rows_apart, blocks))
        known = all(
            core == Core(core.kv_heads, core.head_dim, scaled=apart and core.scaled) and core.head_dim in HEAD_SIZES
            for core in parts.kinds_of_cores()
        )
        if not known or not (apart or all(map(_has_kernels, blocks))):
            raise UserError(NO_KERNELS)

    def exact_scores(
        self, logits: Tensor, ids: Tensor, top_ids: Tensor, stages: Sequence[Decoder], mesh: Mesh
    ) -> dict[str, Tensor]:
        """Return "logprobs" of ids `[M]` and "top_logprobs" of top_ids `[M, n]` with those bits, from this rank's
        columns of the logits `[M, V_local]`; stages: of the model, whose head says how its loss is summed."""
        config = stages[0].config
        heads = [module for stage in stages for module in stage.modules() if isinstance(module, Output)]
        loss: Any = bound_of(heads[0]).loss
        if loss is not None:  # of sums in pieces
            chosen = [loss.log_probabilities(logits, each, config.vocab_size) for each in (ids, *top_ids.unbind(1))]
            return _scores(chosen, top_ids)
        first = chunk(range(config.padded_vocab_size), mesh.plan.tp, mesh.place.tp).start
        return as_in_training(logits, ids, top_ids, config.vocab_size, first, mesh.tp_group)


BITS = ExactBits()


def _has_kernels(block: nn.Module) -> bool:
    weights = decode_weights(block)
    return weights is not None and weights.activation is not None


def as_in_training(
    logits: Tensor,
    ids: Tensor,
    top_ids: Tensor,
    vocab_size: int,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Return the log-probabilities "logprobs" of ids `[M]` and "top_logprobs" of top_ids `[M, alternatives]` under
    logits `[M, V]`, V >= vocab_size, with the bits of the loss in training. group: the ranks that have the other
    columns, where logits `[M, V_local]` are those from `start` on."""
    logits, chosen = logits.contiguous(), [column.contiguous() for column in (ids, *top_ids.unbind(1))]
    real = real_columns(logits.shape[1], vocab_size, start)
    if group is None:
        return _scores([-to_loss_and_gradient_(logits, column, None, real) for column in chosen], top_ids)
    terms = torch.cat([row_terms(logits, column, start, real) for column in chosen], dim=1)
    return _scores((-losses_of(*over_group(terms, group))).chunk(len(chosen)), top_ids)


def _scores(found: Sequence[Tensor], top_ids: Tensor) -> dict[str, Tensor]:
    first, *others = found
    return {"logprobs": first, "top_logprobs": torch.stack(others, 1) if others else top_ids.float()}


def fuse(stages: list[Decoder], mesh: Mesh, cache: Cache, exact: bool = False) -> list[FusedStage] | None:
    """Return the stages for decode steps, or None where kernels cannot run them: on CPUs, in fp32 unless
    `exact`, with parameters that are cut for training, with adapters, or with blocks, a rule of attention or an
    activation that they do not know. All ranks of the mesh take part. exact: with the bits of training's
    forward pass."""
    modules = [module for stage in stages for module in parts_of(stage)]
    if not _usable(stages, cache, (2, 4) if exact else (2,)) or any(decode_weights(each) is None for each in modules):
        return None
    blocks = [block for stage in stages for block in stage.blocks.values()]
    if any(core.scale is not None for block in blocks for core in attention_cores(block)):
        return None
    if len(cache.layers) != len(blocks) or not all(map(_has_kernels, blocks)):
        return None
    if exact and any(decode_weights(block).router is not None for block in blocks):
        return None  # the modules have these bits
    layers = iter(cache.layers)
    kind = ExactStage if exact else FusedStage
    fused = [kind(stage, [next(layers) for _ in stage.blocks], mesh) for stage in stages]
    for stage in fused:
        stage.share_exchange()
    return fused


def runs_rows_apart(stages: list[Decoder], mesh: Mesh, cache: Cache) -> bool:
    """Return whether the stages' own modules can decode rows with the bits of training's forward pass."""
    parts = [module for stage in stages for module in parts_of(stage)]
    blocks = [block for stage in stages for block in stage.blocks.values()]
    known = all(map(computes_rows_apart, blocks)) and not any(map(has_own_code, parts))
    whole = mesh.plan.tp == 1 or all(any(bound_of(each).pieces for each in block.modules()) for block in blocks)
    return known and whole and _usable(stages, cache, (2, 4))


def _usable(stages: list[Decoder], cache: Cache, widths: tuple[int, ...]) -> bool:
    """Return whether kernels can read the parameters, of so many bytes an element, and have the attention of the
    stages, whatever its scale."""
    modules = [module for stage in stages for module in stage.modules()]
    if any(bound.product is not None and not bound.pieces for bound in map(bound_of, modules)):
        return False  # of a run that trains adapters
    cores = [core for stage in stages for core in attention_cores(stage)]
    if any(value is not None for core in cores for value in (core.window, core.softcap, core.sinks)):
        return False
    parameters = (p for stage in stages for p in stage.parameters())
    sizes = {layer.keys.shape[-1] for layer in cache.layers}
    return sizes <= set(HEAD_SIZES) and all(
        type(p.data) is Tensor and p.dtype.itemsize in widths and has_triton(p) for p in parameters
    )
