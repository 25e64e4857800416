"""Context parallelism: ranks that have slices of the tokens. tests/promises/test_parity.py holds its plans to one
process."""

import json
import math
from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.data.documents.masks import DocumentMasks
from dtgpt.models.batch import Batch
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.parallel.context_parallel.batches import slice_of
from dtgpt.parallel.context_parallel.degrees import ranks_of_heads, ranks_of_queries
from dtgpt.parallel.context_parallel.exchange import chunks_of, part_of_half
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.planning.activations import block_activations
from dtgpt.planning.traffic import collectives_of
from dtgpt.util.errors import UserError
from tests.support.bodies_checkpoint import load_each, train_and_save
from tests.support.bodies_context import (
    BATCH,
    LENGTH,
    attend,
    first_steps,
    losses_of_tokens,
    score_and_sample,
    steps_in_shared_memory,
    train_with_weights,
)
from tests.support.bodies_dryrun import exchanged
from tests.support.ranks import pool
from tests.support.runs import change

LLAMA = LlamaConfig(
    num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=8, ffn_hidden_size=48, seq_length=16,
    vocab_size=257,
)  # fmt: skip
GPT2 = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257)


@pytest.fixture
def recipe(recipe):
    return change(recipe, model={"num_heads": 4}, micro_batch_size=2, global_batch_size=4, steps=2)


@pytest.fixture
def documents(tmp_path):
    """Documents of 1 to 7 bytes, of which each window of 16 has several."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": str(7**i)[-(i % 7 + 1) :]}) + "\n" for i in range(400)))
    return path


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_other_heads_compute_attention_and_its_gradients_to_the_bits_of_one_process(ranks):
    pieces = pool().run(ranks, attend, f"cp{ranks}", 4)
    for expected, *found in zip(attend("single", 4), *pieces, strict=True):
        assert torch.equal(torch.cat(found, dim=1), expected)


@pytest.mark.slow(2)
@pytest.mark.parametrize("ranks, groups, backend, plain", [
    (2, 1, "auto", False), (6, 3, "auto", False), (3, 1, "flash", False), (4, 2, "flash", False),
    (4, 1, "fused_softmax", True), (4, 2, "fused_softmax", True), (2, 1, "sdpa", True), (4, 2, "sdpa", True),
])  # fmt: skip
def test_ranks_of_other_queries_compute_attention_and_its_gradients_as_one_process(ranks, groups, backend, plain):
    """Of each back end, where ranks exchange queries alone, and where they exchange heads, too."""
    given = groups, torch.float64, backend, plain
    pieces = pool().run(ranks, attend, f"cp{ranks}", *given)
    for expected, *found in zip(attend("single", *given), *pieces, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("masked", [range(0), range(3, 16), range(8)])
def test_the_loss_is_the_mean_over_the_weights_of_the_global_batch(recipe, masked):
    """Also where all tokens of a rank are masked."""
    expected = train_with_weights(replace(recipe, plan="single"), masked)
    for found in pool().run(2, train_with_weights, replace(recipe, plan="cp2"), masked):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow(1)
@pytest.mark.parametrize("model, ranks", [(GPT2, 2), (LLAMA, 4)])
def test_ranks_of_other_heads_give_tokens_the_losses_of_one_process_to_the_bit(recipe, model, ranks):
    """Where the sums of a product's row do not depend on the other rows: what `--grpo.exact` needs of a plan."""
    recipe = replace(recipe, model=model, precision="fp32", attention="explicit")
    pieces = pool().run(ranks, losses_of_tokens, replace(recipe, plan=f"cp{ranks}"))
    assert torch.equal(torch.cat(pieces, dim=1), losses_of_tokens(replace(recipe, plan="single")))


@pytest.mark.parametrize("heads", [4, 1])
def test_a_run_scores_and_writes_texts_as_one_process(recipe, heads):
    recipe = change(recipe, log={"sample_tokens": 5}, model={"num_heads": heads})
    expected, text = score_and_sample(replace(recipe, plan="single"))
    for scores, written in pool().run(2, score_and_sample, replace(recipe, plan="cp2")):
        assert scores == pytest.approx(expected, rel=1e-5) and written == text


