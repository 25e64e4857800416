"""`--reduce exact_tp`: the same bits for any number of tensor-parallel ranks."""

import textwrap
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import DataConfig
from dtgpt.models.binding import bind
from dtgpt.models.families.track3 import Track3Config
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.layers import AttentionCore
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.loss import cross_entropy as passes
from dtgpt.ops.norms import rows_summed_by
from dtgpt.ops.rotary_positions import Rotation, rotary_qkv
from dtgpt.optim.fp16.config import LossScaleConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.parallel.exact_tp import loss, products, rows, serve
from dtgpt.parallel.exact_tp.config import PiecesConfig
from dtgpt.parallel.exact_tp.heads import attend_by_heads
from dtgpt.parallel.exact_tp.loss import PiecewiseLoss
from dtgpt.parallel.exact_tp.products import column_product, row_product
from dtgpt.parallel.exact_tp.rows import PiecewiseRows
from dtgpt.parallel.exact_tp.sums import PiecewiseSums
from dtgpt.parallel.exact_tp.table import _Rows
from dtgpt.parallel.exact_tp.tree import Share, tree_sum
from dtgpt.planning.traffic import collectives_of
from dtgpt.train.start import checked
from dtgpt.util.errors import UserError
from tests.planning.test_planning import check_messages
from tests.support.bodies_exact import bits_of_steps
from tests.support.bodies_exact_tp import FAULTS, bits_with_fault, trained_and_scored
from tests.support.families import OURS
from tests.support.gluon import Recorder, skip_unless_compiled
from tests.support.interpreter import needs_triton, run_interpreted
from tests.support.ranks import pool

GPT2 = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, dropout=0.1)
LLAMA = LlamaConfig(
    num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=8, ffn_hidden_size=48, seq_length=16,
    vocab_size=257, dropout=0.1,
)  # fmt: skip

QWEN3 = replace(LLAMA, qk_norm=True)
TRACK3 = Track3Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257)  # with biases of logits


@pytest.fixture
def exact(recipe):
    """A recipe of two micro-batches, and of one step, after which the held-out loss is that of the new weights."""
    return replace(
        recipe, model=GPT2, micro_batch_size=2, global_batch_size=4, reduce="exact_tp", precision="fp32", steps=1,
        log=replace(recipe.log, eval_samples=4),
    )  # fmt: skip


def differing(recipe, plans: list[str], body=bits_of_steps, least: int = 30) -> dict[str, list[str]]:
    """By plan, what has other bits than on one process, which has more than `least` different ones."""

    def bits(plan: str) -> dict[str, str]:
        return pool().run(parse_plan(plan, {}).world, body, replace(recipe, plan=plan))[0]

    expected = bits("single")
    assert len(set(expected.values())) > least
    found = {plan: bits(plan) for plan in plans}
    return {plan: [name for name in expected if made[name] != expected[name]] for plan, made in found.items()}


@pytest.mark.slow(6)
@pytest.mark.parametrize(
    "plans, changes",
    [
        (["tp2", "tp4_sp"], {}),
        (["dp2_tp2_zero3"], {"precision": "bf16", "steps": 2, "global_batch_size": 8}),
        (["tp4"], {"model": QWEN3}),
        (["tp2_pp2"], {"model": LLAMA, "precision": "bf16"}),
        (["tp2_sp"], {"model": QWEN3, "precision": "bf16", "recompute": "full"}),
        (["tp2_sp"], {"model": LLAMA, "precision": "bf16", "recompute": "full", "optimizer": MuonConfig(lr=6e-3)}),
        (["tp2_sp"], {"model": replace(OURS["gemma3"], num_layers=3)}),
        (
            ["tp4_sp"],
            {"exact_tp": PiecesConfig(pieces=4), "precision": "fp16", "loss_scale": LossScaleConfig(initial=1024.0)},
        ),
    ],
)
def test_a_plan_has_the_bits_of_one_process(exact, plans, changes):
    assert differing(replace(exact, **changes), plans) == {plan: [] for plan in plans}


