from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dtgpt.model import GPTConfig, build_model
from dtgpt.ops.random import root_key
from dtgpt.optim import clip_gradients, learning_rate, make_optimizer
from dtgpt.recipe import OptimizerConfig, Recipe


def schedule(kind: str, steps=100, **changes) -> list[float]:
    recipe = Recipe(
        name="x",
        model=GPTConfig(num_layers=1, hidden_size=8, num_heads=1),
        optimizer=OptimizerConfig(lr=1.0, min_lr=0.1, schedule=kind, warmup=10, **changes),
        steps=steps,
        micro_batch_size=1,
        global_batch_size=1,
    )
    return [learning_rate(step, recipe) for step in range(steps + 20)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_warms_up_to_the_peak_and_never_leaves_its_bounds(kind):
    rates = schedule(kind)
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert all(0.1 <= r <= 1.0 for r in rates[9:])
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_schedules_take_their_shapes():
    assert schedule("cosine")[55] == pytest.approx(0.55) and schedule("cosine")[100] == pytest.approx(0.1)
    assert schedule("linear")[55] == pytest.approx(0.55) and schedule("linear")[110] == pytest.approx(0.1)
    assert set(schedule("constant")[10:]) == {1.0}
    wsd = schedule("wsd", wsd_decay=0.2)
    assert wsd[80] == 1.0 and wsd[90] == pytest.approx(0.55) and wsd[100] == pytest.approx(0.1)


def test_warmup_may_be_a_share_and_decay_may_end_before_the_run():
    rates = schedule("cosine", decay_steps=50)
    assert rates[50] == rates[100] == pytest.approx(0.1)
    recipe = Recipe(
        name="x", model=GPTConfig(num_layers=1, hidden_size=8, num_heads=1),
        optimizer=OptimizerConfig(lr=1.5e-4, warmup=0.01, decay_steps=320_000),
        steps=500_000, micro_batch_size=1, global_batch_size=1,
    )  # fmt: skip
    assert recipe.warmup_steps == 3200


def test_only_matrices_decay():
    config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, seq_length=8, vocab_size=50)
    model = build_model(config, torch.device("cpu"), torch.float32, root_key(0))
    optimizer = make_optimizer(list(model.parameters()), OptimizerConfig(lr=1e-3, weight_decay=0.1))
    names = {p: n for n, p in model.named_parameters()}
    decay, plain = ({names[p] for p in group["params"]} for group in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert "embedding.wte.weight" in decay and "blocks.0.attn.qkv.weight" in decay
    assert all(n.endswith("bias") or ".ln_" in n for n in plain)
    assert decay | plain == set(names.values())


def test_one_step_is_adamw_as_published():
    w, g = torch.tensor([[1.0, -2.0]], requires_grad=True), torch.tensor([[0.5, 0.25]])
    weight = torch.nn.Parameter(w.detach().clone())
    optimizer = make_optimizer([weight], OptimizerConfig(lr=0.1, weight_decay=0.2, beta1=0.9, beta2=0.95, eps=1e-8))
    weight.grad = g
    optimizer.step()
    expected = w.detach() * (1 - 0.1 * 0.2) - 0.1 * g / (g.abs() + 1e-8)  # the first step's moments are g and g^2
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("limit, scale", [(1.0, 0.2), (10.0, 1.0), (0.0, 1.0)])
def test_clipping_scales_the_global_norm(limit, scale):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    clip_gradients(parameters, torch.tensor(5.0), limit)
    assert parameters[0].grad[0].item() == pytest.approx(3 * scale, rel=1e-5)
    assert parameters[1].grad[1].item() == pytest.approx(4 * scale, rel=1e-5)


def test_clipping_goes_by_the_norm_that_it_is_told():
    """Which counts the gradients of other ranks too."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_gradients([parameter], torch.tensor(50.0), 1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.06, 0.08]), rtol=1e-5, atol=0)


def test_accumulation_is_the_number_of_micro_batches_of_each_replica(recipe):
    assert recipe.micro_batches(1) == 2 and recipe.micro_batches(2) == 1
    assert replace(recipe, micro_batch_size=8).micro_batches(1) == 1
