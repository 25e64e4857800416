"""Rules that concern several fields of a recipe, for `Recipe.validate`: each raises UserError, one sentence, if the
values cannot be trained with. Bounds of a single field stand beside the field; a plan is checked in
`dtgpt.config.plan`."""

import math
from collections.abc import Collection
from dataclasses import Field, asdict, fields
from typing import Any

from dtgpt.config.schedule import Schedule, parse_rampup
from dtgpt.config.sections import LogConfig, LossScaleConfig, OptimizerConfig
from dtgpt.models.config import ModelConfig
from dtgpt.util.console import duration, parameters
from dtgpt.util.errors import UserError, shown

LARGE_FOR_A_CPU = 50_000_000  # parameters
CPU_FLOPS = 1e11  # a second, of which a CPU of some cores is capable in fp32
MOST_STEPS = 10_000_000  # the learning rate of each is held on the device


def changed(values: Any) -> list[tuple[Field, Any]]:
    """Return the fields of a section, a dataclass, that do not have their default, and their values."""
    return [(each, value) for each in fields(values) if (value := getattr(values, each.name)) != each.default]


def check_unused(section: str, values: Any, switch: str, example: float) -> None:
    """Check that a section which the field `switch` turns off has no value that would be ignored. values: the section,
    a dataclass; example: a value with which it is on."""
    for field, value in changed(values):
        if field.name != switch:
            raise UserError(
                f"{section}.{field.name}={value} has no effect with {section}.{switch}=0; give --{section}.{switch}, "
                f"such as {example}, or --{section}.{field.name} {field.default}, its default"
            )


def without_effect(
    optimizer: OptimizerConfig, loss_scale: LossScaleConfig, log: LogConfig, precision: str
) -> list[str]:
    """Return a sentence for each value, other than its default, that other values leave without effect."""
    unused: list[tuple[str, Any, Collection[str], str]] = []
    if optimizer.schedule != "wsd":
        unused.append(("optimizer", optimizer, ("wsd_decay",), f"with optimizer.schedule={optimizer.schedule}"))
    if precision != "fp16":
        unused.append(("loss_scale", loss_scale, asdict(loss_scale), f"with precision={precision}: only fp16 has one"))
    if log.sample_tokens == 0:
        names = "prompt", "temperature", "top_k", "sample_interval"
        unused.append(("log", log, names, "with log.sample_tokens=0"))
    if log.eval_tasks is None:
        unused.append(("log", log, ("eval_tasks_interval", "eval_tasks_limit"), "without log.eval_tasks"))
    return [
        f"{section}.{field.name}={value} has no effect {why}"
        for section, values, names, why in unused
        for field, value in changed(values)
        if field.name in names
    ]


def check_batch(micro: int, whole: int) -> None:
    if whole % micro:
        raise UserError(
            f"global_batch_size={whole} is not a multiple of micro_batch_size={micro}; "
            f"use --global_batch_size {whole // micro * micro or micro} or a micro_batch_size that divides it"
        )


def check_recompute(recompute: str, blocks: int | None) -> None:
    if blocks is not None and recompute == "none":
        raise UserError(
            f"recompute_blocks={blocks}, but recompute=none computes nothing again; use --recompute full or "
            "around_attention, or leave recompute_blocks out"
        )


def check_recompute_apart(recompute: str, blocks: int | None, schedule: str) -> None:
    """Check what is computed again under a schedule that computes gradients of weights apart."""
    if blocks is not None:
        raise UserError(
            f"recompute_blocks={blocks}, but the schedule {schedule} recomputes all blocks or none; leave it out or "
            "use another schedule"
        )
    if recompute == "around_attention":
        raise UserError(
            f"recompute=around_attention, but the schedule {schedule} computes a block again several times, and what "
            "attention gave is kept for one; use --recompute full or another schedule"
        )


def check_recompute_kept(backend: str | None) -> None:
    """Check that attention keeps little beside its output. backend: one that keeps scores, if there is any."""
    if backend is not None:
        raise UserError(
            f"recompute=around_attention, but attention is {backend} here, which keeps scores for backward beside its "
            "output; use --attention flash, or sdpa without dropout, or --recompute full"
        )