@pytest.mark.slow(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_sum_that_is_not_made_in_pieces_shows(exact, fault):
    """Each part of the capability is needed: without it, bits of tp2_sp differ."""
    one = replace(exact, model=replace(GPT2, num_layers=1), global_batch_size=2)
    found = differing(one, ["tp2_sp"], partial(bits_with_fault, fault), least=10)
    assert found["tp2_sp"]


@pytest.mark.slow(2)
@pytest.mark.parametrize("model, plan", [(GPT2, "tp4"), (LLAMA, "tp2_sp")])
def test_any_number_of_ranks_scores_with_the_bits_of_training(model, plan):
    model = replace(model, dropout=0.0)
    found = [
        pair
        for name in ("single", plan)
        for pair in pool().run(parse_plan(name, {}).world, trained_and_scored, model, name)
    ]
    first, *others = (each for pair in found for each in pair)
    assert all(torch.equal(first, each) for each in others)


def test_a_tree_has_the_nodes_that_ranks_have():
    pieces = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = tree_sum(pieces.clone().unbind())
    for ranks in (2, 4, 8):
        parts = [tree_sum(part.clone().unbind()) for part in pieces.chunk(ranks)]
        assert torch.equal(tree_sum(parts), whole)
    assert not torch.equal(sum(pieces), whole)  # in another order it has other bits


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_products_and_their_gradients_are_those_of_linear_maps(dtype, tolerance):
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, bias = draw(2, 3, 16), draw(24, 16) / 4, draw(24)

    def results(function, dtype):
        given = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight, bias)]
        made = function(*given)
        made.square().sum().backward()
        return [made, *(t.grad for t in given if t.grad is not None)]

    linear = torch.nn.functional.linear
    for ours, theirs in [
        (partial(column_product, 4), linear),
        (lambda x, w, b: row_product(4, x, w, None), lambda x, w, b: linear(x, w)),
    ]:
        for made, exact in zip(results(ours, dtype), results(theirs, torch.float64), strict=True):
            torch.testing.assert_close(made.double(), exact, rtol=0, atol=tolerance * exact.abs().max().item())


def test_a_bias_of_a_matrix_that_is_cut_by_its_inputs_is_refused():
    with pytest.raises(ValueError, match="belongs to the whole sum"):
        row_product(2, torch.zeros(1, 4), torch.zeros(4, 4), torch.zeros(4))


def test_tokens_of_other_ranks_add_nothing_to_the_gradient_of_a_table():
    table = torch.randn(6, 4, requires_grad=True)
    tokens = torch.tensor([[0, 7, 5], [3, 3, 11]])
    found = _Rows.apply(table, tokens - 3)  # rows 3 to 8
    expected = torch.stack([table[0] * 0, table[4], table[2], table[0], table[0], table[0] * 0]).view(2, 3, 4)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert table.grad.sum(1).tolist() == [8.0, 0.0, 4.0, 0.0, 4.0, 0.0]


def test_a_share_knows_its_first_piece():
    group = mock.Mock(size=lambda: 4, rank=lambda: 3)
    assert Share.of(8, group) == Share(2, 6, group)
    assert PiecewiseLoss(Share(8)).share.gather(torch.ones(8)).tolist() == [1.0] * 8


def test_kernels_read_the_ids_of_alternatives_one_behind_the_other():
    """Those of a token lie beside each other; kernels do not know strides."""
    draw, given = torch.Generator().manual_seed(0), []
    logits, top_ids = torch.randn(3, 16, generator=draw), torch.randint(0, 16, (3, 2), generator=draw)

    def row_terms(z, targets, *rest):
        given.append(targets.is_contiguous())
        return passes.row_terms(z, targets, *rest)

    with mock.patch.object(loss, "passes", mock.Mock(wraps=passes, row_terms=row_terms)):
        found = [PiecewiseLoss(Share(4)).log_probabilities(logits, ids, 16) for ids in top_ids.unbind(1)]
    assert len(given) == 8 and all(given)
    torch.testing.assert_close(torch.stack(found, 1), logits.log_softmax(-1).gather(1, top_ids))


def test_the_squares_of_rows_that_ranks_share_are_added_in_pieces():
    gradient = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)) ** 9

    def squares(pieces, *parts):
        sums = object.__new__(PiecewiseSums)
        sums._pieces = {id(part): pieces for part in parts}
        return torch.stack([sums.squares([], part.new_zeros(0), [part]) for part in parts]).sum(0)

    assert torch.equal(squares(8, gradient), squares(4, *gradient.chunk(2, 1)))
    assert not torch.equal(squares(1, gradient), squares(1, *gradient.chunk(2, 1)))


@needs_triton
@pytest.mark.slow(8)
def test_kernels_sum_the_rows_and_columns_of_pieces():
    run_interpreted("from tests.support.bodies_exact_tp import check_kernels; check_kernels()")


