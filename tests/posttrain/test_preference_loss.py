"""The loss of pairs against its formula in float64 and autograd."""

import pytest
import torch
import torch.nn.functional as F

from dtgpt.models.shared.coupled import coupled_loss
from dtgpt.posttrain.dpo.loss import Pairs, PreferenceLoss

B, T, H, V, P = 3, 12, 8, 32, 2
CASES = [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)]


@pytest.fixture
def case():
    """Two pairs a sample, of which the last sample lacks one."""
    g = torch.Generator().manual_seed(1)
    x, weight = torch.randn(B, T, H, generator=g), torch.randn(V, H, generator=g)
    targets = torch.randint(V - 2, (B, T), generator=g)
    number = torch.tensor([-1, 0, 0, 0, 1, 1, -1, 2, 2, 3, 3, 3]).repeat(B, 1)
    number[2, 7:] = -1
    answers = number[..., None] == torch.arange(2 * P)
    weights = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]) * 6 / 5
    reference = -5 * torch.rand(B, 2 * P, generator=g, dtype=torch.float64)
    return x, weight, targets, Pairs(weights, answers, reference)


def by_the_formula(x, weight, targets, pairs, kind, beta, smooth):
    logits = (x.double() @ weight.double().T)[..., : V - 2]
    each = F.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    losses, correct = [], 0
    for b in range(B):
        for p in range(P):
            if pairs.weights[b, p] == 0:
                continue
            rows = [pairs.answers[b, :, 2 * p + i] for i in (0, 1)]
            c, r = (each[b][row].sum() - pairs.reference[b, 2 * p + i] for i, row in enumerate(rows))
            correct += int(c > r)
            if kind == "ipo":
                losses.append((c / rows[0].sum() - r / rows[1].sum() - 1 / (2 * beta)) ** 2)
            else:
                z = beta * (c - r)
                losses.append(-(1 - smooth) * F.logsigmoid(z) - smooth * F.logsigmoid(-z))
    return torch.stack(losses).mean(), correct


@pytest.mark.parametrize(("kind", "smooth"), CASES)
def test_loss_gradients_and_figures_are_those_of_the_formula(case, kind, smooth):
    x, weight, targets, pairs = case
    leaves = [value.double().requires_grad_() for value in (x, weight)]
    expected, correct = by_the_formula(*leaves, targets, pairs, kind, 0.3, smooth)
    expected.backward()
    objective = PreferenceLoss(kind, 0.3, smooth, torch.device("cpu"))
    ours = [value.clone().requires_grad_() for value in (x, weight)]
    loss = coupled_loss(*ours, targets, V - 2, pairs, objective, scale=torch.tensor(4.0))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for found, wanted in zip(ours, leaves, strict=True):
        torch.testing.assert_close(found.grad.double(), 4 * wanted.grad, rtol=1e-5, atol=1e-6)
    assert objective.totals[:2].tolist() == [5, correct]


@pytest.mark.parametrize(("chosen", "margin", "told"), [
    (-0.5, 0.2, False),  # 5 nats: e^5 is 148
    (-0.8, 0.2, True),  # 8 nats
    (-0.8, 0.9, False),  # the rejected ones lost more
    (0.8, 0.9, False),
])  # fmt: skip
def test_chosen_answers_that_become_unlikely_are_told(chosen, margin, told):
    objective = PreferenceLoss("sigmoid", 0.1, 0.0, torch.device("cpu"))
    caution = objective.caution({"reward_chosen": chosen, "reward_margin": margin})
    assert (caution is not None) == told and objective.caution({}) is None
    assert not told or caution.startswith("the chosen answers are e^8.0 times less likely than before training")


def test_without_a_reference_the_log_probabilities_of_answers_are_returned(case):
    x, weight, targets, pairs = case
    found = coupled_loss(
        x, weight, targets, V - 2, pairs._replace(reference=None),
        PreferenceLoss("sigmoid", 0.1, 0.0, torch.device("cpu")),
    )  # fmt: skip
    each = F.log_softmax((x.double() @ weight.double().T)[..., : V - 2], -1).gather(-1, targets[..., None])[..., 0]
    expected = (each[..., None] * pairs.answers).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    again = coupled_loss(
        x, weight, targets, V - 2, pairs._replace(reference=found),
        objective := PreferenceLoss("sigmoid", 0.1, 0.0, torch.device("cpu")),
    )  # fmt: skip
    assert again.item() == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-7)
    assert objective.totals.tolist() == [5, 0, 0, 0]  # ratios are exactly 1