def check_rampup_end(rampup: str, whole: int) -> None:
    start, increment, samples = parse_rampup(rampup)
    if not 0 < start < whole or increment < 1 or (whole - start) % increment or samples < 0:
        raise UserError(
            f"rampup_batch_size={shown(rampup)} does not lead to global_batch_size={whole}; START must be below it, "
            "and INCREMENT divide the difference, as in '32 32 100000' for 256"
        )
    if 2 * samples // (start + whole) > MOST_STEPS:
        raise UserError(
            f"rampup_batch_size={shown(rampup)} takes more than {MOST_STEPS} steps to reach global_batch_size={whole}; "
            "use fewer SAMPLES"
        )


def check_length(train_samples: int, steps: int, whole: int) -> None:
    """steps: how many of `whole` samples `train_samples` fill."""
    if not steps:
        raise UserError(f"train_samples={train_samples} does not fill one step; use {whole} or more")
    if steps > MOST_STEPS:
        raise UserError(
            f"train_samples={train_samples} takes {steps} steps; use fewer samples or a larger global_batch_size, for "
            f"at most {MOST_STEPS} steps"
        )


def check_units(config: OptimizerConfig, counts_samples: bool) -> None:
    """Check that no part of the schedule counts steps while another counts samples."""
    if config.decay_steps is not None and config.decay_samples is not None:
        raise UserError(
            f"optimizer.decay_steps={config.decay_steps} and optimizer.decay_samples={config.decay_samples} both end "
            "the schedule; set one of them to none"
        )
    if config.warmup_samples is not None and not counts_samples:
        raise UserError(
            f"optimizer.warmup_samples={config.warmup_samples} counts samples, but the schedule counts steps; add "
            "optimizer.decay_samples, or use optimizer.warmup instead"
        )
    if counts_samples and config.warmup_samples is None and config.warmup >= 1:
        raise UserError(
            f"optimizer.warmup={config.warmup:g} counts steps, but the schedule counts samples; use "
            "optimizer.warmup_samples, or a fraction below 1"
        )


def check_schedule(schedule: Schedule, ends_with_run: bool) -> None:
    """ends_with_run: whether the warmup may be as long as the schedule, since the run ends with both."""
    if schedule.shape == "constant":  # which has no end
        return
    if schedule.min_lr > schedule.lr:
        raise UserError(
            f"optimizer.min_lr={schedule.min_lr} is above optimizer.lr={schedule.lr}; give a "
            f"lower --optimizer.min_lr, such as {schedule.lr / 10:.3g} (a tenth of lr is usual), or a higher lr"
        )
    unit, warmup, decay = schedule.unit, schedule.warmup, schedule.end
    if warmup >= decay and not ends_with_run:
        raise UserError(
            f"the warmup of {warmup} {unit} is not shorter than the schedule, which ends at {decay} (optimizer.decay_"
            f"{unit}), so the learning rate would jump; warm up for fewer than {decay}, or raise decay_{unit}"
        )
    begin = decay - schedule.wsd_decay * decay
    if schedule.shape == "wsd" and begin < warmup < decay:
        raise UserError(
            f"the warmup of {warmup} {unit} ends inside the decay of wsd, which begins at {begin:g} of {decay} "
            f"(optimizer.wsd_decay={schedule.wsd_decay}), so the learning rate would jump; warm up for "
            f"{math.floor(begin)} or fewer, or lower optimizer.wsd_decay"
        )


def one_replica(level: int) -> str:
    """Return the note on a plan whose ZeRO has nothing to shard over."""
    return f"ZeRO-{level} shards over replicas, and there is only one: the plan is the same as without it"


def check_sample_length(seq_length: int, model: ModelConfig) -> None:
    """Raise UserError where a training sample has more tokens than the model has positions."""
    if seq_length > model.seq_length:
        raise UserError(
            f"seq_length={seq_length} is more than the model's positions, model.seq_length={model.seq_length}; use "
            f"--seq_length {model.seq_length} or less, or a larger --model.seq_length"
        )


def large_for_a_cpu(model: ModelConfig, global_batch_size: int, seq_length: int) -> str | None:
    """Return a caution where a model is so large that a CPU takes minutes for a step."""
    if model.num_parameters < LARGE_FOR_A_CPU:
        return None
    tokens = global_batch_size * seq_length
    time = duration(model.flops_per_token(seq_length) * tokens / CPU_FLOPS)
    return (
        f"a model of {parameters(model.num_parameters)} on a CPU: a step of {tokens:,} tokens takes about {time} at "
        "0.1 TFLOP/s; use a GPU, or a small model such as recipes/gpt2_tiny.py"
    )
