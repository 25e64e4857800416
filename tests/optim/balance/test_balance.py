"""The balance of experts: losses and gradients against transformers and against definitions in float64, corrections
against a rule in integers, plans against one process, padding, evaluation, recomputation."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.moe.mixture import routers
from dtgpt.ops.experts.routing import Routing, choose
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.optim.balance.losses import counted_tokens, probabilities
from dtgpt.optim.balance.state import Balances
from dtgpt.train.setup import open_trainer
from tests.support.bodies_balance import balance_of, balanced_steps, check_same, relative_error
from tests.support.bodies_optimizer import train_part
from tests.support.families import their_config, theirs_of
from tests.support.ranks import pool
from tests.support.runs import training

pytestmark = pytest.mark.slow(6)

OLMOE = OlmoeConfig(
    num_layers=4, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, num_kv_heads=4, head_dim=8,
    ffn_hidden_size=24, num_experts=6, experts_per_token=2, corrects_choice=True, init_std=0.2, rope_theta=5e5,
)  # fmt: skip
ALL = BalanceConfig(bias_step=0.01, loss=0.1, z_loss=0.01)
STEPS = 3


@pytest.fixture
def moe(recipe) -> Recipe:
    adamw = OptimizerConfig(lr=3e-3, warmup=2, eps=1e-4)  # gradients of rounding alone make no whole steps
    return replace(
        recipe, model=OLMOE, optimizer=adamw, steps=STEPS, micro_batch_size=2, global_batch_size=8, balance=ALL
    )


@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_loss_and_gradients_with_the_auxiliary_loss_are_those_of_transformers(moe, micro_batch_size):
    """Of one forward pass with the global batch there."""
    model = replace(OLMOE, corrects_choice=False)
    balance = BalanceConfig(loss=0.3)
    trainer = training(replace(moe, model=model, balance=balance, micro_batch_size=micro_batch_size))
    own = their_config(
        "olmoe", vocab_size=257, hidden_size=32, num_hidden_layers=4, num_key_value_heads=4, intermediate_size=24,
        num_experts=6, num_experts_per_tok=2, clip_qkv=None, output_router_logits=True,
    )  # fmt: skip
    own._attn_implementation = "eager"
    import transformers

    twin = transformers.OlmoeForCausalLM(own)
    weights = {name: parameter.detach() for name, parameter in trainer.stages[0].named_parameters()}
    twin.load_state_dict(theirs_of(twin, model, weights))
    tokens, _, _ = trainer.objective.batches.take(0)
    loss = trainer.gradients()
    gradients = {shard.name: trainer.gradient(shard).clone() for shard in trainer.shards}
    mean = trainer.mean_loss(trainer.update(loss))
    made = twin(tokens[:, :-1])
    their_loss = cross_entropy(made.logits.flatten(0, 1), tokens[:, 1:].flatten())
    (their_loss + 0.3 * made.aux_loss).backward()
    assert mean == pytest.approx(their_loss.item(), rel=1e-5)
    assert balance_of(trainer).metrics()["balance_loss"] == pytest.approx(made.aux_loss.item(), rel=1e-5)
    ours, theirs = theirs_of(twin, model, gradients), {name: p.grad for name, p in twin.named_parameters()}
    errors = {name: relative_error(ours[name], grad) for name, grad in theirs.items()}
    assert ours.keys() == theirs.keys() and max(errors.values()) < 1e-5, max(errors.items(), key=lambda each: each[1])
    plain = training(replace(moe, model=model, balance=BalanceConfig(), micro_batch_size=micro_batch_size))
    plain.gradients()
    name = "blocks.0.mlp.router.weight"
    without = next(plain.gradient(shard) for shard in plain.shards if shard.name == name)
    assert relative_error(gradients[name], without) > 0.01


def definition(logits: list[Tensor], experts: list[Tensor], config: BalanceConfig, score: str, counted: Tensor):
    """Return the auxiliary and the z-loss of the whole batch `[B, T, E]` of each layer, by the formulas."""
    chances = [probabilities(each, score) for each in logits]
    count, size, chosen_each = len(logits), logits[0].shape[-1], experts[0].shape[-1]
    ones = [torch.nn.functional.one_hot(each, size).sum(-2) * counted[..., None] for each in experts]
    chances = [each * counted[..., None] for each in chances]
    tokens = counted.sum()
    z = sum((each.logsumexp(-1).square() * counted).sum() / tokens for each in logits) / count
    if config.over == "sequence":
        lengths = counted.sum(1)
        each = [
            size / chosen_each * ((one[row].sum(0) / lengths[row]) * (chance[row].sum(0) / lengths[row])).sum()
            for one, chance in zip(ones, chances, strict=True)
            for row in range(len(counted))
        ]
        return sum(each) / len(each), z
    loads, means = (torch.stack([e.sum((0, 1)) / tokens for e in many]) for many in (ones, chances))
    if config.layers == "together":
        return size * (loads.mean(0) * means.mean(0)).sum(), z
    return size * (loads * means).sum(1).mean(), z


@pytest.mark.parametrize(
    ("over", "layers", "score", "padded"),
    [
        ("batch", "together", "softmax", False),
        ("batch", "apart", "sigmoid", True),
        ("sequence", "together", "softmax", True),
        ("sequence", "together", "sigmoid", False),
        ("batch", "together", "softmax_of_chosen", True),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_and_their_gradients_follow_from_the_formulas(moe, over, layers, score, padded, micro_batches):
    """Of random logits, whose batch comes in micro-batches."""
    balance = BalanceConfig(loss=0.7, z_loss=0.2, over=over, layers=layers)
    recipe = replace(moe, balance=balance, global_batch_size=4, micro_batch_size=4 // micro_batches)
    trainer = training(recipe)
    state, rule = balance_of(trainer), Routing(2, score)
    torch.manual_seed(0)
    logits = [torch.randn(4, 16, 6, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    experts = [choose(each, rule) for each in logits]
    counted = torch.ones(4, 16, dtype=torch.float64)
    if padded:
        counted[0, 9:], counted[3, 2:] = 0, 0
    aux, z = definition(logits, experts, balance, score, counted)
    expected = torch.autograd.grad(0.7 * aux + 0.2 * z, logits)
    state.share.fill_(counted.numel() / counted.sum())
    own = [router.balance for router in routers(trainer.stages[0])]
    pieces = [slice(first, first + recipe.micro_batch_size) for first in range(0, 4, recipe.micro_batch_size)]

    def run(each, chosen, ways, piece):
        way = next(ways)
        way.rule, state.counted = rule, counted[piece] > 0 if padded else None
        return way.watch(each[piece], chosen[piece])

    state.looks = True
    with torch.no_grad():
        for piece in pieces:
            ways = iter(own)
            for each, chosen in zip(logits, experts, strict=True):
                run(each, chosen, ways, piece)
    state.looks = False
    state.loads.copy_(state.compared())
    for piece in pieces:
        ways = iter(own)
        outputs = [run(each, chosen, ways, piece) for each, chosen in zip(logits, experts, strict=True)]
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
    for each, grad in zip(logits, expected, strict=True):
        torch.testing.assert_close(each.grad, grad, rtol=1e-6, atol=1e-9)
    state.update(torch.zeros(()), torch.zeros(()))
    figures = state.metrics()
    assert figures["balance_loss"] == pytest.approx(aux.item(), rel=1e-6)
    assert figures["z_loss"] == pytest.approx(z.item(), rel=1e-6)


def test_a_sigmoid_router_gains_nothing_by_lower_scores():
    """The gradient along a change that divides all scores alike is zero."""
    from dtgpt.optim.balance.losses import through

    logits = torch.randn(2, 5, 6, dtype=torch.float64)
    own = probabilities(logits, "sigmoid")
    gradient = through(own, logits, "sigmoid", torch.rand(6, dtype=torch.float64))
    scores = logits.sigmoid()
    change = 1 / (1 - scores)  # d logits / d log(score)
    assert gradient.abs().max() > 1e-3 and (gradient * change).sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize(("layers", "recompute"), [("together", "none"), ("apart", "full")])
def test_a_batch_that_is_one_micro_batch_runs_forward_once(moe, layers, recompute, monkeypatch):
    """With the bits of a step that looks at its loads before, and with the curve of two replicas."""
    model = replace(OLMOE, num_layers=2)
    recipe = replace(moe, model=model, micro_batch_size=8, balance=replace(ALL, layers=layers), recompute=recompute)
    looks, look = [], Balances._look
    monkeypatch.setattr(Balances, "_look", lambda *given: looks.append(look(*given)))
    found = balanced_steps(recipe)
    assert not looks
    check_same(found, pool().run(2, balanced_steps, replace(recipe, plan="dp2", micro_batch_size=4))[0])
    balanced_steps(replace(recipe, model=replace(recipe.model, dropout=0.1)))  # which a look has not
    assert len(looks) == recipe.steps
    monkeypatch.setattr("dtgpt.optim.balance.state.Balances", lambda *given, alone, **named: Balances(*given, **named))
    check_same(found, balanced_steps(recipe), exact=True)
    assert len(looks) == 2 * recipe.steps


def test_a_run_that_goes_on_with_other_micro_batches_has_the_curve_of_one_that_did_not_stop(moe, tmp_path):
    recipe = replace(moe, micro_batch_size=8)
    whole = train_part(recipe, tmp_path / "whole", STEPS).losses
    for plan, size in (("single", 8), ("dp2", 4)):
        losses, then = train_part(recipe, tmp_path / plan, 1).losses, replace(recipe, plan=plan, micro_batch_size=size)
        losses += pool().run(parse_plan(plan).world, train_part, then, tmp_path / plan, STEPS)[0].losses
        assert losses == pytest.approx(whole, rel=0 if plan == "single" else 1e-6)


def test_recomputation_and_evaluation_count_nothing(moe):
    whole = balanced_steps(moe)
    check_same(balanced_steps(replace(moe, recompute="full")), whole, exact=True)
    check_same(balanced_steps(moe, held_out=True), whole, exact=True)


def test_an_evaluation_before_the_first_step_of_a_resumed_run_has_its_corrections(moe, tmp_path):
    moe = replace(moe, balance=BalanceConfig(bias_step=0.5))
    train_part(moe, tmp_path, 1)
    with open_trainer(moe, tmp_path) as trainer:
        begin = trainer.held_out_loss()
        trainer.gradients()
        assert trainer.held_out_loss() == begin


def test_corrections_move_by_the_sign_of_missing_tokens(moe):
    trainer = training(replace(moe, balance=BalanceConfig(bias_step=0.125)))
    state, before = balance_of(trainer), torch.zeros(4, 6)
    for _ in range(2):
        trainer.train_step()
        loads = state.last[:, :6].long()
        assert loads.sum(1).tolist() == [8 * 16 * 2] * 4  # each choice of the batch once
        missing = 8 * 16 * 2 - 6 * loads
        before += 0.125 * missing.sign()
        held = [router.correction.bias for router in routers(trainer.stages[0])]
        assert torch.equal(torch.stack([each.detach() for each in held]), before)
        assert torch.equal(state.corrections, before)


def test_a_correction_makes_loads_even(moe):
    recipe = replace(moe, steps=40, micro_batch_size=8, balance=BalanceConfig(bias_step=0.02))
    spread = {}
    for name, each in (("corrected", recipe), ("plain", replace(recipe, balance=BalanceConfig()))):
        spread[name] = sum(f["load_max"] for f in balanced_steps(each).figures[-8:]) / 8
    assert spread["corrected"] < 0.8 * spread["plain"], spread


def test_tokens_of_padding_are_those_of_documents_without_a_loss():
    bounds = torch.tensor([[[0, 3]] * 3 + [[3, 5]] * 2 + [[5, 8]] * 3, [[0, 8]] * 8], dtype=torch.int32)
    weights = torch.tensor([[0, 0, 1.0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 2.5]])
    counted = counted_tokens(bounds, weights)
    assert counted.tolist() == [[True] * 5 + [False] * 3, [True] * 8]
    assert counted_tokens(bounds, None) is None and counted_tokens(None, weights) is None