@pytest.mark.parametrize(
    "rows, terms, columns, expected",
    [
        (8192, 1024, 4096, (True, True, True, False, True)),
        (8192, 4096, 4096, (True, True, True, True, True)),
        (4096, 4096, 512, (False, False, True, False, False)),  # cuBLAS may split its sums
        (8192, 1024, 768, (False, False, False, False, False)),  # pieces begin at other alignments
    ],
)
def test_all_plans_take_the_same_kernels(rows, terms, columns, expected):
    """What serves a part of the pieces is what serves all of them."""
    empty = partial(torch.empty, device="meta")
    with mock.patch.multiple(serve, _many_rows=lambda x: True, has_triton=lambda x: True):
        for ranks in (1, 2, 4, 8):
            own, count, x = columns // ranks, 8 // ranks, empty(rows, terms)
            forward = serve._in_one_chain(x, empty(own, terms), None, count, False)
            backward = serve._in_one_chain(x, empty(terms, own), None, count, True)
            gradient = serve._aligned(empty(rows, own), x, count, False)
            large = serve._large(empty(rows, own), x, count, False)
            assert (forward, backward, gradient, large, serve._column_tiles(empty(rows, own), count)) == expected


@needs_triton
def test_all_plans_sum_the_rows_of_gradients_in_the_same_chains():
    code = """
        from dtgpt.parallel.exact_tp import kernels
        for height, width, expected in ((1024, 1024, 4), (3072, 1024, 1), (4096, 1024, 1), (1024, 64, 4)):
            for count in (8, 4, 2, 1):
                assert kernels.chains_of(height // 8 * count, width, count) == expected
    """
    run_interpreted(textwrap.dedent(code))


@needs_triton
@pytest.mark.slow(12)
@pytest.mark.parametrize("by_inputs", [True, False])
def test_the_kernel_whose_warps_take_turns_compiles_without_a_gpu(by_inputs, monkeypatch):
    skip_unless_compiled()
    from dtgpt.parallel.exact_tp import kernels, warp_kernels

    seen = Recorder(warp_kernels.tree_by_warps)
    monkeypatch.setattr(warp_kernels, "tree_by_warps", seen)
    x, out = torch.zeros(384, 1024, dtype=torch.bfloat16), torch.zeros(384, 512, dtype=torch.bfloat16)
    weight = torch.zeros((512, 1024) if by_inputs else (1024, 512), dtype=torch.bfloat16)
    kernels._launch_warps(x, weight, out, 8, by_inputs)
    assert seen.grid == (2,) and (seen.values["down"], seen.values["across"], seen.values["steps"]) == (3, 2, 2)
    compiled = seen.compiled()
    assert "wgmma" in compiled.asm["ptx"] and compiled.metadata.shared <= 232448


AGAIN = {"recompute": "full"}
SENT = {  # processes: (model, plan, further changes of the recipe)
    2: [(GPT2, "tp2", {}), (GPT2, "tp2_sp", {"precision": "bf16"}), (QWEN3, "tp2_sp", AGAIN)],
    4: [(GPT2, "tp2_sp_pp2", {}), (LLAMA, "tp4", AGAIN)],
}  # fmt: skip


@pytest.mark.slow(3)
@pytest.mark.parametrize("world", SENT)
def test_the_planned_messages_are_those_that_are_sent(exact, world):
    exact = replace(exact, exact_tp=PiecesConfig(pieces=4))  # several of a rank: as many messages as of one
    check_messages([replace(exact, model=model, plan=plan, **more) for model, plan, more in SENT[world]], world)


def test_the_planned_bytes_are_those_of_the_sums_of_pieces(exact):
    """Of a loss, three terms of each row and piece; of norms, two vectors of each piece; of biases, one."""
    settings = replace(exact, plan="tp2_sp").settings(parse_plan("tp2_sp").for_world(2), torch.device("cpu"))
    found = {c.what.split()[0]: c for c in collectives_of(settings, 0) if c.kind == "all-gather" and c.over == "tp"}
    passes, rows, hidden = 2, 2 * 16, 32
    assert found["loss:"].bytes == passes * 12 * 8 * rows
    assert found["gradients"].bytes == passes * 4 * 8 * hidden * (2 * 5 + 4)


REFUSED = [
    ("tp4", {"exact_tp": PiecesConfig(pieces=2)}, r"but tp=4 does not divide exact_tp.pieces=2, a power of two"),
    ("single", {"exact_tp": PiecesConfig(pieces=6)}, r"exact_tp.pieces=6 is no power of two; use 2, 4, 8 or 16"),
    ("single", {"exact_tp": PiecesConfig(pieces=4), "reduce": "exact"}, r"no effect with reduce=exact"),
    ("cp2", {}, r"reduce=exact_tp, but cp=2 adds up"),
    (
        "tp2_sp",
        {"data": DataConfig(tokenizer="bytes", reset_position_ids=True)},
        r"reset_position_ids=on .* use a plan without sp or",
    ),
    ("single", {"model": TRACK3}, r"but the sums of \S+ are not computed in pieces; use --reduce exact or"),
]