@pytest.mark.slow(9)
@pytest.mark.parametrize("plan, model, recompute, exchanges", [
    ("cp2", GPT2, "selective", 0),
    ("cp2", replace(LLAMA, num_kv_heads=1, qk_norm=True), "full", 9),
    ("cp2_tp2_sp", replace(LLAMA, qk_norm=True), "none", 4),
    # It takes half a minute to trace how masks are drawn.
    pytest.param("cp2", replace(GPT2, dropout=0.1), "none", 4, marks=pytest.mark.long),
    pytest.param("cp2_tp2_sp", replace(LLAMA, dropout=0.1, num_kv_heads=2), "selective", 6, marks=pytest.mark.long),
])  # fmt: skip
def test_compiled_blocks_follow_one_process_and_send_as_many_messages(
    recipe, documents, tmp_path, plan, model, recompute, exchanges
):
    """Under document bounds. The ranks of GPT-2 share memory, in which they send no message. exchanges: of a block and
    a micro-batch, forward and backward."""
    masks = {"reset_attention_mask": True, "reset_position_ids": True, "path": str(documents)}
    recipe = change(recipe, model=replace(model, num_layers=1), recompute=recompute, data=masks)
    expected, _ = first_steps(replace(recipe, plan="single"), 1)
    across, _ = first_steps(change(recipe, plan="single", data={"reset_attention_mask": False}), 1)
    assert abs(across[0] - expected[0]) > 1e-4 * expected[0]  # the text shows whether documents are kept apart
    recipe = replace(recipe, plan=plan, compile="on")
    if model == GPT2:
        ranks = [found for (found,) in pool().run(2, steps_in_shared_memory, tmp_path, recipe, 1, False)]
    else:
        ranks = pool().run(parse_plan(plan).world, first_steps, recipe, 1)
    for found, count in ranks:
        assert found == pytest.approx(expected, rel=1e-5)
        assert count == 2 * exchanges  # of two micro-batches


@pytest.mark.slow(7)
@pytest.mark.parametrize("plan, model, changes", [
    ("cp2", replace(GPT2, dropout=0.1), {"recompute": "selective"}),
    ("cp4", replace(LLAMA, qk_norm=True), {"recompute": "full"}), ("cp2_pp2_zbv", replace(LLAMA, num_layers=4), {}),
    ("cp2_zero3", LLAMA, {"precision": "bf16"}),
])  # fmt: skip
def test_ranks_that_share_memory_exchange_the_same_bits_without_messages(
    recipe, documents, tmp_path, plan, model, changes
):
    masks = {"reset_attention_mask": True, "reset_position_ids": True, "path": str(documents)}
    recipe = change(recipe, model=model, data=masks, plan=plan, **changes)
    for (shared, none), (expected, _) in pool().run(
        parse_plan(plan).world, steps_in_shared_memory, tmp_path, recipe, 2
    ):
        assert shared == expected and none == 0


@pytest.mark.slow(2)
@pytest.mark.parametrize("writer, reader", [("cp2_zero1", "dp2_tp2_zero3"), ("tp2", "cp4_zero3")])
def test_another_plan_reads_the_checkpoint(recipe, tmp_path, writer, reader):
    worlds = [parse_plan(plan).world for plan in (writer, reader)]
    pool().run(worlds[0], train_and_save, replace(recipe, plan=writer), tmp_path, 1, 100)
    assert pool().run(worlds[1], load_each, replace(recipe, plan=reader), [tmp_path]) == [{}] * worlds[1]


def test_each_token_is_on_one_rank_with_its_position():
    plan = Plan(cp=4, tp=2).for_world(8)
    whole = Batch(torch.arange(BATCH * LENGTH).view(BATCH, LENGTH))
    slices = [slice_of(whole, RankCoordinates(plan, rank).cp, plan.cp) for rank in range(8)]
    assert all(torch.equal(a, b) for one, two in zip(slices[::2], slices[1::2], strict=True) for a, b in zip(
        (one.tokens, one.positions), (two.tokens, two.positions), strict=True
    ))  # fmt: skip
    assert torch.equal(torch.cat([each.tokens for each in slices[::2]], 1), whole.tokens)
    assert torch.cat([each.positions for each in slices[::2]], 1).tolist() == [list(range(LENGTH))] * BATCH


