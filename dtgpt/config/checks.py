"""Rules that concern several fields of a recipe. Bounds of a single field stand beside the field; a plan is checked in
`dtgpt.config.plan`."""

import math
from typing import TYPE_CHECKING, Any

from dtgpt.config.batch_size import parse_rampup
from dtgpt.ops.attention.core import check_backend
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import check_fields

if TYPE_CHECKING:
    from dtgpt.config.recipe import Recipe

MOST_STEPS = 10_000_000  # the learning rate of each is held on the device


def check_recipe(recipe: "Recipe") -> None:
    """Raise UserError, one sentence, for the first value, or combination of values, that cannot be trained with."""
    check_fields(recipe)
    recipe.model.validate()
    if (recipe.steps is None) == (recipe.train_samples is None):
        raise UserError(
            f"steps={recipe.steps} and train_samples={recipe.train_samples}: exactly one of them says how long to "
            "train; set the other to none"
        )
    if recipe.init_from is not None and recipe.resume not in (None, "auto"):
        raise UserError(
            f"resume={recipe.resume} and init_from={recipe.init_from} are both given; leave one out: a resumed run "
            "has weights already"
        )
    check_backend(recipe.attention, recipe.model.dropout, recipe.model.hidden_size // recipe.model.num_heads)
    scale = recipe.loss_scale
    if scale.minimum > scale.initial:
        raise UserError(
            f"loss_scale.minimum={scale.minimum} is above loss_scale.initial={scale.initial}; lower minimum"
        )
    _check_batch(recipe)
    _check_rampup(recipe)
    _check_length(recipe)
    _check_schedule(recipe)


def _check_rampup(recipe: "Recipe") -> None:
    if recipe.rampup_batch_size is None:
        return
    start, increment, samples = parse_rampup(recipe.rampup_batch_size)
    whole = recipe.global_batch_size
    if not 0 < start < whole or increment < 1 or (whole - start) % increment or samples < 0:
        raise UserError(
            f"rampup_batch_size={shown(recipe.rampup_batch_size)} does not lead to global_batch_size={whole}; START "
            "must be below it, and INCREMENT divide the difference, as in '32 32 100000' for 256"
        )
    if 2 * samples // (start + whole) > MOST_STEPS:
        raise UserError(
            f"rampup_batch_size={shown(recipe.rampup_batch_size)} takes more than {MOST_STEPS} steps to reach "
            f"global_batch_size={whole}; use fewer SAMPLES"
        )


def _check_length(recipe: "Recipe") -> None:
    if recipe.train_samples is None:
        return
    steps = recipe.counted().steps
    if not steps:
        raise UserError(
            f"train_samples={recipe.train_samples} does not fill one step; use {recipe.global_batch_size} or more"
        )
    if steps > MOST_STEPS:
        raise UserError(
            f"train_samples={recipe.train_samples} takes {steps} steps; use fewer samples or a larger "
            f"global_batch_size, for at most {MOST_STEPS} steps"
        )


def _check_batch(recipe: "Recipe") -> None:
    micro, whole = recipe.micro_batch_size, recipe.global_batch_size
    if whole % micro:
        raise UserError(
            f"global_batch_size={whole} is not a multiple of micro_batch_size={micro}; "
            f"use --global_batch_size {whole // micro * micro or micro} or a micro_batch_size that divides it"
        )


def _check_schedule(recipe: "Recipe") -> None:
    config = recipe.optimizer
    _check_units(recipe)
    if config.schedule == "constant":  # which has no end
        return
    if config.min_lr > config.lr:
        raise UserError(f"optimizer.min_lr={config.min_lr} is above optimizer.lr={config.lr}; lower min_lr")
    unit, warmup, decay = recipe.schedule.unit, recipe.schedule.warmup, recipe.schedule.end
    given = config.decay_samples or (not recipe.counts_samples and decay != recipe.counted().steps)
    if warmup >= decay and given:
        raise UserError(
            f"the warmup of {warmup} {unit} is not shorter than the schedule, which ends at {decay} (optimizer.decay_"
            f"{unit}), so the learning rate would jump; warm up for fewer than {decay}, or raise decay_{unit}"
        )
    begin = decay - config.wsd_decay * decay
    if config.schedule == "wsd" and begin < warmup < decay:
        largest = math.floor(100 * (1 - warmup / decay)) / 100
        raise UserError(
            f"the warmup of {warmup} {unit} ends inside the decay of wsd, which begins at {begin:g} of {decay} "
            f"(optimizer.wsd_decay={config.wsd_decay}), so the learning rate would jump; warm up for "
            f"{math.floor(begin)} or fewer"
            + (f", or use --optimizer.wsd_decay {largest:g} or less" if largest > 0 else "")
        )


def _check_units(recipe: "Recipe") -> None:
    """Raise UserError if one part of the schedule counts steps and another counts samples."""
    config = recipe.optimizer
    if config.decay_steps is not None and config.decay_samples is not None:
        raise UserError(
            f"optimizer.decay_steps={config.decay_steps} and optimizer.decay_samples={config.decay_samples} both end "
            "the schedule; set one of them to none"
        )
    if config.warmup_samples is not None and not recipe.counts_samples:
        raise UserError(
            f"optimizer.warmup_samples={config.warmup_samples} counts samples, but the schedule counts steps; add "
            "optimizer.decay_samples, or use optimizer.warmup instead"
        )
    if recipe.counts_samples and config.warmup_samples is None and config.warmup >= 1:
        raise UserError(
            f"optimizer.warmup={config.warmup:g} counts steps, but the schedule counts samples; use "
            "optimizer.warmup_samples, or a fraction below 1"
        )


def notes(recipe: "Recipe", dp: int, device_type: str) -> list[str]:
    """Return what a user should know about a valid recipe, with `dp` replicas on this kind of device."""
    found, schedule, counted = [], recipe.schedule, recipe.counted()
    length = recipe.train_samples if recipe.train_samples is not None else counted.steps
    if recipe.counts_samples and recipe.train_samples is None:
        length = recipe.batch_sizes().before(counted.steps)
    if schedule.warmup > length:
        found.append(
            f"the run ends within its warmup: {length} of {schedule.warmup} {schedule.unit}, so the learning rate "
            f"never reaches optimizer.lr={recipe.optimizer.lr:g}"
        )
    if (level := recipe.named_plan().zero) and dp == 1:
        found.append(one_replica(level))
    if recipe.attention in ("flash", "fused_softmax") and device_type == "cpu":
        found.append(f"attention={recipe.attention} has no CPU kernel: the reference implementation runs instead")
    return found


def one_replica(level: int) -> str:
    """Return the note on a plan whose ZeRO has nothing to shard over."""
    return f"ZeRO-{level} shards over replicas, and there is only one: the plan is the same as without it"


def value_of(config: Any, name: str) -> Any:
    """Return the value of a field by its dotted name: `value_of(recipe, "optimizer.lr")`."""
    for part in name.split("."):
        config = getattr(config, part)
    return config
