"""Pipeline stages that cost about the same, against every other cut of small models."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2_124M, GPT2_345M, GPT3_175B, GPT2Config
from dtgpt.parallel.balanced_stages.cut import EMBEDDING_COST, balanced_cut

pytestmark = pytest.mark.slow(2)

TINY = GPT2Config(num_layers=4, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257)
WIDE = replace(GPT2_124M, hidden_size=64, num_heads=4)  # the head costs as much as many blocks


@functools.cache
def head_cost(config: GPT2Config) -> float:
    """In blocks, counted from the FLOPs of the named parts."""
    with torch.device("meta"):
        block = sum(p.numel() for p in Decoder(replace(config, num_layers=1)).blocks.parameters() if p.dim() > 1)
    block = 6 * block + 12 * config.hidden_size * config.seq_length
    return 6 * config.padded_vocab_size * config.hidden_size / block


def costs(config: GPT2Config, cut: tuple[int, ...]) -> list[float]:
    """Of each stage, in blocks."""
    stages = [float(blocks) for blocks in cut]
    stages[0] += EMBEDDING_COST
    stages[-1] += head_cost(replace(config, num_layers=1))
    return stages


@pytest.mark.parametrize("config", [TINY, WIDE, GPT2_345M, GPT3_175B], ids=lambda c: f"{c.hidden_size}")
def test_the_costliest_stage_is_as_cheap_as_can_be(config):
    for layers, stages in itertools.product(range(1, 8), range(1, 5)):
        if stages > layers:
            continue
        small = replace(config, num_layers=layers)
        cut = balanced_cut(small, stages)
        assert len(cut) == stages and sum(cut) == layers and min(cut) >= 1
        every = [c for c in itertools.product(range(1, layers + 1), repeat=stages) if sum(c) == layers]
        best = min((max(costs(small, c)), sum(x * x for x in costs(small, c))) for c in every)
        assert max(costs(small, cut)) == pytest.approx(best[0])
        assert sum(x * x for x in costs(small, cut)) == pytest.approx(best[1])


def test_the_head_of_345m_costs_as_much_as_three_and_a_half_blocks():
    assert costs(GPT2_345M, (12, 12))[1] - 12 == pytest.approx(3.5, abs=0.1)
    assert balanced_cut(GPT2_345M, 2) == (14, 10)
    assert balanced_cut(GPT2_345M, 4) == (7, 7, 7, 3)
    assert balanced_cut(GPT2_345M, 1) == (24,)


def test_a_deep_model_is_cut_at_once():
    cut = balanced_cut(GPT3_175B, 48)
    assert sum(cut) == 96 and max(cut) <= 3
