"""Activations computed again in backward: less is kept, and not one bit changes, dropout on."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtgpt.compare.record import Record
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.models import layers
from dtgpt.models.layers import AttentionCore
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.attention.core import PLAIN_RULE, causal_attention
from dtgpt.ops.kernels.attention import flash
from dtgpt.parallel.recompute.blocks import operations
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.ranks import each, pool
from tests.support.runs import change, record, training

pytestmark = pytest.mark.slow(8)

STEPS = 2


def small(recipe: Recipe, **changes) -> Recipe:
    return change(recipe, micro_batch_size=2, global_batch_size=4, steps=STEPS, **changes)


def run(plan: str, *recipes) -> list[Record]:
    world, cases = parse_plan(plan).world, [replace(recipe, plan=plan) for recipe in recipes]
    return each(record, cases, STEPS) if world == 1 else pool().run(world, each, record, cases, STEPS)[0]


def check_same(expected: Record, *others: Record) -> None:
    for found in others:
        assert (found.losses, found.norms) == (expected.losses, expected.norms)
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


LLAMA = LlamaConfig(
    num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=12, ffn_hidden_size=44, seq_length=16,
    vocab_size=257, dropout=0.1, qk_norm=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "plan, precision, model",
    [
        ("single", "fp32", {}), ("dp2_zero3", "bf16", {}), ("pp2_zbv", "bf16", {"num_layers": 4}),
        ("single", "bf16", LLAMA), *(pytest.param("tp2_sp", "fp32", of, marks=pytest.mark.long) for of in ({}, LLAMA)),
    ],
)  # fmt: skip
def test_what_is_computed_again_is_the_same_to_the_last_bit(recipe, plan, precision, model):
    """Also where backward is parted in two, and where weights are gathered for it."""
    recipe = small(recipe, precision=precision, model=model)
    check_same(*run(plan, *(replace(recipe, recompute=again) for again in ("none", "selective", "full"))))


@pytest.mark.parametrize("plan", ["single", "cp2", "tp2_sp"])
@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.long)])
def test_around_attention_changes_no_bit(recipe, plan, compiled):
    recipe = small(recipe, compile=compiled, model={"dropout": 0.0})
    check_same(*run(plan, recipe, replace(recipe, recompute="around_attention")))


class Counting(TorchDispatchMode):
    """Counts the calls of the operations of attention."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in operations()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute, times", [("none", 1), ("around_attention", 1), ("full", 2)])
@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_around_attention_computes_the_core_once(recipe, monkeypatch, backend, recompute, times):
    """`flash` as on a GPU, with dropout: an operation, here of plain torch."""
    monkeypatch.setattr(flash, "has_triton", lambda x: True)
    monkeypatch.setattr(flash, "largest_head", lambda dtype, device: 64)
    dropout = 0.1 if backend == "flash" else 0.0
    recipe = change(recipe, recompute=recompute, attention=backend, model={"dropout": dropout})
    step = training(recipe)
    with Counting() as counting:
        loss = step.mean_loss(step.train_step())
    assert counting.calls == 2 * 2 * times  # blocks, micro-batches
    plain = training(replace(recipe, recompute="none"))
    assert loss == plain.mean_loss(plain.train_step())


@pytest.mark.parametrize("recompute", ["selective", "around_attention", "full"])
def test_the_first_blocks_of_a_stage_alone_are_computed_again(recipe, recompute):
    backend = "explicit" if recompute == "selective" else "sdpa"
    recipe = change(recipe, attention=backend, recompute=recompute, model={"dropout": 0.0, "num_layers": 3})
    every, some = training(recipe), training(replace(recipe, recompute_blocks=2))
    plain = training(change(recipe, recompute="none"))
    assert again(every) == [True] * 3 and again(some) == [True, True, False] and again(plain) == [False] * 3
    assert kept_by(every) < kept_by(some) < kept_by(plain)
    assert len({step.mean_loss(step.train_step()) for step in (every, some, plain)}) == 1


