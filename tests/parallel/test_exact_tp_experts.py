"""`--reduce exact_tp` of mixtures of experts: the same bits and choices for any number of tensor-parallel ranks."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.moe.mixture import Experts
from dtgpt.ops.experts.products import Groups, grouped_linear
from dtgpt.ops.norms import rows_summed_by
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.optim.fp16.config import LossScaleConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.parallel.exact_tp.config import PiecesConfig
from dtgpt.parallel.exact_tp.rows import PiecewiseRows
from dtgpt.parallel.exact_tp.sums import PiecewiseSums
from dtgpt.parallel.exact_tp.tree import Share
from dtgpt.parallel.more_pieces.joint import joint_norm
from dtgpt.parallel.more_pieces.stacks import column_stack, row_stack
from tests.planning.test_planning import check_messages
from tests.support.bodies_exact import bits_and_choices, bits_of_steps
from tests.support.bodies_exact_stacks import FAULTS, bits_with_fault
from tests.support.bodies_exact_tp import trained_and_scored
from tests.support.example_mixture import ManyConfig
from tests.support.families import OURS, OURS_WITH_EXPERTS
from tests.support.interpreter import needs_triton, run_interpreted
from tests.support.ranks import pool

SHAPE = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "seq_length": 16,
    "vocab_size": 257, "ffn_hidden_size": 48, "num_experts": 8, "experts_per_token": 2, "dropout": 0.1,
}  # fmt: skip
OLMOE = OlmoeConfig(**SHAPE, corrects_choice=True)
MANY = ManyConfig(**SHAPE)  # all that a mixture can have
PIECES = PiecesConfig(pieces=4)  # two on each of two ranks: half of the products of 8
BALANCE = BalanceConfig(loss=0.1, z_loss=0.01, bias_step=0.01)
FAMILIES = {**OURS_WITH_EXPERTS, "gpt_oss": OURS["gpt_oss"], "olmo3": OURS["olmo3"]}


@pytest.fixture
def exact(recipe):
    """A recipe of two micro-batches and one step, whose balance adds to all gradients of routers."""
    return replace(
        recipe, model=MANY, micro_batch_size=2, global_batch_size=4, reduce="exact_tp", precision="fp32", steps=1,
        balance=BALANCE, log=replace(recipe.log, eval_samples=2),
    )  # fmt: skip


def differing(recipe, plans: list[str], body=bits_and_choices) -> dict[str, list[str]]:
    """By plan, what has other bits than on one process."""

    def bits(plan: str) -> dict[str, str]:
        return pool().run(parse_plan(plan, {}).world, body, replace(recipe, plan=plan))[0]

    expected = bits("single")
    assert len(set(expected.values())) > 20
    found = {plan: bits(plan) for plan in plans}
    return {plan: [name for name in expected if made[name] != expected[name]] for plan, made in found.items()}


@pytest.mark.slow(10)
@pytest.mark.parametrize(
    "plans, changes",
    [
        (["tp2", "tp4_sp"], {"precision": "fp16", "loss_scale": LossScaleConfig(initial=1024.0)}),  # no step is skipped
        (["dp2_tp2_ep2"], {"precision": "bf16", "micro_batch_size": 1}),
        (["dp2_tp2_sp_zero3"], {"model": OLMOE, "precision": "bf16", "micro_batch_size": 1}),
        (["dp2_tp2_sp_ep2_zero2"], {"model": OLMOE, "recompute": "full", "micro_batch_size": 1}),
        (["tp2_sp_pp2"], {"model": OLMOE}),
        (["tp2"], {"model": OLMOE, "precision": "bf16", "optimizer": MuonConfig(lr=6e-3)}),
        (["tp2_sp"], {"steps": 2}),
    ],
)
def test_a_plan_has_the_bits_and_choices_of_one_process(exact, plans, changes):
    assert differing(replace(exact, **changes), plans) == {plan: [] for plan in plans}


@pytest.mark.slow(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_bits_of_one_process(exact, family):
    """Also norms, moments and the held-out loss after a step."""
    model = replace(FAMILIES[family], num_layers=3 if family in ("olmo3", "glm4_moe") else 2)  # each kind of block
    recipe = replace(
        exact, model=model, balance=BalanceConfig(), global_batch_size=2, precision="bf16", exact_tp=PIECES
    )
    assert differing(recipe, ["tp2_sp"], bits_of_steps) == {"tp2_sp": []}


@pytest.mark.slow(2)
@pytest.mark.parametrize("model, plan", [(OLMOE, "tp4_sp"), (MANY, "tp2_sp")])
def test_any_number_of_ranks_scores_with_the_bits_of_training(model, plan):
    """Also where experts, routers and what all tokens share have biases and gates."""
    model = replace(model, dropout=0.0)
    found = [
        each
        for name in ("single", plan)
        for pair in pool().run(parse_plan(name, {}).world, trained_and_scored, model, name)
        for each in pair
    ]
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.slow(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_part_that_is_missing_shows(exact, fault):
    model = OLMOE if fault in ("all heads", "owners") else MANY
    one = replace(exact, model=model, global_batch_size=2)
    assert differing(one, ["tp2_sp"], partial(bits_with_fault, fault))["tp2_sp"]


def test_activations_of_experts_come_in_pieces():
    """On a CPU PyTorch computes the last elements of a tensor by other instructions than the rest."""
    experts, widths = Experts(OLMOE), []
    for stack in (experts.gate_up, experts.down):
        torch.nn.init.normal_(stack.weight)
    swiglu, rows = experts.activation, torch.randn(12, 32)
    experts.activation = lambda x: (widths.append(x.shape[1]), swiglu(x))[1]
    ends = torch.tensor([1, 1, 2, 4, 6, 8, 10, 12], dtype=torch.int32)
    plain = experts.products(rows, ends)
    with rows_summed_by(PiecewiseRows(Share(4), lambda size: Share(4), 1)):
        made = experts.products(rows, ends)
    assert widths == [96, *[24] * 4]
    torch.testing.assert_close(made, plain)


def leaves(dtype: torch.dtype) -> tuple[list[torch.Tensor], Groups, torch.Tensor]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    given = [draw(11, 16), draw(3, 24, 16) / 4, draw(3, 24)]
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)  # one expert without rows, two rows of nobody
    return [t.to(dtype).requires_grad_() for t in given], Groups(ends, False), draw(9, 24).to(dtype)


@pytest.mark.parametrize("stack", [column_stack, row_stack])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_stacks_and_their_gradients_are_those_of_grouped_products(dtype, tolerance, stack):
    found = []
    for of, kind in ((partial(stack, 4, None), dtype), (grouped_linear, torch.float64)):
        given, groups, towards = leaves(kind)
        made = of(*given, groups) if kind is dtype else of(*given, *groups)
        made[:9].backward(towards)
        found.append([made[:9].detach(), given[0].grad[:9], given[1].grad, given[2].grad])
    for ours, exactly in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exactly, rtol=0, atol=tolerance * exactly.abs().max().item())


def test_rows_of_nobody_give_biases_no_gradient():
    given, groups, towards = leaves(torch.float32)
    column_stack(4, None, *given, groups).backward(torch.cat([towards, towards.new_full((2, 24), torch.nan)]))
    assert given[1].grad.isfinite().all() and given[2].grad.isfinite().all()


def test_a_norm_of_all_heads_has_the_gradients_of_its_definition():
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    values, dy, found = [draw(2, 8, 16), draw(16)], draw(2, 8, 16), []
    for norm in (
        lambda x, w: joint_norm(Share(4), 16, 1e-5, x, w),
        lambda x, w: torch.nn.functional.rms_norm(x, [16], w, 1e-5),
    ):
        x, weight = (t.clone().requires_grad_() for t in values)
        y = norm(x, weight)
        y.backward(dy)
        found.append([y.detach(), x.grad, weight.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_squares_of_stacks_are_added_in_pieces():
    gradient = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0)) ** 9

    def squares(pieces, *parts):
        sums = object.__new__(PiecewiseSums)
        sums._pieces = {id(part): pieces for part in parts} if pieces else {}
        return torch.stack([sums.squares([], part.new_zeros(0), [part]) for part in parts]).sum(0)

    assert torch.equal(squares(8, gradient), squares(4, *gradient.chunk(2, 2)))
    assert torch.equal(squares(0, gradient), squares(0, *gradient.chunk(2, 1)))


@needs_triton
@pytest.mark.slow(8)
def test_the_kernel_sums_pieces_of_the_rows_of_experts():
    run_interpreted("from tests.support.bodies_exact_stacks import check_kernels; check_kernels()")


AGAIN = {"recompute": "full"}
DRY = {"dropout": 0.0}
SENT = {  # processes: (model, plan, further changes of the recipe)
    2: [
        (MANY, "tp2", {}), (MANY, "tp2_sp", AGAIN), (replace(MANY, **DRY), "tp2_sp", AGAIN), (OLMOE, "tp2", AGAIN),
        (replace(OLMOE, **DRY), "tp2_sp", AGAIN), (replace(FAMILIES["glm4_moe"], num_layers=3), "tp2_sp", AGAIN),
    ],
    4: [(OLMOE, "dp2_tp2_sp_ep2", AGAIN), (MANY, "dp2_tp2_ep2", {})],
}  # fmt: skip


@pytest.mark.slow(5)
@pytest.mark.parametrize("world", SENT)
def test_the_planned_messages_are_those_that_are_sent(exact, world):
    recipe = replace(exact, balance=BalanceConfig(), exact_tp=PIECES)
    check_messages([replace(recipe, model=model, plan=plan, **more) for model, plan, more in SENT[world]], world)
