from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.optim.step_state import StepState
from dtgpt.optim.update import Update, clip_factor
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.gradients import Sums
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from tests.support.bodies_shards import CPU, KEY
from tests.support.runs import change, constant, rate_of

LOSS = torch.tensor(0.0)  # for outliers, which these updates do not look for


def schedule(kind: str, steps=100, **changes) -> list[float]:
    recipe = Recipe(
        name="x",
        model=GPT2Config(num_layers=1, hidden_size=8, num_heads=1),
        optimizer=OptimizerConfig(lr=1.0, min_lr=0.1, schedule=kind, warmup=10, **changes),
        steps=steps,
        micro_batch_size=1,
        global_batch_size=1,
    )
    return [rate_of(step, recipe) for step in range(steps + 20)]


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
        name="x", model=GPT2Config(num_layers=1, hidden_size=8, num_heads=1),
        optimizer=OptimizerConfig(lr=1.5e-4, warmup=0.01, decay_steps=320_000),
        steps=500_000, micro_batch_size=1, global_batch_size=1,
    )  # fmt: skip
    assert recipe.schedule.warmup == 3200


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_a_schedule_in_samples_is_that_in_steps_where_batches_are_equal(recipe, kind):
    recipe = change(recipe, steps=40, global_batch_size=8)
    steps = change(recipe, optimizer={"schedule": kind, "warmup": 5, "decay_steps": 30})
    samples = change(recipe, optimizer={"schedule": kind, "warmup_samples": 40, "decay_samples": 240})
    assert samples.counts_samples and not steps.counts_samples
    expected = [rate_of(step, steps) for step in range(40)]
    assert [rate_of(step, samples) for step in range(40)] == pytest.approx(expected, rel=1e-12)


def test_a_schedule_in_samples_follows_a_ramp(recipe):
    """4 samples a step up to 13 samples, 8 up to 26, 12 up to 40, then 16."""
    recipe = change(
        recipe, micro_batch_size=2, global_batch_size=16, rampup_batch_size="4 4 40", steps=None, train_samples=100,
        optimizer={"schedule": "linear", "lr": 1.0, "warmup_samples": 20},
    )  # fmt: skip
    seen = [0, 4, 8, 12, 16, 24, 32, 44, 60, 76, 92]
    assert recipe.counted().steps == 10 and recipe.resolved().steps == 10  # whole steps: 8 samples are left over
    assert recipe.resolved().optimizer.decay_samples == 100 and recipe.resolved().train_samples is None
    rates = update_of(recipe.resolved()).schedule.tolist()
    for now, then, rate in zip(seen, seen[1:], rates, strict=False):
        assert rate == pytest.approx(min(then / 20, 1) if now < 20 else 1 - (now - 20) / 80, rel=1e-6)
    resumed = recipe.resolved().schedule.rates(10, recipe.batch_sizes(4, 16))
    assert torch.tensor(resumed[4:]).tolist() == rates[4:]


def shards_of(recipe: Recipe, dtype=torch.float32) -> Shards:
    plan = ResolvedPlan(dp=1)
    settings = replace(recipe.settings(plan, CPU), dtype=dtype)
    shards = build_stages(settings, Mesh(plan, CPU), KEY)[1]
    shards.sums = Sums(settings)  # whatever a micro-batch leaves on the parameters
    return shards


def update_of(recipe: Recipe, dtype=torch.float32, share=1.0) -> Update:
    rates = recipe.schedule.rates(recipe.steps, recipe.batch_sizes())
    states: list[StepState] = []
    if dtype == torch.float16:
        from dtgpt.optim.fp16.loss_scale import LossScaler

        states.append(LossScaler(CPU, recipe.loss_scale))
    return Update(shards_of(recipe, dtype), recipe.optimizer, rates, share, states)


def leave_gradients(shards: Shards, seed: int, scale: float = 1.0) -> list[Tensor]:
    """Random ones on the modules, as backward does; returns them in fp32 without the scale."""
    generator = torch.Generator().manual_seed(seed)
    for shard in shards:
        shard.parameter.grad = (scale * torch.randn(shard.local.shape, generator=generator)).to(shard.parameter.dtype)
    shards.take_gradients()
    return [shards.gradient(shard).float() / scale for shard in shards]


def state_of(update: Update) -> list[Tensor]:
    """Copies of all that a step may change, but the loss scale."""
    weights = [tensor for shard in update.shards for tensor in (shard.local, shard.parameter)]
    return [t.detach().clone() for t in (*weights, *update.rule.exp_avg, *update.rule.exp_avg_sq)]


