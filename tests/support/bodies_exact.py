"""What ranks do in test_exact.py, and the sums that Triton's interpreter checks, too."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from hashlib import sha256
from operator import attrgetter
from unittest import mock

import pytest
import torch
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
from dtgpt.train.setup import open_trainer
from dtgpt.util import seams
from tests.support.bodies_engine import inference_stages, training_stages
from tests.support.interpreter import kernels_asked_of


def bits_of_steps(recipe: Recipe) -> dict[str, str]:
    """Train the steps of the recipe, two at most. Return on rank 0 the bits of losses, norms, gradients, weights and
    moments, by name."""
    from dtgpt.compare.whole_tensors import gather_whole

    found: dict[str, str] = {}
    with open_trainer(recipe) as trainer:
        rule = trainer.optimizer.rule

        def keep(kind, value) -> None:
            for name, whole in gather_whole(trainer.shards, value):
                found[f"{kind} of {name}"] = "" if whole is None else sha256(whole.numpy().tobytes()).hexdigest()

        for step in range(min(recipe.steps, 2)):
            loss = trainer.gradients()
            keep(f"gradient {step}", trainer.gradient)
            result = trainer.update(loss)
            found[f"loss {step}"] = trainer.mean_loss(result).hex()
            found[f"norm {step}"] = result.norm.item().hex()
            found[f"scale {step}"] = str(trainer.optimizer.metrics())
        keep("weight", attrgetter("local"))
        for kind in ("exp_avg", "exp_avg_sq", "momentum"):
            keep(kind, lambda shard, kind=kind: rule.state(shard.index).get(kind, shard.local))
        found["held out"] = str(trainer.held_out_loss())
    return found


def bits_and_choices(recipe: Recipe) -> dict[str, str]:
    """Train all steps of a recipe whose model has experts. Return on rank 0 the bits of losses, norms, gradients and
    choices of each step, and of weights after the last."""
    from dtgpt.compare.whole_tensors import gather_whole

    found: dict[str, str] = {}
    with open_trainer(recipe) as trainer:
        choices = Choices(trainer.mesh.rank, recipe.micro_batch_size, None)
        choices.attach(trainer.stages)

        def keep(kind: str, whole: Tensor | None) -> None:
            found[kind] = "" if whole is None else sha256(whole.numpy().tobytes()).hexdigest()

        for step in range(recipe.steps):
            with choices.of_step(step):
                loss = trainer.gradients()
            for name, whole in gather_whole(trainer.shards, trainer.gradient):
                keep(f"gradient {step} of {name}", whole)
            result = trainer.update(loss)
            found[f"loss {step}"], found[f"norm {step}"] = trainer.mean_loss(result).hex(), result.norm.item().hex()
        for name, whole in gather_whole(trainer.shards, attrgetter("local")):
            keep(f"weight of {name}", whole)
        kept = choices.kept if trainer.mesh.place.tp == 0 else {}  # of one of the ranks that have the same tokens
        own = {key: torch.cat(parts) for key, parts in kept.items()}
        replicas = sorted(trainer.mesh.gather((trainer.mesh.place.dp, own)), key=lambda each: each[0])
        for key in {key for _, made in replicas for key in made}:
            keep(f"choices {key}", torch.cat([made[key] for _, made in replicas if key in made]))
    return found


def norm_with_a_large_gradient(recipe: Recipe, scale: float) -> float:
    """Return the norm that all ranks see where rank 1 alone multiplies its gradients by `scale`."""
    with open_trainer(recipe) as trainer:
        if trainer.mesh.place.dp == 1:
            trainer.optimizer.gradient_scale.mul_(scale)
        trainer.gradients()
        return trainer.shards.norm().item()


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
