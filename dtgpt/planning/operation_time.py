"""The seconds that the operations of a micro-batch take on one rank, from shapes and the rates of a GPU."""

import math
from dataclasses import dataclass, replace

import torch

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.inventory import Parameter, inventory
from dtgpt.models.roles import COLUMNS, MATRICES, MLP_COLUMNS, STACKS
from dtgpt.models.shared.attention_backend import backend_of
from dtgpt.models.shared.flops import tokens_seen
from dtgpt.models.shared.positions import learns_positions
from dtgpt.optim.fp8.precision import FP8
from dtgpt.parallel.layout import chunk
from dtgpt.planning.gpus import Rates
from dtgpt.planning.layout import Layout
from dtgpt.posttrain.demands import rows_of
from dtgpt.posttrain.lora.config import LoraConfig

# Seconds of a kernel that its work does not explain: filling the GPU, the tail, the gap. Source: one GPU takes 87.8 ms
# for 4 micro-batches of 4 samples of the 345M and 76.0 for one of 16 (benchmarks/notes/plans.md and steps.md).
START, PRODUCT_START = 2.5e-6, 6e-6
TILE = 128  # rows and columns; a product computes whole tiles
OF_STACKS = 0.8  # of the rate of products, those of a stack of experts: steps.md, 1,447 ms of a step of OLMoE
HALF_LENGTH = 610  # tokens of a sample at which attention reaches half of its rate: diagonal tiles, short loops
MASKED = 1.21  # attention with dropout, which draws and reads masks: steps.md, 2.5 of 11.7 ms of the 345M
SPLIT = 1.45  # blocks under ZBVZeroBubble: PyTorch's own operations; notes/plans.md, 125.0 ms where 1F1B takes 96.3
QUANTISED = 4  # bytes moved for each element that becomes 8 bits in both orders
# Bytes of a score [T, T] moved in 16 bits, both ways: by the fused softmax (docs/benchmarks.md, 0.417 + 0.530 ms for
# 537 million), by one of plain PyTorch, and by the six products around either.
SOFTMAX, PLAIN_SOFTMAX, AROUND = 6.6, 20.0, 12.0
# Bytes of a score, and kernels, where plain PyTorch draws a mask: counted in `_apply` of `dtgpt.ops.random.dropout`.
DRAWN, DRAWS = 200, 418


@dataclass(frozen=True)
class Work:
    """Seconds of a micro-batch, or of a step, on one rank."""

    products: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0  # norms, activations, rotary positions, residuals, embedding
    loss: float = 0.0  # of logits that exist; their product is among the products
    quantisation: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> "Work":
        return Work(*(factor * seconds for seconds in vars(self).values()))


@dataclass(frozen=True)
class Passes:
    """The work of the forward and the backward pass, what is computed again in the latter apart."""

    forward: Work
    backward: Work
    again: Work = Work()

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.again.total