def test_only_matrices_decay(recipe):
    """Told by the slots and done by a step whose gradients are zero."""
    shards = shards_of(recipe)
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.5).make(shards)
    decay = {shard.name for shard, slot in zip(shards, optimizer.slots, strict=True) if slot.decay}
    plain = {shard.name for shard in shards} - decay
    assert "embedding.wte.weight" in decay and "blocks.0.attn.qkv.weight" in decay
    assert len(plain) == 2 * 8 + 2 and all(name.endswith("bias") or ".ln_" in name for name in plain)
    before = [shard.local.clone() for shard in shards]
    optimizer.step([torch.zeros_like(w) for w in before], torch.tensor(0.25), torch.tensor(1.0))
    for shard, weight in zip(shards, before, strict=True):
        assert torch.equal(shard.local, weight * (0.875 if shard.name in decay else 1.0)), shard.name


def test_one_step_is_adamw_as_published(recipe):
    """The first step's moments are g and g^2."""
    update = update_of(change(recipe, optimizer={"weight_decay": 0.2, "clip": 0.0, **constant(0.1)}))
    weights = [shard.local.clone() for shard in update.shards]
    gradients = leave_gradients(update.shards, 1)
    update.apply(LOSS)
    for shard, w, g in zip(update.shards, weights, gradients, strict=True):
        kept = w * (1 - 0.1 * 0.2) if w.dim() > 1 else w
        torch.testing.assert_close(shard.local, kept - 0.1 * g / (g.abs() + 1e-8), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm, limit, factor", [(5.0, 1.0, 0.2), (5.0, 10.0, 1.0), (5.0, 0.0, 1.0), (50.0, 1.0, 0.02)])
def test_clipping_brings_the_norm_that_it_is_told_down_to_the_limit(norm, limit, factor):
    """Which counts the gradients of other ranks too."""
    assert clip_factor(torch.tensor(norm), limit).item() == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("clip, share", [(0.0, 1.0), (1.0, 0.25), (1e6, 1.0)])
def test_an_update_clips_by_the_global_norm_which_it_returns(recipe, clip, share):
    """Seen in the first moment: a first step of AdamW does not depend on the size of a gradient. The share of a
    micro-batch is in the gradients already."""
    update = update_of(change(recipe, optimizer={"clip": clip, **constant(0.1)}), share=share)
    gradients = leave_gradients(update.shards, 2)
    norm = torch.cat([g.flatten().double() for g in gradients]).norm().item()
    factor = min(1.0, clip / norm) if clip else 1.0
    assert update.apply(LOSS).item() == pytest.approx(norm, rel=1e-6) and update.inverse_scale() == 1.0
    assert update.gradient_scale.item() == share and update.metrics() == {}
    for moment, g in zip(update.rule.exp_avg, gradients, strict=True):
        torch.testing.assert_close(moment, 0.1 * factor * g, rtol=1e-5, atol=1e-7)


def test_every_update_takes_the_rate_of_its_step_also_beyond_the_last(recipe):
    recipe = replace(recipe, steps=4)
    update, rates = update_of(recipe), []
    for step in range(5):
        leave_gradients(update.shards, step)
        update.apply(LOSS)
        rates.append(update.lr.item())
    assert rates == pytest.approx([rate_of(min(step, 3), recipe) for step in range(5)], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_the_rounded_masters(recipe, dtype):
    update = update_of(recipe, dtype)
    for step in range(3):
        for shard in update.shards:
            assert shard.parameter.dtype == dtype and shard.local.dtype == torch.float32
            assert torch.equal(shard.parameter, shard.local.to(dtype)), (step, shard.name)
        leave_gradients(update.shards, step, update.gradient_scale.item() if dtype == torch.bfloat16 else 2.0)
        update.apply(LOSS)


def fp16_update(recipe, **scale) -> Update:
    settings = {"initial": 2.0**10, "window": 2, "hysteresis": 2, "minimum": 1.0, **scale}
    return update_of(change(recipe, loss_scale=settings), torch.float16, share=0.5)


def overflow(update: Update, value: float = torch.inf) -> None:
    """One number of one gradient does it."""
    leave_gradients(update.shards, 0)
    update.shards.gradients[3].view(-1)[-1] = value


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_fp16_step_that_overflows_is_skipped_and_does_not_count(recipe, value):
    update = fp16_update(recipe)
    leave_gradients(update.shards, 1, update.scaler.scale.item())
    update.apply(LOSS)
    before = state_of(update)
    overflow(update, value)
    assert not update.apply(LOSS).isfinite()
    assert all(map(torch.equal, state_of(update), before))
    assert update.state()["updates"] == 1 and update.metrics() == {"loss_scale": 2.0**10, "skipped_steps": 1}
    assert update.lr.item() == pytest.approx(rate_of(1, recipe))
    leave_gradients(update.shards, 2, update.scaler.scale.item())
    assert update.apply(LOSS).isfinite() and update.lr.item() == pytest.approx(rate_of(1, recipe))  # once more
    assert update.state()["updates"] == 2 and not any(map(torch.equal, state_of(update), before))


def test_fp16_counts_overflows_and_outliers_apart(recipe, monkeypatch):
    """An overflow stays out of the window, and an outlier leaves the loss scale as it is."""
    from dtgpt.optim.z_scores import detector as outliers
    from dtgpt.optim.z_scores.detector import OutlierDetector

    monkeypatch.setattr(outliers, "WINDOW", 4)
    update = fp16_update(recipe, initial=2.0**8, window=100)
    update.states += [OutlierDetector(update.shards.mesh, replace(recipe.optimizer, skip_grad_norm_z=1.5))]
    for step in range(5):
        if step == 2:
            overflow(update)
        else:
            leave_gradients(update.shards, step, update.scaler.scale.item())
        update.apply(LOSS)
    assert update.metrics() == {"loss_scale": 2.0**8, "skipped_steps": 1, "skipped_outliers": 0}
    before = state_of(update)
    gradients = leave_gradients(update.shards, 5, update.scaler.scale.item())
    for shard, gradient in zip(update.shards, gradients, strict=True):
        update.shards.gradients[shard.index].copy_(4 * gradient * update.scaler.scale)
    assert update.apply(LOSS).isfinite() and all(map(torch.equal, state_of(update), before))
    found = update.metrics()
    assert (found["skipped_steps"], found["skipped_outliers"], found["loss_scale"]) == (1, 1, 2.0**8)
    assert found["grad_norm_z"] > 1.5 and found["loss_z"] == 0 and update.state()["updates"] == 4
    other = fp16_update(recipe)
    other.states += [OutlierDetector(other.shards.mesh, recipe.optimizer)]
    other.restore(update.state())
    assert other.state() == update.state()


def test_the_loss_scale_falls_and_rises_and_the_gradient_scale_with_it(recipe):
    """Two overflows drain the hysteresis, two clean steps make the window."""
    update, scales = fp16_update(recipe), []
    for fails in (True, True, True, False, False, False, False):
        assert update.gradient_scale.item() == update.scaler.scale.item() * 0.5
        assert float(update.inverse_scale()) == 1 / update.scaler.scale.item()
        if fails:
            overflow(update)
        else:
            leave_gradients(update.shards, 1, update.scaler.scale.item())
        update.apply(LOSS)
        scales.append(update.scaler.scale.item() / 2**10)
    assert scales == [1, 0.5, 0.25, 0.25, 0.5, 0.5, 1]
    assert update.gradient_scale.item() == 2.0**9 and update.state()["updates"] == 4


def test_an_fp16_step_is_that_of_the_gradients_without_the_scale(recipe):
    """The scale is a power of two: all but the smallest numbers of fp16 stay the same."""
    updates = [fp16_update(change(recipe, optimizer={"clip": 0.5}), initial=2.0**k) for k in (0, 8)]
    norms = []
    for update in updates:
        leave_gradients(update.shards, 1, update.scaler.scale.item())
        norms.append(update.apply(LOSS).item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for one, other in zip(*map(state_of, updates), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_restored_update_goes_on_where_it_stopped(recipe):
    update, other = fp16_update(recipe), fp16_update(recipe)
    for step in range(3):
        leave_gradients(update.shards, step, update.scaler.scale.item())
        if step == 1:
            overflow(update)
        update.apply(LOSS)
    state = update.state()
    assert state["updates"] == 2
    other.restore(state)
    assert other.state() == state and other.metrics() == update.metrics()
    assert torch.equal(other.gradient_scale, update.gradient_scale)
    leave_gradients(other.shards, 3, other.scaler.scale.item())
    other.apply(LOSS)
    assert other.lr.item() == pytest.approx(rate_of(2, recipe))


def test_a_state_of_another_precision_is_taken_as_far_as_it_goes(recipe):
    """A run may go on in fp16, whose scale then begins anew, and from fp16 in another precision."""
    half, single = fp16_update(recipe), update_of(recipe)
    half.restore({"updates": 7})
    assert half.state()["updates"] == 7 and half.scaler.scale.item() == 2.0**10
    single.restore(half.state())
    assert single.state() == {"optimizer": "adamw", "updates": 7}


def test_accumulation_is_the_number_of_micro_batches_of_each_replica(recipe):
    def micro_batches(recipe: Recipe, dp: int) -> int:
        return recipe.settings(ResolvedPlan(dp=dp), CPU).micro_batches

    assert micro_batches(recipe, 1) == 2 and micro_batches(recipe, 2) == 1
    assert micro_batches(replace(recipe, micro_batch_size=8), 1) == 1
