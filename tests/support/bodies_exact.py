"""What ranks do in test_exact.py, and the sums that Triton's interpreter checks, too."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from hashlib import sha256
from operator import attrgetter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.capabilities import CAPABILITIES
from dtgpt.compare.choices import Choices
from dtgpt.config.recipe import Recipe
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.scoring import Scorer
from dtgpt.models.batch import Batch
from dtgpt.models.config import ModelConfig
from dtgpt.ops.attention.core import PLAIN_RULE
from dtgpt.ops.experts.products import experts_of_rows, grouped_product
from dtgpt.ops.kernels.linear import CHAIN_NAME
from dtgpt.ops.linear import linear, linear_into
from dtgpt.ops.loss.head import _losses_and_gradient_
from dtgpt.ops.operation import load_kernels
from dtgpt.ops.optim.fixed_point import (
    FixedPointSum,
    Range,
    add_integers,
    add_rounded,
    exact_sum,
    rounded,
    squares_of_rows,
)
from dtgpt.parallel.exact_tp.loss import Rows
from dtgpt.parallel.gradients import local_gradient
from dtgpt.parallel.layout import Region, slices
from dtgpt.parallel.shards import Shard, Shards
from dtgpt.train.setup import open_trainer
from dtgpt.util import seams
from tests.support.bodies_engine import inference_stages, training_stages
from tests.support.interpreter import kernels_asked_of


def bits_of_steps(recipe: Recipe) -> dict[str, str]:
    """Train the steps of the recipe, two at most. Return on rank 0 the bits of losses, norms, gradients, weights and
    moments, by name."""
    found: dict[str, str] = {}
    with open_trainer(recipe) as trainer:
        rule, parts = trainer.optimizer.rule, Parts(trainer.shards)
        for step in range(min(recipe.steps, 2)):
            loss = trainer.gradients()
            parts.keep(f"gradient {step}", trainer.gradient)
            result = trainer.update(loss)
            found[f"loss {step}"] = trainer.mean_loss(result).hex()
            found[f"norm {step}"] = result.norm.item().hex()
            found[f"scale {step}"] = str(trainer.optimizer.metrics())
        parts.keep("weight", attrgetter("local"))
        for kind in ("exp_avg", "exp_avg_sq", "momentum"):
            parts.keep(kind, lambda shard, kind=kind: rule.state(shard.index).get(kind))
        found |= parts.bits()
        found["held out"] = str(trainer.held_out_loss())
    return found


def bits_of_gradients(recipe: Recipe) -> dict[str, str]:
    """Return on rank 0 the bits of the gradients of the first step, by name."""
    with open_trainer(recipe) as trainer:
        trainer.gradients()
        parts = Parts(trainer.shards)
        parts.keep("gradient", trainer.gradient)
        return parts.bits()


class Parts:
    """What the ranks hold of whole tensors. `gather_whole` sends each part by itself, which takes longer than a step of
    a small model: here all parts are one message."""

    def __init__(self, shards: Shards):
        self._mesh = shards.mesh
        self._owned = [shard for shard in shards if shard.replica == 0 and not shard.is_tied_copy]
        self._held: dict[str, list[tuple[Region, Tensor]]] = {}

    def keep(self, kind: str, value: Callable[[Shard], Tensor | None]) -> None:
        """Keep what `value` returns now of each parameter that has such."""
        for shard in self._owned:
            if (own := value(shard)) is not None:
                copied = own.detach().float().clone(memory_format=torch.contiguous_format)
                self._held[f"{kind} of {shard.name}"] = [(shard.region, copied)]

    def bits(self) -> dict[str, str]:
        """Return the bits of the whole tensors by kind and name, on rank 0."""
        found: dict[str, str] = {}
        whole = {name: list(parts) for name, parts in self._held.items()}
        if self._mesh.world > 1:
            ranks: list[Any] = [None] * self._mesh.world
            dist.gather_object(self._held, ranks if self._mesh.rank == 0 else None)
            whole = {}
            for held in ranks if self._mesh.rank == 0 else ():
                for name, parts in held.items():
                    whole.setdefault(name, []).extend(parts)
        for name, parts in whole.items():
            made = torch.empty([max(r.stop for r in dims) for dims in zip(*(r for r, _ in parts), strict=True)])
            for region, part in parts:
                made[slices(region)] = part
            found[name] = sha256(made.numpy().tobytes()).hexdigest()
        return found


def bits_and_choices(recipe: Recipe) -> dict[str, str]:
    """Train all steps of a recipe whose model has experts. Return on rank 0 the bits of losses, norms, gradients and
    choices of each step, and of weights after the last."""
    found: dict[str, str] = {}
    with open_trainer(recipe) as trainer:
        choices, parts = Choices(trainer.mesh.rank, recipe.micro_batch_size, None), Parts(trainer.shards)
        choices.attach(trainer.stages)
        for step in range(recipe.steps):
            with choices.of_step(step):
                loss = trainer.gradients()
            parts.keep(f"gradient {step}", trainer.gradient)
            result = trainer.update(loss)
            found[f"loss {step}"], found[f"norm {step}"] = trainer.mean_loss(result).hex(), result.norm.item().hex()
        parts.keep("weight", attrgetter("local"))
        found |= parts.bits()
        kept = choices.kept if trainer.mesh.place.tp == 0 else {}  # of one of the ranks that have the same tokens
        own = {key: torch.cat(made) for key, made in kept.items()}
        replicas = sorted(trainer.mesh.gather((trainer.mesh.place.dp, own)), key=lambda each: each[0])
        for key in {key for _, made in replicas for key in made}:
            whole = torch.cat([made[key] for _, made in replicas if key in made])
            found[f"choices {key}"] = sha256(whole.numpy().tobytes()).hexdigest()
    return found


def norms_with_large_gradients(recipe: Recipe, scales: Sequence[float]) -> list[float]:
    """Return the norms that all ranks see where rank 1 alone multiplies its gradients by each of `scales`, one after
    the other."""
    found, before = [], 1.0
    with open_trainer(recipe) as trainer:
        for scale in scales:
            if trainer.mesh.place.dp == 1:
                trainer.optimizer.gradient_scale.mul_(scale / before)
            trainer.gradients()
            found.append(trainer.shards.norm().item())
            before = scale
    return found


def check_fixed_point(dtype: torch.dtype, fraction: int) -> None:
    """Sums of gradients in any order have the same bits, and those that do not fit are counted."""
    generator = torch.Generator().manual_seed(1)
    shapes = (5, 301), (7,)
    parts = [[(torch.randn(*s, generator=generator) * 4.0**-i).to(dtype) for s in shapes] for i in range(6)]

    def total(order: list[int], more: float = 0.0) -> tuple[list[Tensor], int]:
        totals, misfits = [torch.full(part.shape, 7) for part in parts[0]], torch.tensor(0)
        sums = FixedPointSum(totals, misfits, Range.of(dtype, addends=6))
        for i in order:
            extra = torch.zeros(7, dtype=dtype)
            extra[-1] = more
            sums.add([parts[i][0], parts[i][1] + extra], first=i == order[0])
        return totals, misfits.item()

    found, misfits = total([0, 1, 2, 3, 4, 5])
    again, _ = total([5, 2, 0, 4, 3, 1])
    assert misfits == 0
    for index, (one, other) in enumerate(zip(found, again, strict=True)):
        assert torch.equal(one, other)
        expected = sum(part[index].double() for part in parts)
        torch.testing.assert_close(one * 2.0**-fraction, expected.float(), rtol=1e-6, atol=6 * 2.0**-fraction)
    assert all(total([0, 1], more)[1] for more in (math.nan, math.inf, -math.inf))


def check_pieces(dtype: torch.dtype) -> None:
    """What ranks sent has the sum that `FixedPointSum` makes of it, rounded once, and says where it does not fit."""
    ranks, size, range_ = 3, 2 * 2048 + 5, Range.of(dtype, addends=6)
    rows = (torch.randn(ranks, size, 2, generator=torch.Generator().manual_seed(3)) / 8).to(dtype)
    total, misfits = torch.zeros(size, dtype=torch.int64), torch.tensor(0)
    whole = FixedPointSum([total], misfits, range_)
    for row in rows:
        for addend in row.unbind(1):
            whole.add([addend.contiguous()])

    out, others = torch.full((size,), 7.0), rows[1:].reshape(ranks - 1, -1)
    add_rounded(rows[0].flatten(), others, out, range_)
    assert torch.equal(out, total * torch.tensor(2.0**-range_.fraction))
    integers = torch.full((size,), 7)
    add_integers(rows[0].flatten(), others, integers, misfits, range_, first=True)
    assert torch.equal(integers, total)
    add_integers(rows[0].flatten(), others, integers, misfits, range_, first=False)
    assert torch.equal(integers, 2 * total)
    add_rounded(rows[0, :, 0].contiguous(), rows[:0, :, 0], out, range_)  # of one rank
    assert torch.equal(out, (rows[0, :, 0].double() * 2.0**range_.fraction).trunc().float() * 2.0**-range_.fraction)
    assert misfits == 0
    rows[1, 3, 1] = math.nan
    add_rounded(rows[0].flatten(), rows[1:].reshape(ranks - 1, -1), out, range_)
    assert out.isnan().nonzero().flatten().tolist() == [3]
    add_integers(rows[0].flatten(), rows[1:].reshape(ranks - 1, -1), integers, misfits, range_, first=True)
    assert misfits == 1


def check_squares() -> None:
    """Rows have the same bits in any number, and their sum in any order."""
    x = torch.randn(40, 1037, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 6, 40)[:, None]
    rows = squares_of_rows(x)
    pieces = [squares_of_rows(piece) for piece in x.split([1, 16, 23])]
    assert torch.equal(rows, torch.cat(pieces))
    torch.testing.assert_close(rows, x.double().square().sum(1), rtol=1e-14, atol=0)
    total = sum(exact_sum(piece) for piece in reversed(pieces))
    assert torch.equal(total, exact_sum(rows.flip(0)))
    assert rounded(total).item() == pytest.approx(math.fsum(rows.tolist()), rel=1e-15)
    assert rounded(exact_sum(torch.tensor([1.0, math.nan]).double())).isnan()


def by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
    """Return `F.linear` of plain tensors, where a row's sums do not depend on the number of rows."""
    assert type(x.data) is Tensor and type(weight.data) is Tensor
    made = (x.unsqueeze(-2) * weight).sum(-1)
    return made if bias is None else made + bias


