"""Which models, plans and options the cases have. A few are drawn without regard to what fits together, so that the
rules that refuse them are tried as well."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dtgpt.compare.fuzz.case import MODELS, TABLES, Case, First
from dtgpt.config.plan import SCHEDULES, Plan, divisors
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.rampup.sizes import RampedSizes
from dtgpt.config.recipe_file import kinds
from dtgpt.config.schedule import BatchSizes
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.inventory import inventory
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.rotary import RotaryConfig, WindowConfig
from dtgpt.ops.attention.core import Backend, unknown_to
from dtgpt.ops.random.philox import fold_words
from dtgpt.util.rules import broken

NARROWEST = 9  # a norm of fewer numbers multiplies rounding
LONG = 130  # tokens
WIDE = 120
OVERFLOWS = 2.0**19
FIRST_VOCABULARY = 257  # bytes and the end of text
Choice = TypeVar("Choice")


class Draws:
    """The random decisions of case `index`, by name. Each is a function of (seed, index, name) alone, so that neither
    the number of cases nor a decision that is added later changes another one. part: what some names begin with."""

    def __init__(self, seed: int, index: int, part: str = ""):
        self.seed, self.index, self.part = seed, index, part

    def below(self, name: str, count: int) -> int:
        """Return a whole number in [0, count)."""
        return fold_words(self.seed, "random case", self.index, self.part + name)[0] * count >> 32

    def between(self, name: str, first: int, last: int) -> int:
        """Return a whole number in [first, last]."""
        return first + self.below(name, last - first + 1)

    def pick(self, name: str, choices: Sequence[Choice]) -> Choice:
        return choices[self.below(name, len(choices))]

    def chance(self, name: str, one_in: int) -> bool:
        """Return True in one of `one_in` cases."""
        return self.below(name, one_in) == 0


def draw_case(seed: int, index: int, ranks: int, plans: Sequence[str] = ()) -> Case:
    """Return case `index`: a function of the arguments alone. ranks: the most processes of a plan; plans: names of
    plans to choose from, none: all that dtgpt has."""
    draws = Draws(seed, index)
    careless = draws.chance("careless", 12)
    plan, both = _plan(draws, ranks, plans), []
    if draws.chance("two plans", 4):
        both = [_plan(Draws(seed, index, "first "), ranks, plans)]
    both.append(plan)
    fitting = [name for name, model in MODELS.items() if careless or _takes(model, both)]
    if not fitting:  # none whose experts could be spread under the rest of the plans
        both = [replace(each, ep=1) for each in both]
        plan = both[-1]
        fitting = [name for name, model in MODELS.items() if _takes(model, both)]
    architecture = draws.pick("architecture", fitting)
    stages = max(each.num_stages for each in both)
    layers = draws.between("layers", 1, 4) if careless else stages + draws.below("more layers", 3)
    model = _model(draws, architecture, both, careless)
    values = {"model.num_layers": layers, **model, **_batch(draws, both, careless)}
    values |= _training(draws, MODELS[architecture], careless)
    if values["recompute"] != "none" and not any(each.splits_backward for each in both):
        if values["attention"] in ("flash", "sdpa") and draws.chance("around attention", 2):
            values["recompute"] = "around_attention"
        values["recompute_blocks"] = draws.pick("blocks that are computed again", (None, None, 1, 2))
    values |= _length(draws, values)
    prepared = draws.chance("token files", 4)
    if prepared:
        values["data.train_samples"] = draws.pick("samples of an epoch", (13, 40, 200))
    first = _first(draws, both, values) if both[1:] else None
    if first:
        values["checkpoint.background"] = draws.chance("saves behind the steps", 2)
    cut = _cut(draws, layers, plan.num_stages) if plan.pp > 1 and layers >= plan.num_stages else None
    table = None
    if plan.tp > 1 and (careless or not any(p.sequence_parallel for p in both)) and draws.chance("own table", 2):
        tables = [name for name in TABLES if name.startswith("qkv")] if _has_experts(architecture, values) else TABLES
        table = draws.pick("table", tables)
    optimizer = draws.pick("optimizer", [OptimizerConfig.kind] * 2 + list(kinds()))
    return Case(architecture, plan.name, values, cut, table, first, prepared, optimizer)


def _has_experts(architecture: str, values: dict[str, Any]) -> bool:
    """Return whether blocks have experts, whose matrices no table of a plan cuts."""
    blank = MODELS[architecture]
    if not isinstance(blank, ExpertsConfig):
        return False
    return replace(blank, num_experts=values.get("model.num_experts", blank.num_experts)).has_experts(0)


def _takes(model: ModelConfig, plans: Sequence[Plan]) -> bool:
    """Return whether a model of this class can have the plans."""
    spread = math.lcm(*(plan.ep for plan in plans))
    if spread > 1:
        if not isinstance(model, ExpertsConfig):
            return False
        model = replace(model, num_experts=spread)
    return not any(list(broken(model.plan_rules, model, plan=plan)) for plan in plans)


def _plan(draws: Draws, ranks: int, plans: Sequence[str]) -> Plan:
    plan = parse_plan(draws.pick("plan", plans)) if plans else draw_plan(draws, ranks)
    if plan.dp is None and plan.cp * plan.tp * plan.pp == 1:  # `dp` or `zero3`: as many replicas as processes
        return replace(plan, dp=draws.between("replicas", 2, max(2, ranks)))
    return plan


def _first(draws: Draws, plans: Sequence[Plan], values: dict[str, Any]) -> First | None:
    """Return how many steps the first of two plans takes: not all. In some cases their batch size is another one."""
    whole, ramp = values["global_batch_size"], values.get("rampup_batch_size")
    steps = values["steps"] or sizes_of(whole, ramp).steps_within(values["train_samples"])
    if steps < 2:
        return None
    batch = None
    if values["steps"] and not ramp and draws.chance("another batch size", 2):
        sizes = _batch_sizes(plans, values["micro_batch_size"])
        batch = draws.pick("first batch size", [size for size in sizes if size != whole])
    return First(plans[0].name, draws.between("steps of the first plan", 1, steps - 1), batch)


def draw_plan(draws: Draws, ranks: int) -> Plan:
    """Return a plan of 2 to `ranks` processes; now and then one process, for what else a case has."""
    sizes = range(1, ranks + 1)
    degrees = [(dp, tp, pp) for dp in sizes for tp in sizes for pp in sizes if 2 <= dp * tp * pp <= ranks]
    if not degrees or draws.chance("one process", 25):
        return Plan(dp=1)
    dp, tp, pp = draws.pick("degrees", degrees)
    cp = 1
    if dp > 1 and draws.chance("context parallel", 2):  # these replicas share their samples, or some of them do
        cp = draws.pick("slices", [n for n in divisors(dp) if n > 1])
    ep = 1
    if dp > 1 and draws.chance("expert parallel", 4):
        ep = draws.pick("ranks of different experts", [n for n in divisors(dp) if n > 1])
    zero = draws.pick("zero", (0, 0, 1, 2, 3)) if dp > 1 else 0
    sequence = tp > 1 and draws.chance("sequence parallel", 2)
    options: dict[str, Any] = {}
    if pp > 1:
        word = draws.pick("schedule", list(SCHEDULES))
        stages = draws.pick("stages per rank", (2, 2, 3)) if word == "interleaved" else None
        options = {"schedule": SCHEDULES[word], "stages_per_rank": stages}
    return Plan(dp=dp // cp, cp=cp, ep=ep, tp=tp, pp=pp, zero=zero, sequence_parallel=sequence, **options)


def _model(draws: Draws, architecture: str, plans: Sequence[Plan], careless: bool) -> dict[str, Any]:
    heads = draws.chance("heads for each context rank", 2)  # else ranks have the same heads, and other queries
    tp = 1 if careless else math.lcm(*(plan.tp * (plan.cp if heads else 1) for plan in plans))
    halves = [1 if heads or p.cp == 1 else 2 * p.cp for p in plans]
    multiple = 1 if careless else math.lcm(*halves, *(p.cp * (p.tp if p.sequence_parallel else 1) for p in plans))
    length = draws.between("length", 1, 27) if multiple == 1 else multiple * draws.between("length of a rank", 1, 8)
    if draws.chance("long", 10):  # more than one tile of a kernel
        length = multiple * (LONG // multiple + draws.below("more tokens", 90))
    vocabulary, width = FIRST_VOCABULARY + draws.below("vocabulary", 270), 0
    if draws.chance("wide", 8):  # so that the table is large, see `Shard.own`
        length, vocabulary, width = multiple * max(1, 16 // multiple), vocabulary + FIRST_VOCABULARY, WIDE
    blank = MODELS[architecture]
    sizes = _grouped(draws, tp, width) if isinstance(blank, RotaryConfig) else _gpt2(draws, tp, width)
    if isinstance(blank, LlamaConfig):
        sizes["qk_norm"] = draws.chance("norms of heads", 2)
        sizes["attention_bias"] = draws.pick("biases of attention", ("none", "none", "qkv", "all"))
    if isinstance(blank, WindowConfig):
        sizes["window"] = draws.pick("window", (0, 1, 3, 5, 11))
        sizes["window_pattern"] = draws.pick("blocks with a window", ("L", "LG", "GL", "LLG"))
    if isinstance(blank, ExpertsConfig) and (careless or _takes(replace(blank, num_experts=2), plans)):
        spread = math.lcm(*(plan.ep for plan in plans))
        sizes["num_experts"] = spread * draws.between("experts", 1, 7 if spread == 1 else 3)
        sizes["experts_per_token"] = draws.between("experts of a token", 1, min(4, sizes["num_experts"]))
    if isinstance(blank, OlmoeConfig):
        sizes["normalise_weights"] = draws.chance("weights that add up to 1", 2)
        sizes["clip_qkv"] = draws.pick("limit of queries", (0.0, 0.0, 0.5))
    sizes |= {
        "seq_length": length,
        "vocab_size": vocabulary,
        "dropout": draws.pick("dropout", (0.0, 0.1, 0.25, 0.5)),
        "init_std": draws.pick("initial weights", (0.02, 0.05, 0.1)),
    }
    return {f"model.{name}": value for name, value in sizes.items()}


def _gpt2(draws: Draws, tp: int, least: int) -> dict[str, Any]:
    """Return the widths of a model; least: that of its activations."""
    heads = tp * draws.between("heads of a rank", 1, 3 if tp <= 4 else 1)
    size = draws.pick("size of a head", (3, 4, 5, 7, 8, 11, 16))
    while heads * size < max(least, NARROWEST):
        size += 3
    return {"num_heads": heads, "hidden_size": heads * size}


def _grouped(draws: Draws, tp: int, least: int) -> dict[str, Any]:
    """Return the widths of a model; least: that of its activations."""
    groups = tp * draws.between("groups of a rank", 1, 2 if tp <= 4 else 1)
    sizes: dict[str, Any] = {
        "num_kv_heads": groups,
        "num_heads": groups * draws.between("queries of a group", 1, 3),
        "head_dim": draws.pick("size of a head", (2, 4, 6, 10, 14, 16)),
        "hidden_size": least + draws.between("width", 9, 47),
        "ffn_hidden_size": tp * draws.between("width of a rank's MLP", 3, 30),
        "tied": draws.chance("tied", 2),
        "activation": draws.pick("activation", ("silu", "silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu")),
        "norm_eps": draws.pick("epsilon", (1e-5, 1e-6)),
        "rope_theta": draws.pick("theta", (100.0, 10000.0, 500000.0)),
    }
    if draws.chance("scaled positions", 2):
        sizes["rope_scaling"] = draws.pick("rule of the scaling", ("llama3", "llama3", "linear", "yarn"))
        sizes["rope_factor"] = draws.pick("factor", (2.0, 8.0))
        sizes["rope_original_length"] = draws.pick("original length", (4, 16, 64))
    return sizes


def _batch(draws: Draws, plans: Sequence[Plan], careless: bool) -> dict[str, Any]:
    micro = draws.pick("micro-batch", (1, 1, 2, 3))
    if careless:
        return {"micro_batch_size": micro, "global_batch_size": draws.between("batch", 1, 12)}
    sizes = _batch_sizes(plans, micro)
    values: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": draws.pick("micro-batches", sizes)}
    if draws.chance("ramp", 6):
        start, more = sizes[0], draws.between("sizes of the ramp", 1, 2)
        values["global_batch_size"] = start * (more + 1)
        values["rampup_batch_size"] = f"{start},{start},{start * more * draws.between('length of the ramp', 1, 2)}"
    return values


def sizes_of(whole: int, rampup: str | None) -> BatchSizes:
    """Return the batch sizes of a run from its beginning, as a recipe of these values has them."""
    return BatchSizes(whole) if rampup is None else RampedSizes(rampup, whole)


def _batch_sizes(plans: Sequence[Plan], micro: int) -> list[int]:
    """Return the three smallest batch sizes that all plans can split."""
    least = micro * math.lcm(*(plan.dp or 1 for plan in plans))
    multiples = (least * count for count in range(1, 99))
    return [size for size in multiples if all(_runs(plan, size // micro // (plan.dp or 1)) for plan in plans)][:3]


def _runs(plan: Plan, count: int) -> bool:
    """Return whether the schedule of a plan can run `count` micro-batches, and all multiples of them."""
    if plan.pp == 1 or plan.schedule in ("GPipe", "ZBVZeroBubble"):
        return True
    return count >= plan.pp if plan.schedule == "1F1B" else count % plan.pp == 0


def _length(draws: Draws, values: dict[str, Any]) -> dict[str, Any]:
    """Return the length of the run, in some cases by its samples."""
    steps = draws.between("steps", 2, 5)
    if values.get("loss_scale.initial", 0) >= OVERFLOWS:
        steps += 4  # of which some are not skipped
    whole = values["global_batch_size"]
    samples = sizes_of(whole, values.get("rampup_batch_size")).before(steps) + draws.below("samples left", whole)
    if draws.chance("counts samples", 6):
        return {"steps": None, "train_samples": samples}
    if draws.chance("rates by samples", 4):
        return {"steps": steps, "optimizer.decay_samples": samples}
    return {"steps": steps}


def _training(draws: Draws, blank: ModelConfig, careless: bool) -> dict[str, Any]:
    back_ends: list[Backend] = ["auto", "explicit", "fused_softmax", "flash"]
    if careless or draws.pick("dropout", (0.0, 0.1, 0.25, 0.5)) == 0:
        back_ends.append("sdpa")
    if not careless:
        cores = inventory(blank).kinds_of_cores()
        back_ends = [b for b in back_ends if not any(unknown_to(b, core.softcap, core.sinks) for core in cores)]
    precision = draws.pick("precision", ("fp32",) * 9 + ("bf16", "fp16", "fp8"))
    values = {
        "seed": draws.below("seed of the run", 1 << 20),
        "precision": precision,
        "attention": draws.pick("attention", back_ends),
        "recompute": draws.pick("recompute", ("none", "none", "selective", "full")),
        "graph": draws.pick("graph", ("auto", "off")),
        "optimizer.lr": draws.pick("learning rate", (1e-3, 3e-3, 1e-2)),
        # With the usual 1e-8, a gradient that is rounding alone makes whole steps, by its sign.
        "optimizer.eps": draws.pick("smallest root", (1e-3, 1e-2)),
        "optimizer.schedule": draws.pick("learning rates", ("cosine", "linear", "constant", "wsd")),
        "optimizer.warmup": draws.pick("warmup", (0.0, 0.0, 0.5)),
        "optimizer.min_lr": draws.pick("least learning rate", (0.0, 5e-4)),
        "optimizer.clip": draws.pick("clip", (0.0, 0.1, 1.0)),
        "data.reset_position_ids": draws.chance("positions of documents", 3),
        "data.reset_attention_mask": draws.chance("attention within documents", 3),
        "data.eod_mask_loss": draws.chance("loss of ends", 3),
        "log.eval_samples": draws.between("held-out samples", 1, 9),
        "log.eval_interval": draws.pick("steps between evaluations", (0, 0, 1, 2)),
        "log.sample_interval": draws.pick("steps between texts", (0, 0, 0, 1, 2)),
        "log.sample_tokens": draws.below("tokens of a text", 9),
        "log.temperature": draws.pick("temperature", (0.0, 0.7, 1.0)),
        "log.top_k": draws.pick("likeliest tokens", (0, 3, 50)),
    }
    if precision == "fp16":  # scales at which no step overflows, and those at which the first ones do
        values["loss_scale.initial"] = draws.pick("loss scale", (2.0**8, 2.0**14, OVERFLOWS, 2 * OVERFLOWS))
        values["loss_scale.window"] = draws.pick("steps until the scale doubles", (1, 2, 1000))
        values["loss_scale.hysteresis"] = draws.between("overflows until the scale halves", 1, 2)
    return values


def _cut(draws: Draws, layers: int, stages: int) -> tuple[int, ...] | None:
    """Return blocks of each stage, in some cases; None: as dtgpt balances them."""
    if not draws.chance("own cut", 4):
        return None
    cut = [1] * stages
    for block in range(layers - stages):
        cut[draws.below(f"stage of block {block}", stages)] += 1
    return tuple(cut)
