"""What no run can be trained with, in one sentence each; a plan is checked by itself (`dtgpt.parallel.plan`)."""

import math
import os
import re
from typing import TYPE_CHECKING, Any

from dtgpt.batch_size import parse_rampup
from dtgpt.data.indexed import bin_path
from dtgpt.data.prepared import is_prepared, no_dataset, prefixes_near
from dtgpt.data.samples import DEFAULT_SPLIT, split_fractions
from dtgpt.errors import UserError, shown
from dtgpt.field_types import check_fields
from dtgpt.ops.attention import check_backend

if TYPE_CHECKING:
    from dtgpt.recipe import Recipe

LARGEST_SCALE = 2.0**64
MOST_STEPS = 10_000_000  # the learning rate of each lies on the device
POSITIVE = (
    "steps", "train_samples", "micro_batch_size", "global_batch_size", "timeout", "optimizer.lr", "optimizer.eps",
    "log.interval", "optimizer.wsd_decay", "log.eval_samples", "loss_scale.initial", "loss_scale.window",
    "loss_scale.hysteresis", "loss_scale.minimum", "optimizer.decay_samples",
)  # fmt: skip
NOT_NEGATIVE = (
    "seed", "optimizer.min_lr", "optimizer.warmup", "optimizer.weight_decay", "optimizer.clip",
    "log.eval_interval", "log.sample_interval", "log.sample_tokens", "log.temperature", "log.top_k",
    "checkpoint.interval", "checkpoint.keep_last", "checkpoint.keep_every", "optimizer.warmup_samples",
)  # fmt: skip
PATHS = (
    "data.path",
    "data.valid_path",
    "data.test_path",
    "data.tokenizer_file",
    "data.vocab_file",
    "data.merge_file",
    "runs",
    "resume",
    "init_from",
)
SHARES = ("data.held_out", "optimizer.beta1", "optimizer.beta2")