@contextmanager
def products_by_rows() -> Iterator[None]:
    """Let products be as on a GPU, where few rows have chains of their own."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("dtgpt.ops.kernels.linear.may_fuse", lambda x: True))
        stack.enter_context(kernels_asked_of("linear", "linear_into"))
        for operation in (linear, linear_into):
            load_kernels(operation.name)
            kernels = [k._replace(run=by_rows) if k.name == CHAIN_NAME else k for k in operation.kernels]
            stack.enter_context(mock.patch.object(operation, "kernels", kernels))
        yield


def grouped_by_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return what `grouped_product` does, where a row's sums do not depend on the number of rows."""
    return by_rows(x, weight[experts_of_rows(x, ends)])


def attention_of_one(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return the attention `[N, D]` of one query `[N, D]` over keys and values `[N_kv, S, D]`."""
    keys, values = (each.repeat_interleave(len(q) // len(keys), 0) for each in (keys, values))
    scores = (q[:, None] * keys).sum(-1).float() * scale
    return (scores.softmax(-1).to(q.dtype)[:, None] * values.mT.contiguous()).sum(-1)


def explicit_by_rows(q, k, v, key, p, start, hidden=None, rule=PLAIN_RULE) -> Tensor:
    """Return the causal attention `[B, N, T, D]`, in which each query's sums are those of a query alone."""
    assert key is None and hidden is None
    before, scale = k.shape[2] - q.shape[2], rule.factor(q.shape[-1])
    rows = [
        [attention_of_one(own[:, t], *(each[:, : before + t + 1] for each in seen), scale) for t in range(q.shape[2])]
        for own, *seen in zip(q, k, v, strict=True)
    ]
    return torch.stack([torch.stack(row, 1) for row in rows])


def cached_by_rows(q, k, v, keys, values, slots, positions, rule=PLAIN_RULE) -> Tensor:
    """Return what `exact_attention` does, with the bits of `explicit_by_rows`."""
    keys[slots, :, positions], values[slots, :, positions] = k, v
    places = zip(q.flatten(1, 2), slots.tolist(), positions.tolist(), strict=True)
    scale = rule.factor(q.shape[-1])
    made = [attention_of_one(own, keys[s, :, : t + 1], values[s, :, : t + 1], scale) for own, s, t in places]
    return torch.stack(made)


def sigmoid_by_element(x: Tensor) -> Tensor:
    """Return the sigmoid, which on a CPU torch computes in two ways, by the place of an element in memory."""
    return (1 / (1 + (-x.double()).exp())).to(x.dtype)


@contextmanager
def all_by_rows() -> Iterator[None]:
    """Let products and attention of training and of generation be as on a GPU, where no row depends on the others."""
    with ExitStack() as stack:
        stack.enter_context(products_by_rows())
        stack.enter_context(mock.patch.object(grouped_product, "definition", grouped_by_rows))
        stack.enter_context(mock.patch("dtgpt.ops.attention.core.explicit", explicit_by_rows))
        stack.enter_context(mock.patch("dtgpt.inference.kernels.serve.exact_attention", cached_by_rows))
        stack.enter_context(mock.patch("dtgpt.inference.kernels.serve.next_rows", next_by_rows))
        stack.enter_context(mock.patch.object(Tensor, "sigmoid", sigmoid_by_element))
        stack.enter_context(mock.patch("dtgpt.inference.kernels.serve.has_triton", lambda x: True))
        yield


def next_by_rows(slots: Tensor, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    return token[slots], position[slots]


@contextmanager
def losses_kept() -> Iterator[list[Tensor]]:
    """Give a list to which each micro-batch of training adds the losses of its tokens."""
    kept: list[Tensor] = []

    def keeps(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep(*arguments) -> Tensor:
            kept.append(function(*arguments))
            return kept[-1]

        return keep

    whole = mock.patch("dtgpt.ops.loss.head._losses_and_gradient_", keeps(_losses_and_gradient_))
    with whole, mock.patch.object(Rows, "losses", keeps(Rows.losses)):  # the latter of sums in pieces
        yield kept


def trained_and_scored(config: ModelConfig, plan: str) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the tokens of texts `[B, T]`, by training and by a scorer of exact ones of as many
    tp ranks."""
    tokens = torch.randint(0, config.vocab_size, (3, config.seq_length + 1), generator=torch.Generator().manual_seed(2))
    trained, _ = training_stages(config, plan, attention="explicit")
    stages, mesh = inference_stages(config, plan.removesuffix("_sp"), attention="explicit")
    with products_by_rows():
        with losses_kept() as kept:
            trained[0](*Batch(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())).backward()
        scorer = Scorer(stages, mesh, config, torch.float32, exact=True)
        scores = scorer.score([Sample(tuple(row.tolist()), 1) for row in tokens])
    return -kept[0].view(len(tokens), -1), torch.stack([torch.from_numpy(each.logprobs) for each in scores])


def gradients_by_rows(config: ModelConfig, plan: str, **choices) -> float:
    """Return the largest difference of a gradient, relative to its largest element, between products of rows and those
    of the plan as it is."""
    tokens = torch.randint(0, config.vocab_size, (3, config.seq_length + 1), generator=torch.Generator().manual_seed(2))
    found = []
    for products in (nullcontext(), products_by_rows()):
        (stage,), _ = training_stages(config, plan, attention="explicit", **choices)
        with products:
            stage(*Batch(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())).backward()
        found.append([local_gradient(parameter) for parameter in stage.parameters()])
    return max(((one - other).abs().max() / one.abs().max()).item() for one, other in zip(*found, strict=True))


def bits_without_parallel_capabilities(recipe: Recipe) -> dict[str, str]:
    """`bits_of_steps` of a core without exact sums, cut samples and memory that GPUs share."""
    names = [name for name, _ in CAPABILITIES]
    seams.use(name for name in names if not name.startswith("dtgpt.parallel."))
    try:
        assert seams.listed("transports") == []
        return bits_of_steps(recipe)
    finally:
        seams.use(names)