class Operations:
    """The operations of one rank for a micro-batch: of a kind of block, of the embedding, of the head."""

    def __init__(self, settings: Settings, rates: Rates):
        plan, config = settings.plan, settings.model
        self.settings, self.rates, self.config = settings, rates, config
        self.tokens = rows_of(settings).number * rows_of(settings).length
        self.width, self.tp = settings.dtype.itemsize, plan.tp
        self.stream = config.hidden_size / (plan.tp if plan.sequence_parallel else 1)  # elements of a token
        self.layout = Layout(config, ResolvedPlan(tp=plan.tp))  # without styles of the plan's own
        self.rate = rates.products_fp32 if settings.dtype == torch.float32 else rates.products

    def product(self, rows: int, inner: int, columns: int, fp8: bool = False) -> float:
        """Return the seconds of a product of matrices `[rows, inner]` and `[inner, columns]`."""
        whole = math.ceil(rows / TILE) * math.ceil(columns / TILE) * TILE**2
        return PRODUCT_START + 2 * whole * inner / (
            self.rates.products_fp8 if fp8 and self.rates.products_fp8 else self.rate
        )

    def products(self, count: int, rows: int, inner: int, columns: int, fp8: bool) -> float:
        """Return the seconds of one product, or of those of a stack of `count` matrices, which one kernel computes."""
        one = self.product(rows, inner, columns, fp8)
        return one if count == 1 else PRODUCT_START + count * (one - PRODUCT_START) / OF_STACKS

    def moved(self, elements: float, kernels: int = 1, width: float | None = None) -> float:
        """Return the seconds in which `elements` of each token are read or written."""
        return kernels * START + self.tokens * elements * (width or self.width) / self.rates.memory

    def block(self, index: int, again: bool) -> Passes:
        """Return the passes of block `index`. again: whether what the recipe names is computed again in it."""
        settings, config = self.settings, self.config
        forward, backward, quantised, c, r, biases = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        fp8, trains = settings.products == FP8, not settings.freezes_weights
        lora, made = settings.section(LoraConfig), 0.0
        for p in inventory(config).of_block(index):
            if p.role not in (*MATRICES, *STACKS):
                continue
            shape = [len(part) for part in self.layout.of(p).region(0)]
            if p.name.endswith(".bias"):
                biases += shape[-1] if p.role in COLUMNS else 0
                continue
            *stack, rows, inner = shape
            count = math.prod(stack)  # of matrices, each for a share of the tokens
            share = config.used_elements(p.shape, p.role) / math.prod(p.shape)
            tokens = math.ceil(self.tokens * share)
            forward += self.products(count, tokens, inner, rows, fp8)
            backward += self.products(count, tokens, rows, inner, fp8)
            if trains:
                backward += self.products(count, rows, tokens, inner, fp8)
            if settings.freezes_weights:
                forward, backward = self._adapted(p, count, tokens, rows, inner, forward, backward)
            if lora.quantises(p):  # each pass makes the matrix anew: its 4 bits are read, its elements written
                made += (0.5 + self.width) * rows * inner / self.rates.memory + START
            quantised += QUANTISED * (self.tokens * (inner + rows) + 2 * rows * inner) * fp8
            is_first = p.role in MLP_COLUMNS
            each = count * share
            c, r = (c + each * rows, r) if is_first else (c, r + each * inner)
        core_forward, core_backward, heads = self._cores(index)
        attended = sum(config.num_heads * core.head_dim for core in inventory(config).cores(index)) / self.tp
        gate = c + max(r - attended, 0)  # the projection of attention takes its input as it is
        rotary = 0.0 if learns_positions(config) else heads
        dropped = 2 * self.stream if config.dropout else 0
        if fp8:  # the activation between the matrices of an MLP writes 8 bits itself
            quantised -= QUANTISED * self.tokens * (c + r - attended)
        half = quantised / self.rates.memory / 2 + made
        return self._again(
            again,
            Passes(
                Work(forward, core_forward, self.moved(9 * self.stream + gate + rotary, 5), 0, half),
                Work(
                    backward,
                    core_backward,
                    self.moved(8 * self.stream + gate + c + rotary + biases + dropped, 11),
                    0,
                    half,
                ),
            ),
        )

    def _adapted(
        self, p: Parameter, count: int, tokens: int, rows: int, inner: int, forward: float, backward: float
    ) -> tuple[float, float]:
        """Return the seconds with the products of the adapters of `count` matrices, each for so many tokens."""
        lora = self.settings.section(LoraConfig)
        if not lora.adapts(p):
            return forward, backward
        down = self.products(count, tokens, inner, lora.rank, False)
        one = down + self.products(count, tokens, lora.rank, rows, False)
        return forward + one, backward + 2 * one

    def _cores(self, index: int) -> tuple[float, float, float]:
        """Return the seconds of a block's attention cores, forward and backward, and the elements of a token that their
        queries, keys and values read and write."""
        settings, config, plan = self.settings, self.config, self.settings.plan
        length, forward, backward, heads = settings.seq_length, 0.0, 0.0, 0.0
        share = settings.micro_batch_size * config.num_heads / (plan.tp * plan.cp)
        for core in inventory(config).cores(index):
            backend = backend_of(settings, core)
            seen = (
                tokens_seen(core, length) if backend == "flash" else length
            )  # the others compute what a window hides, too
            flops = share * length * seen * core.head_dim  # of the causal half of one product
            rate = self.rates.attention
            if settings.dtype == torch.float32:
                rate *= self.rates.products_fp32 / self.rates.products
            if backend in ("explicit", "fused_softmax"):
                softmax = PLAIN_SOFTMAX if backend == "explicit" else SOFTMAX
                scores = (softmax + AROUND) * self.width / 2 * share * length**2
                spent = scores / self.rates.memory + 12 * flops / rate  # six whole products
                forward, backward = forward + spent / 3, backward + spent * 2 / 3
                if backend == "explicit" and config.dropout:  # both passes draw the mask
                    drawn = DRAWN * share * length**2 / self.rates.memory + DRAWS * START
                    forward, backward = forward + drawn, backward + drawn
            else:
                rate /= (1 + HALF_LENGTH / length) * (MASKED if config.dropout else 1)
                forward, backward = forward + 2 * flops / rate + START, backward + 5 * flops / rate + 3 * START
            heads += 2 * (config.num_heads + 2 * core.kv_heads) * core.head_dim / plan.tp
        return forward, backward, heads

    def _again(self, again: bool, passes: Passes) -> Passes:
        """Return the passes with what the recipe computes again, if it does."""
        recompute = self.settings.recompute if again else "none"
        if self.settings.plan.splits_backward:
            passes = Passes(passes.forward * SPLIT, passes.backward * SPLIT)
        if recompute == "full":
            return replace(passes, again=passes.forward)
        if recompute == "around_attention":
            return replace(passes, again=replace(passes.forward, attention=0.0))
        return replace(passes, again=Work(attention=passes.forward.attention)) if recompute == "selective" else passes

    def embedding(self) -> Passes:
        return Passes(Work(pointwise=self.moved(2 * self.stream, 2)), Work(pointwise=self.moved(4 * self.stream, 3)))

    def head(self) -> Passes:
        """Return the passes of the last norm, the logits and the loss."""
        config, settings = self.config, self.settings
        columns = len(chunk(range(config.padded_vocab_size), self.tp, 0))
        one = self.product(self.tokens, config.hidden_size, columns)
        loss = self.moved((6 if settings.plan.splits_backward else 3) * columns, 4)
        weights = 0 if settings.freezes_weights else one
        return Passes(
            Work(one, pointwise=self.moved(3 * self.stream, 2), loss=loss),
            Work(one + weights, pointwise=self.moved(4 * self.stream, 2)),
        )