def check_recipe(recipe: "Recipe") -> None:
    """Raise UserError, one sentence, on the first value that cannot be trained with."""
    check_fields(recipe)
    recipe.model.validate()
    if (recipe.steps is None) == (recipe.train_samples is None):
        raise UserError(
            f"steps={recipe.steps} and train_samples={recipe.train_samples}: give one of them, which says how long to "
            "train, and the other as none"
        )
    for name in POSITIVE:
        if value_of(recipe, name) is not None and not value_of(recipe, name) > 0:
            raise UserError(f"{name}={value_of(recipe, name)} is not positive; use more than 0")
    for name in NOT_NEGATIVE:
        if value_of(recipe, name) is not None and not value_of(recipe, name) >= 0:
            raise UserError(f"{name}={value_of(recipe, name)} is negative; use 0 or more")
    for name in SHARES:
        if not 0 <= value_of(recipe, name) < 1:
            raise UserError(f"{name}={value_of(recipe, name)} is out of range; use 0 or more and less than 1")
    for name in PATHS:
        if value_of(recipe, name) == "":
            raise UserError(f"{name} is empty; give a path, or leave it out")
    check_name(recipe.name)
    if recipe.exit_after is not None and recipe.exit_after <= 0:
        raise UserError(f"exit_after={recipe.exit_after} is not positive; give minutes, or leave it out")
    if recipe.exit_interval is not None and recipe.exit_interval < 0:
        raise UserError(f"exit_interval={recipe.exit_interval} is negative; give steps, or 0 for no such end")
    if recipe.init_from is not None and recipe.resume not in (None, "auto"):
        raise UserError(
            f"resume={recipe.resume} and init_from={recipe.init_from} are both given; leave one out: a run that goes "
            "on has its weights"
        )
    check_backend(recipe.attention, recipe.model.dropout, recipe.model.hidden_size // recipe.model.num_heads)
    scale = recipe.loss_scale
    if scale.initial > LARGEST_SCALE:
        raise UserError(f"loss_scale.initial={scale.initial} is more than fp32 holds; use 2**32 = 4294967296 or less")
    if scale.minimum < 1 / LARGEST_SCALE:
        raise UserError(f"loss_scale.minimum={scale.minimum} is less than gradients can be divided by; use 1")
    if scale.minimum > scale.initial:
        raise UserError(
            f"loss_scale.minimum={scale.minimum} is above loss_scale.initial={scale.initial}; lower minimum"
        )
    _check_batch(recipe)
    _check_rampup(recipe)
    _check_length(recipe)
    _check_schedule(recipe)
    _check_data(recipe)
    vocab_size, bpe_size = recipe.model.vocab_size, recipe.data.bpe_vocab_size
    if recipe.with_tokenizer().data.tokenizer == "bpe" and bpe_size > vocab_size:
        raise UserError(
            f"data.bpe_vocab_size={bpe_size} is more than model.vocab_size={vocab_size}; "
            f"use --data.bpe_vocab_size {vocab_size} or a larger model.vocab_size"
        )


def check_name(name: str) -> None:
    """Raise UserError where `name` cannot name a run."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
        raise UserError(f"name={shown(name)} cannot name a run; use up to 100 of A-Z, a-z, 0-9, '_' and '-'")


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
    steps = recipe.counted().steps
    if steps < 1:
        raise UserError(
            f"train_samples={recipe.train_samples} does not fill one step; use {recipe.global_batch_size} or more"
        )
    if steps > MOST_STEPS:
        raise UserError(f"steps={steps} is more than a schedule holds; use {MOST_STEPS} or less")


def _check_data(recipe: "Recipe") -> None:
    data = recipe.data
    if (data.vocab_file is None) != (data.merge_file is None):
        raise UserError("data.vocab_file and data.merge_file belong together; give both, or neither")
    if data.vocab_file is not None and data.tokenizer_file is None and recipe.with_tokenizer().data.tokenizer != "gpt2":
        raise UserError("data.vocab_file is of the tokenizer gpt2; add --data.tokenizer gpt2, or leave it out")
    if data.tokenizer_file is not None and data.tokenizer != "auto":
        raise UserError(
            f"data.tokenizer={data.tokenizer} and data.tokenizer_file={data.tokenizer_file} both name a tokenizer; "
            "leave one out"
        )
    if data.tokenizer == "ids" and (data.vocab_file or not is_prepared(data.path)):
        given = f"data.vocab_file={data.vocab_file}" if data.vocab_file else f"data.path={data.path}, a text"
        raise UserError(
            f"data.tokenizer=ids takes token files as they are, which does not go with {given}; leave it out"
        )
    split_fractions(data.split)
    if data.train_samples is not None and data.train_samples < 1:
        raise UserError(f"data.train_samples={data.train_samples} is not positive; use 1 or more, or leave it out")
    if is_prepared(data.path):
        apart = data.valid_path or data.test_path
        if apart is not None and data.split != DEFAULT_SPLIT:
            raise UserError(
                f"data.split={data.split} cuts one dataset into parts, but with {apart} each path is used whole; leave "
                "data.split out"
            )
        return
    given = [n for n in ("valid_path", "test_path", "train_samples", "tokenizer_file") if getattr(data, n) is not None]
    if data.path is not None and not os.path.exists(data.path) and (given or _near(data.path)):
        raise no_dataset(data.path)
    if given:
        raise UserError(
            f"data.{given[0]} is of prepared data, which data.path={data.path} is not; make some with dtgpt prepare, "
            "or leave it out"
        )


def _near(path: str) -> bool:
    """Whether token files are there that `path` may have meant."""
    return bool(prefixes_near(path)) or os.path.isfile(bin_path(path))


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
    if recipe.schedule.end < 1:
        raise UserError(
            f"optimizer.decay_steps={recipe.schedule.end} is not positive; use 1 or more, or none for steps"
        )
    if config.wsd_decay > 1:
        raise UserError(f"optimizer.wsd_decay={config.wsd_decay} is more than the whole schedule; use 1 or less")
    if config.schedule == "constant":  # which has no end
        return
    if config.min_lr > config.lr:
        raise UserError(f"optimizer.min_lr={config.min_lr} is above optimizer.lr={config.lr}; lower min_lr")
    unit, warmup, decay = recipe.schedule.unit, recipe.schedule.warmup, recipe.schedule.end
    given = config.decay_samples or (not recipe.counts_samples and decay != recipe.counted().steps)
    if warmup >= decay and given:
        raise UserError(
            f"the warmup of {warmup} {unit} leaves nothing of the schedule, which ends at {decay} (optimizer.decay_"
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
    """Raise UserError where some of the schedule counts steps and some counts samples."""
    config = recipe.optimizer
    if config.decay_steps is not None and config.decay_samples is not None:
        raise UserError(
            f"optimizer.decay_steps={config.decay_steps} and optimizer.decay_samples={config.decay_samples} both end "
            "the schedule; give one of them, the other as none"
        )
    if config.warmup_samples is not None and not recipe.counts_samples:
        raise UserError(
            f"optimizer.warmup_samples={config.warmup_samples} counts samples, but the schedule counts steps; give "
            "optimizer.decay_samples, or optimizer.warmup in place of it"
        )
    if recipe.counts_samples and config.warmup_samples is None and config.warmup >= 1:
        raise UserError(
            f"optimizer.warmup={config.warmup:g} counts steps, but the schedule counts samples; give "
            "optimizer.warmup_samples, or a fraction below 1"
        )


def notes(recipe: "Recipe", dp: int, device_type: str) -> list[str]:
    """What a user should know of a valid recipe, with `dp` replicas on this kind of device."""
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
        found.append(
            f"attention={recipe.attention} has no kernel for a CPU: its reference in plain PyTorch computes the same"
        )
    return found


def one_replica(level: int) -> str:
    return f"ZeRO-{level} cuts over replicas, and there is one: the plan is the same as without it"


def value_of(config: Any, name: str) -> Any:
    """The value of a dotted field name: `value_of(recipe, "optimizer.lr")`."""
    for part in name.split("."):
        config = getattr(config, part)
    return config
