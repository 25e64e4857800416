"""What is alive at moments of a step: blocks of the allocator, an update by Muon, the halves of a backward pass."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from dtgpt.models.binding import bind
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.layers import Context
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.operation import split_backward
from dtgpt.optim.muon import MuonConfig, matrices
from dtgpt.optim.muon import memory as muon_memory
from dtgpt.parallel.recompute.blocks import recomputed
from dtgpt.planning.activations import block_activations, block_work
from dtgpt.planning.memory import MIB, padding
from dtgpt.planning.meta_block import BlockKind, LiveBytes, make_block, make_input
from dtgpt.planning.split_backward import split_sizes
from dtgpt.planning.torch_private import backward_of_inputs, backward_of_weights
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.setup import open_trainer

MODEL = GPT2Config(num_layers=4, hidden_size=64, num_heads=4, seq_length=128, vocab_size=257, dropout=0.0)
LLAMA = LlamaConfig(
    num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=176, seq_length=128,
    vocab_size=257,
)  # fmt: skip


@pytest.mark.parametrize(
    "size, more",
    [
        (1000, 24),
        (9 * MIB, 0),  # two in a segment of 20 MiB, of which 2 are left
        (5 * MIB - 1024, 1024),
        (25 * MIB, 1 * MIB),
        (25 * MIB - 512, 0),
    ],
)
def test_the_allocator_cuts_a_segment_where_more_than_a_mib_is_left(size, more):
    assert padding(size) == more


@pytest.mark.parametrize("elements", [1 << 14, 1 << 16, 1 << 25])
def test_an_update_by_muon_works_with_the_bytes_that_are_planned(recipe, monkeypatch, elements):
    monkeypatch.setattr(matrices, "ROUND", elements)
    muon_memory.update_bytes.cache_clear()
    optimizer = MuonConfig(lr=1e-2)
    recipe = replace(recipe, model=MODEL, optimizer=optimizer, plan="single", device="cpu")
    with open_trainer(recipe) as trainer:
        trainer.gradients()
        rule, gradients = trainer.optimizer.rule, trainer.shards.gradients
        there = [*(x for shard in rule.shards for x in (shard.local, *rule.state(shard.index).values())), rule.updates]
        there += [*gradients, *rule.factors.values(), *(rows for pieces in rule.pieces.values() for rows in pieces)]
        rule.others = []  # what AdamW updates has no kernel on a CPU
        with LiveBytes({tensor.untyped_storage()._cdata for tensor in there}) as alive:
            rule.step(gradients, torch.tensor(0.1), torch.tensor(1.0))
        planned = optimizer.update_bytes(MODEL, (0, 0, 0, 0), 1, 1, 4)
    assert alive.peak == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [MODEL, LLAMA])
def test_backward_of_blocks_works_with_the_bytes_that_are_planned(recipe, model, recompute):
    """Three blocks on the meta device; the input of the first and the gradient of the last one's output are given."""
    recipe = replace(recipe, model=model, micro_batch_size=2, recompute=recompute, attention="sdpa")
    settings = replace(recipe, plan="single", global_batch_size=2).planned(1)
    kind = BlockKind(model, 0, 128, 1, False, 0, settings.dtype, False, False, True, settings.section(LoraConfig))
    blocks = nn.ModuleList([make_block(kind) for _ in range(3)])
    if recompute == "full":
        for block in blocks:
            bind(block, run=recomputed(block.compute))
    x, gradient = make_input(kind, 2).requires_grad_(), make_input(kind, 2)
    given = {tensor.untyped_storage()._cdata for tensor in (x, gradient, *blocks.parameters())}
    with LiveBytes(given) as alive:
        y = x
        for block in blocks:
            y = block(y, Context())
        end = [y.grad_fn]
        del y
        alive.peak = 0
        torch.autograd.grad([GradientEdge(end.pop(), 0)], [x], [gradient])
    planned = 3 * block_activations(settings, 0) - x.nbytes + block_work(settings, 0)
    assert alive.peak == pytest.approx(planned, rel=0.005)


@pytest.mark.slow(1)
@pytest.mark.parametrize("again", [False, True])
def test_the_halves_of_a_stage_are_those_of_its_blocks(recipe, again):
    """A stage of three blocks in torch's two halves, beside what one block says."""
    recipe = replace(recipe, model=MODEL, micro_batch_size=2, recompute="full" if again else "none")
    settings = replace(recipe, plan="pp2_zbv", global_batch_size=8).planned(2)
    kind = BlockKind(MODEL, 0, 128, 1, False, 0, settings.dtype, True, False, True, settings.section(LoraConfig))
    blocks = nn.ModuleList([make_block(kind) for _ in range(3)])
    if again:
        for block in blocks:
            bind(block, run=recomputed(block.compute))
    sizes = split_sizes(settings, 0)
    x, weights = make_input(kind, 2).requires_grad_(), {p.untyped_storage()._cdata for p in blocks.parameters()}
    with split_backward(), LiveBytes(weights) as alive:
        y = x
        for block in blocks:
            y = block(y, Context())
        outputs, kept = [y], alive.now
        del y
        groups = backward_of_inputs(outputs, [make_input(kind, 2)], [x], blocks.parameters())
        x.grad = None
        assert alive.now - kept == pytest.approx(3 * sizes.after, rel=0.1)
        alive.peak = 0
        backward_of_weights(blocks.parameters(), groups)
    most = max(sizes.during + 2 * sizes.after, sizes.during + 2 * sizes.left)
    gradients = sum(p.grad.nbytes for p in blocks.parameters())
    assert most == pytest.approx(alive.peak - kept, abs=gradients + 0.05 * most)