@pytest.mark.parametrize("plan, changes, sentence", REFUSED)
def test_what_has_no_pieces_is_refused(exact, plan, changes, sentence):
    recipe = replace(exact, plan=plan, **changes)
    with pytest.raises(UserError, match=sentence):
        checked(recipe).plan_for(parse_plan(plan, {}).world)


def test_compiled_blocks_are_refused(exact):
    with pytest.raises(UserError, match="compiled blocks choose the order of their sums; use --compile off"):
        replace(exact, compile="on").settings(exact.plan_for(1), torch.device("cpu"))


def test_a_norm_has_the_gradients_of_its_definition():
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    dy, x = draw(2, 8, 16), draw(2, 8, 16)
    for centred in (True, False):
        scaled, plain = rows.PIECE_SUMS(dy, x, 4, 1e-5, centred).sum(0)
        weight, bias = torch.ones(16, requires_grad=True), torch.zeros(16, requires_grad=True)
        norm = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
        normed = norm(x, [16], weight, *((bias, 1e-5) if centred else (1e-5,)))
        normed.backward(dy)
        torch.testing.assert_close(scaled, weight.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain, dy.sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_norms_of_heads_have_the_gradients_of_their_definition():
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    given, dy, found = [draw(2, 8, 2, 4, 6), draw(6), draw(6)], draw(2, 8, 4, 6), []
    for context in (nullcontext(), rows_summed_by(PiecewiseRows(Share(4), Share, 1))):
        qkv, *weights = leaves = [t.clone().requires_grad_() for t in given]
        with context:
            q, k, _ = rotary_qkv(qkv, None, Rotation(), 8, *weights, 1e-5)
        ((q * dy).sum() + (k * dy[:, :, :2]).sum()).backward()
        found.append([t.grad for t in leaves])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_head_has_the_same_gradients_without_the_others():
    """Also where the gradient of keys is a view with its columns apart, as products of scores leave it."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    heads, weights, dy = draw(1, 4, 4, 3, 14), [draw(14), draw(14)], draw(1, 4, 14, 4)  # B, N, D, T

    def gradient(first, count):
        qkv = heads[:, :, first : first + count].clone().requires_grad_()
        with rows_summed_by(PiecewiseRows(Share(4), Share, 4 // count)):
            _, k, _ = rotary_qkv(qkv, None, Rotation(), 4, *weights, 1e-5)
        k.backward(dy[:, first : first + count].clone().permute(0, 3, 1, 2))
        return qkv.grad

    assert torch.equal(torch.cat([gradient(head, 1) for head in range(4)], dim=2), gradient(0, 4))


@pytest.mark.parametrize("size, positions, samples", [(9, 7, 1), (8, 11, 3)])
def test_attention_of_a_head_has_the_same_bits_without_the_others(size, positions, samples):
    draw, core = partial(torch.randn, generator=torch.Generator().manual_seed(0)), AttentionCore()
    bind(core, backend="explicit")

    def results(qkv, dy):
        qkv.requires_grad_()
        made = attend_by_heads(core, *qkv.unbind(3), (None, 0.0), None)
        return made, *torch.autograd.grad(made, qkv, dy)

    qkv, dy = draw(samples, positions, 2, 3, size), draw(samples, positions, 2, size)
    alone = [results(one.clone(), d.clone()) for one, d in zip(qkv.split(1, 2), dy.split(1, 2), strict=True)]
    for whole, *parts in zip(results(qkv, dy), *alone, strict=True):
        assert torch.equal(torch.cat(parts, 2), whole)


def test_heads_that_are_computed_alone_have_their_own_dropout():
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k, v, key = draw(2, 5, 4, 8), draw(2, 5, 2, 8), draw(2, 5, 2, 8), torch.tensor([[1, 2], [3, 4]])
    core = AttentionCore()
    for site in ((key, 0.5), (key, 0.5, (4, 0, 0))):
        torch.testing.assert_close(attend_by_heads(core, q, k, v, site, None), core.compute(q, k, v, site, None))


def test_gradients_of_weights_have_the_same_bits_wherever_a_rank_writes_them():
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    dy, x = draw(8, 12), draw(8, 167)  # pieces of three rows, which begin at other alignments
    halves = [products.WEIGHT_GRADIENT(part, x, 2, False) for part in dy.chunk(2, 1)]
    assert torch.equal(torch.cat(halves), products.WEIGHT_GRADIENT(dy, x, 4, False))


def test_operands_are_copied_where_their_place_differs():
    x = torch.arange(64.0).view(8, 8)
    assert products.operand(x) is x
    part = products.operand(x[:, 1:5])
    assert part.is_contiguous() and part.data_ptr() % products.ALIGNED == 0
    assert torch.equal(part, x[:, 1:5])
