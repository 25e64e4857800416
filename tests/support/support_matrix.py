"""The tables of docs/support.md: what can be combined in training, asked of the checks themselves.

python -m tests.support.support_matrix        # write them into the page

Every two of the choices below are put into one small recipe, which is checked as a start checks it. A cell is `yes`, or
the number of the error message under the tables.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dtgpt.config.execution import Settings
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import kinds
from dtgpt.config.sections import DataConfig, OptimizerConfig
from dtgpt.models.config import architectures
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.posttrain.dpo.config import DpoConfig
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.receipts.config import ReceiptsConfig
from dtgpt.util.errors import UserError
from dtgpt.util.seams import load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- from the checks of dtgpt -->\n", "<!-- end -->\n"
SMALL: dict[str, Any] = {
    "hidden_size": 256, "num_heads": 4, "num_layers": 4, "seq_length": 128, "vocab_size": 512, "dropout": 0.0,
}  # fmt: skip
SIZES = SMALL | {  # of those that have them
    "num_kv_heads": 4, "head_dim": 64, "ffn_hidden_size": 512, "window": 32, "num_experts": 4, "experts_per_token": 2,
}  # fmt: skip


class Task(GrpoConfig):
    """Asks and rewards something."""

    def prompt(self, index: int) -> str:
        return "?"

    def reward(self, index: int, answer: str) -> float:
        return 0.0


# A choice: the words of the page, and the values that it changes.
Choice = tuple[str, dict[str, Any]]
PLANS = {  # a part of a plan's name -> a whole plan that has it
    "dp": "dp4", "zero1": "dp4_zero1", "zero2": "dp4_zero2", "zero3": "dp4_zero3", "tp": "dp2_tp2", "sp": "dp2_tp2_sp",
    "cp": "dp2_cp2", "pp (1F1B)": "dp2_pp2", "gpipe": "dp2_pp2_gpipe", "interleaved": "dp2_pp2_interleaved",
    "zbv": "dp2_pp2_zbv", "ep": "dp4_ep2",
}  # fmt: skip
PRECISIONS: list[Choice] = [(name, {"precision": name}) for name in ("fp32", "bf16", "fp16", "fp8")]
OBJECTIVES: list[Choice] = [
    ("LoRA", {"lora": LoraConfig(rank=8)}),
    ("DPO", {"dpo": DpoConfig(beta=0.1)}),
    ("GRPO", {"grpo": Task(group=4, max_new_tokens=16)}),
]
FEATURES: list[Choice] = [
    *((name, {"optimizer": load(part)(lr=1e-3)}) for name, part in kinds().items()),
    ("reduce exact", {"reduce": "exact"}),
    ("recompute selective", {"recompute": "selective", "attention": "explicit"}),
    ("recompute around_attention", {"recompute": "around_attention", "attention": "flash"}),
    ("recompute full", {"recompute": "full"}),
    ("recompute_blocks", {"recompute_blocks": 1, "recompute": "full"}),
    ("compile", {"compile": "on", "graph": "off"}),
    ("CUDA graphs", {"graph": "on"}),
    ("batch size ramp-up", {"rampup_batch_size": "32 32 256"}),
    ("documents apart", {"data": DataConfig(path="x", reset_attention_mask=True)}),
    ("receipts", {"receipts": ReceiptsConfig(on=True)}),
    ("dropout", {"dropout": 0.1}),
    ("CPU", {"device": "cpu"}),
]
MODELS: list[Choice] = []
for name, part in architectures().items():
    own = {field.name for field in fields(load(part))}
    model = load(part)(**{key: value for key, value in SIZES.items() if key in own})
    MODELS.append((name, {"model": model}))
MIXTURE = dict(MODELS)["olmoe"]


def recipe_of(*choices: dict[str, Any]) -> Recipe:
    """Return a small recipe with the values of the choices; a later one counts."""
    plain: dict[str, Any] = {
        "name": "one", "model": GPT2Config(**SMALL), "optimizer": OptimizerConfig(lr=1e-3), "plan": "dp4",
        "micro_batch_size": 8, "global_batch_size": 128, "steps": 100, "init_from": "x", "data": DataConfig(path="x"),
    }  # fmt: skip
    for values in choices:
        plain |= values
    dropout = plain.pop("dropout", 0.0)
    return Recipe(**plain | {"model": replace(plain["model"], dropout=dropout)})


def settings_of(*choices: dict[str, Any]) -> Settings:
    """Return what a start makes of the choices; raises UserError, as it does."""
    recipe = recipe_of(*choices)
    recipe.validate()
    return recipe.planned(4)


def refusal(*choices: dict[str, Any]) -> str | None:
    """Return the error message of a start with the choices; None where it begins."""
    try:
        settings_of(*choices)
    except UserError as error:
        return str(error)
    return None


def lacks_experts(values: dict[str, Any]) -> bool:
    """Return whether a plan spreads experts that a model has not, of which the page says so in a sentence."""
    return values.get("plan") == PLANS["ep"] and not isinstance(values.get("model"), ExpertsConfig)


def no_generation(plan: str) -> str | None:
    """Return the error message of a generation under a plan; None where it begins."""
    try:
        parse_plan(plan).for_world(4).for_inference()
    except UserError as error:
        return str(error)
    return None


def table() -> str:
    """Return the tables, and the error messages that they number. Equal rows are one, and equal columns."""
    plans: list[Choice] = [(part, {"plan": name}) for part, name in PLANS.items()]
    of_models = [(part, values | (MIXTURE if part == "ep" else {})) for part, values in plans]
    notes: dict[str, int] = {}

    def cell(message: str | None) -> str:
        return "yes" if message is None else f"({notes.setdefault(message, len(notes) + 1)})"

    def asked(values: dict[str, Any], own: dict[str, Any]) -> str:
        if values.keys() & own.keys() or lacks_experts(values | own):  # two values of one option
            return ""
        return cell(refusal(values, own))

    def cells(down: list[Choice], across: list[Choice]) -> dict[str, list[str]]:
        return {words: [asked(values, own) for _, own in across] for words, values in down}

    under_plans = cells([*PRECISIONS, *OBJECTIVES, *FEATURES], of_models)
    under_plans["generation, serving, evaluation"] = [cell(no_generation(plan)) for plan in PLANS.values()]
    others = [*PRECISIONS, *OBJECTIVES]
    together = cells([*OBJECTIVES, *FEATURES], others)
    of_families = cells(MODELS, [*others, *FEATURES, *plans])
    count = sum(len([*filter(None, row)]) for row in of_families.values())
    names = [words for words, _ in (*others, *FEATURES, *plans)]
    refused = {
        family: [f"{words} {found}" for words, found in zip(names, row, strict=True) if found not in ("", "yes")]
        for family, row in of_families.items()
    }
    alike = merged({family: found for family, found in refused.items() if found})
    said = "; ".join(f"{families} with {', '.join(found)}" for families, found in alike.items())
    return (
        lines(under_plans, list(PLANS))
        + lines(together, [words for words, _ in others])
        + f"Families ({', '.join(of_families)}) with each of these: {count} pairs, "
        + f"{sum(map(len, refused.values()))} refused{f': {said}' if said else ''}.\n\n"
        + "".join(f"{number}. `{message}`\n" for message, number in notes.items())
    )


def lines(cells: dict[str, list[str]], across: list[str]) -> str:
    """Return a table in Markdown of rows by name."""
    turned = zip(*cells.values(), strict=True)
    columns = merged({words: list(column) for words, column in zip(across, turned, strict=True)})
    rows = merged({words: [column[i] for column in columns.values()] for i, words in enumerate(cells)})
    head = ["| | " + " | ".join(columns) + " |", f"|{'---|' * (len(columns) + 1)}"]
    return "\n".join([*head, *(f"| {words} | {' | '.join(row)} |" for words, row in rows.items()), "", ""])


def merged(lines: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return rows by name, those that are equal as one with all their names."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, line in lines.items():
        names.setdefault(tuple(line), []).append(name)
    return {", ".join(of): list(line) for line, of in names.items()}


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