def test_each_rank_knows_all_documents_and_has_the_positions_and_weights_of_its_tokens():
    tokens = torch.tensor([[1, 2, 0, 3, 0, 4, 5, 0], [0, 1, 2, 3, 4, 5, 0, 6]])
    whole = DocumentMasks(0, True, True, True).apply(Batch(tokens))
    slices = [slice_of(whole, rank, 4) for rank in range(4)]
    assert len(whole.document_bounds.unique()) > 4
    assert all(torch.equal(each.document_bounds, whole.document_bounds) for each in slices)
    for name in ("tokens", "positions", "loss_weights"):
        assert torch.equal(torch.cat([getattr(each, name) for each in slices], 1), getattr(whole, name)), name


@pytest.mark.parametrize("plan, model, length, told", [
    ("cp2", GPT2, 15, r"seq_length=15 cannot be split over cp=2 \(1 left over\); use --seq_length 14 or 16"),
    ("cp2_tp2_sp", GPT2, 14, r"cannot be split over cp=2 x tp=2 under sequence parallelism \(2 left over\); use"),
    ("cp8", LLAMA, 24, r"seq_length=24 cannot be split over cp=8, in two halves each, since tp=1 leaves 4 heads of "
     r"keys and values \(8 left over\); use --seq_length 16 or 32, or another cp"),
    ("cp2_tp4_sp", LLAMA, 20, "cp=2 x tp=4 under sequence parallelism, in two halves each, since tp=4 leaves 1 head"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_the_remedy(plan, model, length, told):
    made = parse_plan(plan)
    with pytest.raises(UserError, match=told):
        made.for_world(made.world).validate(model, 1, 1, length)


def test_what_it_does_not_go_with_is_refused():
    with pytest.raises(UserError, match="the plan cp2 cuts samples over cp=2, in training alone; use tp or dp"):
        parse_plan("cp2").for_world(2).for_inference()


def test_a_plan_counts_half_of_the_activations(recipe):
    recipe = replace(recipe, model=LLAMA, device="cpu")
    one, two = (replace(recipe, plan=plan).planned(None) for plan in ("single", "cp2"))
    copies = two.micro_batch_size * 8 * 4 * (8 + 2 * 4 + 2 * 8) * 8  # q, k, v and the output, exchanged
    assert block_activations(two, 0) <= block_activations(one, 0) / 2 + copies


@pytest.mark.slow(3)
@pytest.mark.parametrize("plan, groups, recompute", [
    ("cp2_tp2", 4, "none"), ("cp2", 1, "full"), ("cp4", 2, "selective"), ("cp2_pp2", 1, "none"),
])  # fmt: skip
def test_the_messages_are_those_that_are_sent(recipe, plan, groups, recompute):
    recipe = replace(recipe, model=replace(LLAMA, num_kv_heads=groups), plan=plan, recompute=recompute)
    world = parse_plan(plan).world
    for rank, seen in enumerate(pool().run(world, exchanged, recipe)):
        (planned,) = [c for c in collectives_of(recipe.planned(world), rank) if c.over == "cp"]
        assert (planned.count, planned.bytes) == seen


@pytest.mark.parametrize("plan, groups", [("cp2", 4), ("cp4", 1), ("cp4_tp2", 4), ("cp8_tp2", 4)])
def test_ranks_have_as_many_pairs_of_query_and_key_and_all_queries(plan, groups):
    """By the plan, and by the layout of the ranks."""
    plan, model = parse_plan(plan), replace(LLAMA, num_kv_heads=groups)
    heads, parts = ranks_of_heads(plan, model), ranks_of_queries(plan, model)
    assert heads * parts == plan.cp and heads == math.gcd(plan.cp, groups // plan.tp)
    chunks = [chunks_of(part, parts) for part in range(parts)]
    assert sorted(sum(chunks, ())) == list(range(2 * parts))
    assert {first + second for first, second in chunks} == {2 * parts - 1}
    halves = [part_of_half(half, heads, parts) for half in range(2 * plan.cp)]
    assert all(halves[i] in range(parts) and i // heads in chunks[halves[i]] for i in range(2 * plan.cp))
