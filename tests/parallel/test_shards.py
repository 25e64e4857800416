"""What each rank holds of the model, under every kind of plan: nothing is missing, nothing twice, nothing larger."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.decoder import unique_parameters
from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.parallel.layout import slices
from dtgpt.parallel.mesh import Mesh
from tests.support.bodies_shards import CPU, KEY, Piece, build, largest_made, shards_of, whole_gradient
from tests.support.ranks import pool
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(6)

CONFIG = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257)
DEEP = replace(CONFIG, num_layers=4)  # a block for each of four stages
# 256 rows of the vocabulary and 16 positions in 3 parts, and 144 rows of the smallest weight in 3 heads.
THREE = replace(CONFIG, hidden_size=48, num_heads=3, vocab_size=200)
SHORT = replace(CONFIG, seq_length=2)  # fewer positions than ranks: some hold an empty part
ODD = replace(CONFIG, hidden_size=34, num_heads=2)  # 51 rows of QKV after tp2
PLANS = [
    ("dp4_zero3", 4, CONFIG),
    ("tp2", 4, CONFIG),
    ("tp2_sp_zero1", 4, CONFIG),
    ("pp2_tp2", 4, CONFIG),
    ("pp2_zbv", 4, DEEP),
    ("pp2_interleaved_zero2", 4, DEEP),
    ("pp4", 4, DEEP),
    ("tp3", 3, THREE),
    ("tp3_sp_zero3", 3, replace(THREE, seq_length=15)),
    ("dp3_zero3", 3, CONFIG),
    ("dp4_zero2", 4, SHORT),
    ("tp2_zero3", 4, ODD),
    ("dp2", 2, CONFIG),
    ("single", 1, CONFIG),
]


@functools.cache
def whole_weights(config: GPT2Config) -> dict[str, torch.Tensor]:
    return unique_parameters(build_model(config, CPU, torch.float32, KEY))


def plan_of(name: str, world: int) -> ResolvedPlan:
    return parse_plan(name).for_world(world)


@functools.cache
def answers_of(name: str, world: int, config: GPT2Config) -> list:
    """What `shards_of` answers on each rank."""
    return pool().run(world, shards_of, config, plan_of(name, world))


@pytest.mark.parametrize("name, world, config", PLANS, ids=[name for name, *_ in PLANS])
def test_shards_are_the_weights_of_one_process(name, world, config):
    """One test for all that is asked of a plan's ranks: another worker would build them again."""
    answers = answers_of(name, world, config)
    weights = whole_weights(config)
    check_weights(answers, weights)
    check_copies(answers, weights)
    check_cost(answers, weights)
    check_norm(answers, weights)


def check_weights(answers, weights):
    counts = {name: torch.zeros(weight.shape) for name, weight in weights.items()}
    for pieces, *_ in answers:
        for piece in pieces:
            # (a) every shard is its part of the one model, and the owners cover it once
            assert torch.equal(piece.local, weights[piece.name][slices(piece.region)]), piece.name
            counts[piece.name][slices(piece.region)] += piece.is_owner
    assert all((count == 1).all() for count in counts.values())

    # (b) gathered, the model is the one model, on rank 0 alone
    gathered = answers[0][2]
    assert gathered.keys() == weights.keys() and list(gathered) == sorted(gathered)
    assert all(torch.equal(gathered[name], weight) for name, weight in weights.items())
    assert all(whole is None for _, _, others, _ in answers[1:] for whole in others.values())


def check_copies(answers, weights):
    """The norm takes each element by 1 / copies: over all ranks that makes one."""
    shares = {name: torch.zeros(weight.shape) for name, weight in weights.items()}
    for pieces, *_ in answers:
        for piece in pieces:
            if not piece.is_tied_copy:
                shares[piece.name][slices(piece.region)] += 1 / piece.replicas
    for share in shares.values():
        torch.testing.assert_close(share, torch.ones_like(share))


