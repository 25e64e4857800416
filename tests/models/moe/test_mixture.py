"""The modules of mixtures of experts: a block with all that there can be against a loop over tokens, the correction of
a router, and what a balance sees."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dtgpt.models.moe.mixture import Mixture, Router, routers
from dtgpt.ops.random.philox import fold, normal, root_key
from tests.models.moe.test_plans import ADAMW, SHAPE
from tests.support.example_mixture import ManyConfig
from tests.support.runs import training
from tests.support.whole_model import build_model

CPU = torch.device("cpu")
MANY = ManyConfig(
    **SHAPE, num_kv_heads=2, head_dim=8, ffn_hidden_size=40, num_experts=6, experts_per_token=2, dropout=0.1
)


def scattered(dtype=torch.float64) -> Mixture:
    """The mixture of a block, whose parameters are all away from zero."""
    config = replace(MANY, init_std=0.3)
    mixture = build_model(config, CPU, dtype, root_key(1)).blocks["1"].mlp.to(dtype)
    with torch.no_grad():
        for name, parameter in mixture.named_parameters():
            drawn = normal(fold(root_key(5), name), [range(n) for n in parameter.shape])
            parameter.copy_(0.3 * drawn)
    return mixture


def silu(gate: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp())


def by_hand(mixture: Mixture, x: Tensor) -> Tensor:
    """The output `[H]` of one token x `[H]`, of three experts in each of two groups."""
    p = {name: value.double() for name, value in mixture.named_parameters()}
    scores = 1 / (1 + (-(p["router.weight"] @ x + p["router.bias"])).exp())
    bent = (scores + p["router.correction.bias"]).tolist()
    first, second = (sum(sorted(bent[at : at + 3])[1:]) for at in (0, 3))
    group = range(3) if first >= second else range(3, 6)
    chosen = sorted(group, key=lambda e: -bent[e])[:2]
    total = torch.zeros_like(x)
    for e in chosen:
        both = p["experts.gate_up.weight"][e] @ x + p["experts.gate_up.bias"][e]
        inner = silu(both[0::2]) * both[1::2]
        own = p["experts.down.weight"][e] @ inner + p["experts.down.bias"][e]
        total = total + 1.5 * scores[e] / sum(scores[c] for c in chosen) * own
    both = p["shared.gate_up.weight"] @ x
    shared = p["shared.down.weight"] @ (silu(both[0::2]) * both[1::2])
    return total + shared / (1 + (-(p["shared_gate.weight"] @ x)).exp())


def test_a_mixture_is_that_of_each_token_alone():
    mixture, other = scattered(), scattered()
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = mixture(x).product
    expected = torch.stack([by_hand(other, token) for token in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    towards = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found * towards).sum().backward()
    (expected * towards).sum().backward()
    theirs = dict(other.named_parameters())
    for name, parameter in mixture.named_parameters():
        if name == "router.correction.bias":
            assert not parameter.grad.any()
        else:
            assert theirs[name].grad.any()
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_correction_keeps_its_bits_where_weights_have_16(dtype):
    router = scattered(torch.float32).router
    with torch.no_grad():
        router.correction.bias.fill_(0.3 + 1e-6)
    router = router.to(dtype)
    assert router.weight.dtype == dtype and router.correction.bias.dtype == torch.float32
    assert (router.correction.bias == torch.tensor(0.3 + 1e-6)).all()
    assert router.to("meta").correction.bias.is_meta


class Tilt:
    """A balance that counts in backward, and adds a constant to the gradient of logits."""

    def __init__(self, correction: Tensor | None, addend: float = 0.0):
        self.correction, self.addend, self.counts, self.watched = correction, addend, torch.zeros(6), 0

    def watch(self, logits: Tensor, experts: Tensor) -> Tensor:
        self.watched += 1
        return Seen.apply(logits, experts, self)


class Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, experts, balance):
        ctx.save_for_backward(experts)
        ctx.balance = balance
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, grad):
        (experts,) = ctx.saved_tensors
        ctx.balance.counts += (experts[..., None] == torch.arange(6)).sum((0, 1, 2))
        return grad + ctx.balance.addend, None, None


def test_a_balance_changes_choices_by_its_correction_and_gradients_by_its_addend():
    router: Router = scattered(torch.float32).router
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    before = router(x)
    router.balance = Tilt(torch.tensor([-9.0, 0, 9, -9, -9, -9]))
    after = router(x)
    assert not torch.equal(before.experts, after.experts) and (after.experts < 3).all()
    assert set(after.experts[..., 0].flatten().tolist()) == {2}
    after.weights.sum().backward()
    plain = router.bias.grad.clone()
    assert router.balance.counts.sum() == 18 and router.balance.counts[2] == 9
    router.balance.addend, router.bias.grad = 0.5, None
    router(x).weights.sum().backward()
    torch.testing.assert_close(router.bias.grad, plain + 4.5)


@pytest.mark.slow(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_counted_in_backward_is_counted_once(recipe, recompute):
    """Each token of each micro-batch; not again where blocks run again, nor in an evaluation."""
    trainer = training(replace(recipe, model=MANY, optimizer=ADAMW, micro_batch_size=2, recompute=recompute))
    tilts = []
    for router in routers(trainer.stages[0]):
        router.balance = Tilt(None)
        tilts.append(router.balance)
    trainer.train_step()
    tokens = recipe.global_batch_size * recipe.model.seq_length * 2
    assert [tilt.counts.sum() for tilt in tilts] == [tokens] * 3
    assert tilts[0].watched == 4 * (1 if recompute == "none" else 2)
    watched = tilts[0].watched
    trainer.held_out_loss()
    assert tilts[0].counts.sum() == tokens and tilts[0].watched > watched