def again(step) -> list[bool]:
    """Of each block, whether it or its attention core runs by a checkpoint."""
    found = []
    for block in step.stages[0].blocks.values():
        parts = [block, *(part for part in block.modules() if isinstance(part, AttentionCore))]
        found.append(any("checkpoint" in repr(part.bound.run) for part in parts))
    return found


@pytest.mark.parametrize("plan", ["pp2_interleaved", "dp2_zero3"])
def test_the_first_blocks_alone_under_a_plan(recipe, plan):
    sizes = {"num_layers": 4, "dropout": 0.0}
    every = small(recipe, recompute="around_attention", model=sizes)
    check_same(*run(plan, replace(every, recompute="none"), every, replace(every, recompute_blocks=1)))


def test_blocks_are_refused_where_nothing_or_all_is_computed_again(recipe):
    with pytest.raises(UserError, match="recompute_blocks=2, but recompute=none computes nothing again"):
        replace(recipe, recompute_blocks=2).validate()
    with pytest.raises(UserError, match="recompute_blocks=0 is out of range"):
        replace(recipe, recompute="full", recompute_blocks=0).validate()
    zbv = change(
        recipe, plan="pp2_zbv", micro_batch_size=2, recompute="full", recompute_blocks=1, model={"num_layers": 4}
    )
    with pytest.raises(UserError, match="recompute_blocks=1, but the schedule ZBVZeroBubble"):
        zbv.choose_plan(2)


def test_around_attention_is_refused_where_more_than_its_output_is_kept(recipe):
    recipe = replace(recipe, recompute="around_attention")
    with pytest.raises(UserError, match="recompute=around_attention, but attention is explicit here"):
        training(recipe)
    zbv = change(recipe, plan="pp2_zbv", micro_batch_size=2, model={"dropout": 0.0, "num_layers": 4})
    with pytest.raises(UserError, match="recompute=around_attention, but the schedule ZBVZeroBubble"):
        zbv.choose_plan(2)


def kept_bytes(recipe) -> int:
    return kept_by(training(recipe))


def kept_by(step) -> int:
    """Of all that autograd saves in a step's only micro-batch, each memory once."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.train_step()
    return sum(storage.nbytes() for storage in kept.values())


def test_selective_keeps_less_and_full_least(recipe):
    recipe = change(recipe, micro_batch_size=8, model={"seq_length": 64})
    none, selective, full = (kept_bytes(replace(recipe, recompute=r)) for r in ("none", "selective", "full"))
    assert full < 0.5 * selective < 0.5 * none


@pytest.mark.parametrize("recompute, times", [("none", 1), ("selective", 2), ("full", 2)])
def test_the_core_is_computed_once_more(recipe, monkeypatch, recompute, times):
    calls = []

    def counted(*args, **options):
        calls.append(options)
        return causal_attention(*args, **options)

    monkeypatch.setattr(layers, "causal_attention", counted)
    training(change(recipe, recompute=recompute, attention="explicit")).train_step()
    each_call = {"backend": "explicit", "spans": None, "rule": PLAIN_RULE}
    assert calls == [each_call] * 2 * 2 * times  # blocks, micro-batches


@pytest.mark.parametrize(
    "changes, remedy",
    [
        ({}, "lower micro_batch_size"),
        ({"micro_batch_size": 1}, "use --recompute full"),
        ({"micro_batch_size": 1, "recompute": "selective"}, "use --recompute full"),
        ({"micro_batch_size": 1, "recompute": "full", "recompute_blocks": 1}, "raise recompute_blocks or leave it out"),
        ({"micro_batch_size": 1, "recompute": "full"}, "use a plan that cuts the model over more processes"),
    ],
)
def test_where_memory_runs_out_a_run_says_what_needs_less(recipe, changes, remedy):
    with pytest.raises(UserError, match=f"ran out of memory; {remedy}"), open_trainer(replace(recipe, **changes)):
        raise torch.OutOfMemoryError