def check_cost(answers, weights):
    """The cost of a plan is what its ranks hold."""
    for pieces, told, *_ in answers:
        assert sorted((p.name, p.local.numel()) for p in pieces) == sorted((h.name, h.local) for h in told)
        for held in told:
            assert held.local <= held.by_tp <= math.prod(held.shape)
            assert held.shape == weights[held.name].shape


def check_norm(answers, weights):
    """The tied table, whose gradient comes from both ends of the model, counts once, and so do addends on tp ranks."""
    gradients = [whole_gradient(name, tuple(weight.shape)) for name, weight in weights.items()]
    expected = torch.cat([g.flatten().double() for g in gradients]).norm().item()
    norms = [norm for *_, norm in answers]
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(expected, rel=1e-6)


def pieces_of(name: str, world: int, config: GPT2Config = CONFIG) -> list[list[Piece]]:
    return [pieces for pieces, *_ in answers_of(name, world, config)]


def share_of(pieces: list[Piece]) -> float:
    return sum(p.local.numel() for p in pieces) / sum(w.numel() for w in whole_weights(CONFIG).values())


def test_a_rank_holds_its_share_and_no_more():
    """tp leaves LayerNorms, positions and some biases whole; zero1 cuts what the optimizer works on likewise."""
    assert all(share_of(pieces) == 1 for pieces in pieces_of("dp2", 2))
    assert all(share_of(pieces) == pytest.approx(0.25, abs=0.01) for pieces in pieces_of("dp4_zero3", 4))
    assert all(0.5 < share_of(pieces) < 0.53 for pieces in pieces_of("tp2", 4))


def test_both_ends_of_a_pipeline_hold_the_table_and_one_keeps_it():
    tables = [[(p.is_tied_copy, p.is_owner) for p in pieces if p.name == TABLE] for pieces in pieces_of("pp4", 4, DEEP)]
    assert tables == [[(False, True)], [], [], [(True, False)]]
    both, _, none, _ = pieces_of("pp2_zbv", 4, DEEP)  # down and up again: the first rank holds both ends
    assert [(p.is_tied_copy, p.is_owner) for p in both if p.name == TABLE] == [(False, True), (True, False)]
    assert not any(p.name == TABLE for p in none)


@pytest.mark.parametrize("name, cuts", [("zero3", 4), ("tp2_zero3", 4), ("tp2_pp2_zbv", 2)])
def test_a_whole_parameter_never_exists_on_a_rank(name, cuts):
    """The token table, of 2 MiB, is by far the largest; chunks of the initial weights are small."""
    config = replace(DEEP if "zbv" in name else CONFIG, hidden_size=64, vocab_size=8192)
    table = 4 * config.padded_vocab_size * config.hidden_size
    answers = pool().run(4, largest_made, config, plan_of(name, 4), 2048)
    for made, by, operations, mine in answers:
        assert operations > 500  # it watched
        assert mine <= table / cuts
        assert made <= max(mine, 2048 * 8 * 4 + 1024), f"{made} bytes by {by}"


def test_the_watch_sees_whole_parameters_where_they_are():
    config = replace(CONFIG, hidden_size=64, vocab_size=8192)
    ((made, _, _, mine),) = pool().run(1, largest_made, config, plan_of("single", 1), 2048)
    assert made == mine == 4 * 8192 * 64


def test_one_process_needs_no_group():
    stages, shards, mesh = build(CONFIG, plan_of("single", 1))
    assert isinstance(mesh, Mesh) and mesh.world == 1 and len(stages) == 1
    for shard in shards:
        assert shard.local.data_ptr() == shard.parameter.data_ptr() and shard.low_precision is None
        assert shard.local.shape == shard.parameter.shape and not shard.local.requires_grad
        assert shard.replica == 0 and shard.replicas == 1 and not shard.partial
        shard.parameter.grad = whole_gradient(shard.name, tuple(shard.parameter.shape))
    shards.take_gradients()
    assert all(shards.gradient(shard) is shard.parameter.grad for shard in shards)
    expected = torch.cat([shards.gradient(shard).flatten().double() for shard in shards]).norm()
    assert shards.norm().item() == pytest.approx(expected.item(), rel=1e-6)
