"""The smallest case that still fails: parts of the plan, options and sizes are taken away one after the other."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dtgpt.compare.fuzz.case import MODELS, Case, First
from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.rotary import RotaryConfig

PLAINEST: dict[str, Any] = {
    "precision": "fp32",
    "rampup_batch_size": None,
    "model.dropout": 0.0,
    "recompute_blocks": None,
    "recompute": "none",
    "attention": "explicit",
    "data.reset_position_ids": False,
    "data.reset_attention_mask": False,
    "data.eod_mask_loss": False,
    "graph": "off",
    "model.qk_norm": False,
    "model.rope_factor": 1.0,
    "model.window": 0,
    "model.attention_bias": "none",
    "model.tied": False,
    "optimizer.clip": 0.0,
    "optimizer.lr": 1e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup": 0.0,
    "optimizer.min_lr": 0.0,
    "optimizer.decay_samples": None,
    "log.eval_interval": 0,
    "log.sample_interval": 0,
    "log.sample_tokens": 0,
    "checkpoint.background": False,
    "model.vocab_size": 257,
    "log.eval_samples": 1,
    "steps": 1,
    "micro_batch_size": 1,
}
SIZES = ("model.num_layers", "global_batch_size", "model.seq_length", "model.ffn_hidden_size", "steps")
WIDTHS = {
    False: ("model.num_heads", "model.hidden_size"),
    True: ("model.num_kv_heads", "model.num_heads"),
}  # if grouped


def shrink(case: Case, fails: Callable[[Case], bool], tries: int) -> Case:
    """Return the smallest case found that `fails`, in at most `tries` calls."""
    seen, left = {str(case)}, tries
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(case):
            if left == 0:
                return case
            if str(candidate) in seen:
                continue
            seen.add(str(candidate))
            left -= 1
            if fails(candidate):
                case, smaller = candidate, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Yield cases that are a step smaller, the largest steps first. Not all of them can be run."""
    plain = {name: PLAINEST[name] for name in case.values if name in PLAINEST}
    if "train_samples" in case.values:
        plain["train_samples"] = None
    if case.prepared:
        values = {name: value for name, value in case.values.items() if name != "data.train_samples"}
        yield replace(case, prepared=False, values=values)
    if case.first:
        yield replace(case, first=None)
        yield replace(case, first=None, plan=case.first.plan, blocks_per_stage=None, table=None)
        plain["steps"] = 2
        yield replace(case, values={**case.values, **plain}, first=case.first._replace(steps=1))
    else:
        yield replace(case, values={**case.values, **plain})
    yield from _plans(case)
    if case.first:
        yield from _firsts(case, case.first)
    if case.optimizer != OptimizerConfig.kind:
        yield replace(case, optimizer=OptimizerConfig.kind)
    if case.table:
        yield replace(case, table=None)
    if case.blocks_per_stage:
        yield replace(case, blocks_per_stage=None)
    if plain.pop("train_samples", 0) is None:
        yield replace(case, values={**case.values, "steps": 5, "train_samples": None})
    for name, value in plain.items():
        if case.values[name] != value:
            yield replace(case, values={**case.values, name: value})
    yield from _sizes(case)


def _firsts(case: Case, first: First) -> Iterator[Case]:
    """Yield cases whose first plan, or the number of its steps, is smaller."""
    for values in _smaller(parse_plan(first.plan)):
        yield replace(case, first=first._replace(plan=replace(parse_plan(first.plan), **values).name))
    if first.batch is not None:
        yield replace(case, first=first._replace(batch=None))
    if first.steps > 1:
        yield replace(case, first=first._replace(steps=1))


def _smaller(plan: Plan) -> list[dict[str, Any]]:
    """Return what makes a plan smaller, the largest steps first."""
    dp = plan.dp or 1
    smaller: list[dict[str, Any]] = [{"pp": n, "schedule": "1F1B", "stages_per_rank": None} for n in range(1, plan.pp)]
    smaller += [{"tp": n} if n > 1 else {"tp": 1, "sequence_parallel": False} for n in range(1, plan.tp)]
    smaller += [{"cp": n} for n in range(1, plan.cp)] + [{"ep": n} for n in range(1, plan.ep)]
    smaller += [{"dp": n} if n > 1 or plan.cp > 1 else {"dp": 1, "zero": 0} for n in range(1, dp)]
    smaller += [{"zero": n} for n in range(plan.zero)]
    smaller += [{"sequence_parallel": False}] * plan.sequence_parallel
    if plan.pp > 1:
        smaller += [{"schedule": s, "stages_per_rank": None} for s in ("GPipe", "1F1B") if s != plan.schedule]
        smaller += [{"pp": n} for n in range(2, plan.pp)]
    return smaller


def _plans(case: Case) -> Iterator[Case]:
    plan = parse_plan(case.plan)
    dp = plan.dp or 1
    for values in _smaller(plan):
        changed: Plan = replace(plan, **values)
        table = case.table if changed.tp > 1 else None
        yield replace(case, plan=changed.name, blocks_per_stage=None, table=table)
        if (changed.dp or 1) < dp:
            samples = case.values["global_batch_size"] * (changed.dp or 1) // dp
            batch = {"global_batch_size": max(1, samples), "rampup_batch_size": None}
            yield replace(case, plan=changed.name, blocks_per_stage=None, table=table, values={**case.values, **batch})


def _sizes(case: Case) -> Iterator[Case]:
    values = case.values
    for name in SIZES:
        for smaller in _below(values.get(name) or 1):
            yield replace(case, values={**values, name: smaller}, blocks_per_stage=None)
    grouped = isinstance(MODELS[case.architecture], RotaryConfig)
    first, second = WIDTHS[grouped]
    heads, wide = values.get(first, 1), values.get(second, 1)
    for fewer in _below(heads):
        yield replace(case, values={**values, first: fewer, second: wide // heads * fewer})
    for ratio in _below(wide // heads):
        yield replace(case, values={**values, second: heads * ratio})
    if grouped:
        for smaller in _below(values.get("model.hidden_size", 1)):
            yield replace(case, values={**values, "model.hidden_size": smaller})
        for smaller in _below(values.get("model.head_dim", 2)):
            yield replace(case, values={**values, "model.head_dim": smaller})


def _below(size: int) -> list[int]:
    """Return sizes to try in place of `size`: half of it, and one less."""
    return sorted({size // 2, size - 1} - {0, size}) if size > 1 else []
