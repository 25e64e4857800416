"""A case: one model, one plan and one way to train, small enough to run in a second, as one line of text."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from dtgpt.config.overrides import Options, leaves, read_words, replace_values, take
from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import SINGLE, parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import kinds, of_kind
from dtgpt.config.sections import CheckpointConfig, DataConfig, LogConfig, OptimizerConfig
from dtgpt.data.prepare.job import PrepareConfig, prepare
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.gemma3 import Gemma3Config
from dtgpt.models.families.gpt_neo import GPTNeoConfig
from dtgpt.models.families.gpt_oss import GptOssConfig
from dtgpt.models.families.olmo3 import Olmo3Config
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.roles import Role, patterns_of
from dtgpt.parallel.tensor import make_table
from dtgpt.train.start import checked
from dtgpt.util import seams
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown
from dtgpt.util.shared.option_words import value_text

SMALLEST: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "seq_length": 8, "vocab_size": 257}
GROUPED: dict[str, Any] = {**SMALLEST, "num_kv_heads": 1, "head_dim": 4, "ffn_hidden_size": 8}
MODELS: dict[str, ModelConfig] = {  # what a case's values change
    "gpt2": GPT2Config(**SMALLEST),
    "gpt_neo": GPTNeoConfig(**SMALLEST),
    "llama": LlamaConfig(**GROUPED),
    "olmo3": Olmo3Config(**GROUPED),
    "gemma3_text": Gemma3Config(**GROUPED),
    "gpt_oss": GptOssConfig(**GROUPED),
    "olmoe": OlmoeConfig(**GROUPED, num_experts=1, experts_per_token=1),
}
CUT = {"qkv": Role.QKV, "column": Role.COLUMN}  # the first matrix of a pair
TABLES = [f"{first}:{style}" for first in CUT for style in ("whole", "gathered", "rows")]
DOCUMENTS = 400
FITS = 2.0**10  # loss scale of a case whose precision is asked for
KEY = "_text_document"  # the end of the token files' names
PLAN = "case"  # its name in the recipe
# first: under the first of two plans. The others are on one process: exact in fp32, moved from moved initial weights.
Run = Literal["plan", "first", "reference", "exact", "moved"]


class First(NamedTuple):
    """The beginning of a case that is saved under one plan and goes on under another."""

    plan: str  # the name of a standard plan
    steps: int
    batch: int | None = None  # samples of these steps; None: those of the later ones

    def __str__(self) -> str:
        return ":".join(map(str, filter(None, self)))


@dataclass(frozen=True)
class Case:
    """What differs from the smallest model of the architecture and from the recipe's defaults."""

    architecture: str
    plan: str  # the name of a standard plan
    values: Mapping[str, Any] = field(default_factory=dict)  # by the names of recipe fields
    blocks_per_stage: tuple[int, ...] | None = None
    table: str | None = None  # one of TABLES: how tp ranks share a pair of matrices in every block
    first: First | None = None  # after which a checkpoint is written, from which `plan` goes on
    prepared: bool = False  # whether the text comes from token files
    optimizer: str = OptimizerConfig.kind

    def __str__(self) -> str:
        """Return the text of the case, which `parse` reads."""
        words = [self.architecture, self.plan]
        if self.first:
            words.append(f"first={self.first}")
        if self.blocks_per_stage:
            words.append(f"blocks_per_stage={','.join(map(str, self.blocks_per_stage))}")
        if self.table:
            words.append(f"table={self.table}")
        if self.prepared:
            words.append("data=prepared")
        if self.optimizer != OptimizerConfig.kind:
            words.append(f"optimizer={self.optimizer}")
        return shlex.join([*words, *(f"{name}={value_text(value)}" for name, value in self.values.items())])

    def parallel_plan(self) -> Plan:
        """Return the plan with one replica where its name says nothing of them. Raises UserError."""
        plan = _with_replicas(self.plan)
        table = styles(self.table, MODELS[self.architecture]) if self.table else {}
        return replace(plan, blocks_per_stage=self.blocks_per_stage, table=table)

    def first_plan(self) -> Plan | None:
        """Return the plan of the first steps, if there are two: with the table where it has tp, and the cut where it
        has as many stages. Raises UserError."""
        if self.first is None:
            return None
        plan, then = _with_replicas(self.first.plan), self.parallel_plan()
        cut = self.blocks_per_stage if plan.num_stages == then.num_stages else None
        return replace(plan, blocks_per_stage=cut, table=then.table if plan.tp > 1 else {})


def _with_replicas(name: str) -> Plan:
    plan = parse_plan(name)
    return replace(plan, dp=plan.dp or 1)


def styles(table: str, model: ModelConfig) -> dict[str, ParallelStyle | None]:
    """Return the table of a plan that gives pairs of matrices other styles: `whole` on every rank, columns of the first
    one `gathered`, or the first one cut by `rows`."""
    first, _, kind = table.partition(":")
    own: dict[str, ParallelStyle | None] = {}
    for pattern in patterns_of(CUT[first], model.roles):
        parent = pattern.rpartition(".")[0]
        following = [name for name in patterns_of(Role.ROW, model.roles) if name.rpartition(".")[0] == parent]
        own[pattern] = {
            "whole": None,
            "gathered": ColwiseParallel(output_layouts=Replicate()),
            "rows": RowwiseParallel(input_layouts=Replicate()),
        }[kind]
        own |= dict.fromkeys(following)
    return own


def parse(text: str) -> Case:
    """Return the case of a text that `str(case)` made. Raises UserError."""
    example = "gpt2 tp2 model.num_heads=2"
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        words = []
    if len(words) < 2 or words[0] not in MODELS:
        raise UserError(f"--case {shown(text)} is not a case; give a number, or a text such as '{example}'")
    blank = _blank(words[0])
    options: dict[str, str] = {}
    for word in words[2:]:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--case has the word {shown(word)} without a value; write words such as model.num_heads=2")
        options[name] = value
    cut, table, first, data, optimizer = (
        options.pop(name, None) for name in ("blocks_per_stage", "table", "first", "data", "optimizer")
    )
    if table is not None and table not in TABLES:
        raise UserError(f"--case has table={shown(table)}, which is not a choice; use one of {', '.join(TABLES)}")
    if cut is not None and not all(part.isdecimal() for part in cut.split(",")):
        raise UserError(f"--case has blocks_per_stage={shown(cut)}; give whole numbers such as 3,1")
    if first is not None and not re.fullmatch(r"\w+(:[1-9]\d{0,6}){1,2}", first):
        raise UserError(
            f"--case has first={shown(first)}; give a plan, its number of steps and, if it has another one, its batch "
            "size, such as tp2:1 or tp2:1:8"
        )
    if data not in (None, "prepared"):
        raise UserError(f"--case has data={shown(data)}; use data=prepared, or leave it out for a text")
    if optimizer is not None and optimizer not in kinds():
        raise UserError(f"--case has optimizer={shown(optimizer)}, which is not one; use {', '.join(kinds())}")
    given = take(blank, read_words([f"--{name}={value}" for name, value in options.items()], blank)[1])
    values = {name: attrgetter(name)(given) for name in options}
    blocks = tuple(map(int, cut.split(","))) if cut else None
    return Case(
        words[0], words[1], values, blocks, table, _first(first), data is not None, optimizer or OptimizerConfig.kind
    )


def _first(text: str | None) -> First | None:
    if text is None:
        return None
    plan, *numbers = text.split(":")
    return First(plan, *map(int, numbers))


def _blank(architecture: str) -> Recipe:
    """Return a recipe of the smallest model, to read the values of a case with."""
    optimizer = OptimizerConfig(lr=1e-3)
    return Recipe(
        name="random", model=MODELS[architecture], optimizer=optimizer, micro_batch_size=1, global_batch_size=1, steps=1
    )


def plain(recipe: Recipe) -> Recipe:
    """Return a recipe without what belongs to its own model, plan and data, and to the length of its run: what cases
    change. Its optimizer, device and timeout stay."""
    optimizer = replace(
        recipe.optimizer, min_lr=0.0, decay_steps=None, decay_samples=None, warmup=0, warmup_samples=None
    )
    return replace(
        replace_values(recipe, {"rampup_batch_size": None}),
        name="random",
        model=MODELS["gpt2"],
        optimizer=optimizer,
        plan=SINGLE,
        plans={},
        steps=1,
        micro_batch_size=1,
        global_batch_size=1,
        train_samples=None,
        compile="off",
        init_from=None,
        resume=None,
        data=DataConfig(),
        log=LogConfig(sample_tokens=0),
        checkpoint=CheckpointConfig(),
        **{name: seams.load(part)() for name, part in seams.added("sections").items()},
    )


@dataclass(frozen=True)
class Setting:
    """What all cases share."""

    base: Recipe  # a `plain` one
    given: Options  # values of recipe fields that hold in every case, by name
    text: Path  # the training text of all cases; `write_text` has put token files in the same folder

    def pin(self, case: Case) -> Case:
        """Return the case with the options that hold in every one, as far as its architecture has them."""
        blank = _blank(case.architecture)
        known = (self.given.keys() - {"seed"}) & {name for name, *_ in leaves(blank)}
        given = take(blank, {name: self.given[name] for name in known})
        values = {**case.values, **{name: attrgetter(name)(given) for name in sorted(known)}}
        if values.get("precision") == "fp16":
            values = {**values, "loss_scale.initial": values.get("loss_scale.initial", FITS)}
        steps = values.get("steps")
        short = case.first is not None and isinstance(steps, int) and steps <= case.first.steps
        return replace(case, values=values, first=None if short else case.first)

    @property
    def run_folder(self) -> Path:
        """Where the first plan of a case saves its checkpoint."""
        return self.text.with_name("run")

    @property
    def shared(self) -> Path:
        """What the names of the files begin with that the reference of a case leaves for its other runs."""
        return self.text.with_name("shared")

    def recipe_for(self, case: Case, run: Run) -> Recipe | None:
        """Return the recipe of one of a case's runs; None where it does not have this run. Raises UserError."""
        if run == "plan":
            return self.recipe_of(case)
        if run == "first":
            plan = case.first_plan()
            return None if plan is None else self.recipe_of(self.as_first(case), plan)
        return self.exact_of(case) if run == "exact" else self.reference_of(case)

    def as_first(self, case: Case) -> Case:
        """Return a case with two plans as its first one runs it: with its own batch size."""
        if case.first is None or case.first.batch is None:
            return case
        return replace(case, values={**case.values, "global_batch_size": case.first.batch})

    def recipe_of(self, case: Case, plan: Plan | None = None) -> Recipe:
        """Return the recipe of a case under its plan, or another one. Raises UserError."""
        data = DataConfig(path=str(self.text), tokenizer="bytes")
        if case.prepared:
            data = DataConfig(path=str(_prefix(self.text)) + KEY, split="90,10,0")
        plan = plan or case.parallel_plan()
        base = self.base if "optimizer.kind" in self.given else of_kind(self.base, case.optimizer)
        recipe = replace(base, model=MODELS[case.architecture], data=data)
        return replace(replace_values(recipe, case.values), plan=PLAN, plans={PLAN: plan})

    def reference_of(self, case: Case) -> Recipe:
        """Return the recipe of a case on one process, in the plainest way: nothing is recomputed or captured, and in
        fp32 attention is its reference implementation. 16-bit rounding depends on that, so that it stays as it is
        there, and with `--reduce exact`."""
        recipe = self.recipe_of(case)
        recipe = replace(recipe, plan=SINGLE, plans={}, graph="off", compile="off")
        recipe = replace(recipe, recompute="none", recompute_blocks=None)
        keeps_bits = recipe.precision != "fp32" or recipe.reduce != "fast"
        return recipe if keeps_bits else replace(recipe, attention="explicit")

    def exact_of(self, case: Case) -> Recipe | None:
        """Return the recipe of a case in 16 bits on one process in fp32, which tells the size of rounding, so that its
        sums may have any order; None for other cases."""
        recipe = self.reference_of(case)
        return None if recipe.precision == "fp32" else replace(recipe, precision="fp32", reduce="fast")

    def check(self, case: Case) -> Plan:
        """Return the plan of a case that can be run. Raises UserError, one sentence, for any other."""
        recipe = self.recipe_of(case)
        checked(recipe)
        if case.first and case.first.steps >= recipe.num_steps:
            raise UserError(
                f"first={case.first.plan}:{case.first.steps} leaves none of {counted(recipe.num_steps, 'step')} to the "
                "other plan; give fewer"
            )
        both = (self.as_first(case), case.first_plan()), (case, case.parallel_plan())
        for some, plan in both:
            if plan is None:
                continue
            recipe = self.recipe_of(some, plan)
            checked(recipe)
            found = recipe.plan_for(plan.world)
            if found.tp > 1:
                make_table(recipe.model, found)
        return found


def write_text(path: Path) -> Path:
    """Write short documents of many lengths, so that most samples have several, as a text and as token files; return
    the path of the text."""
    lines = [
        json.dumps({"text": f"{'so ' * (i % 7)}{i} and {i + 1} make {2 * i + 1}."[: 4 + i * 5 % 37]})
        for i in range(DOCUMENTS)
    ]
    path.write_text("\n".join(lines) + "\n")
    prefix = str(_prefix(path))
    prepare(PrepareConfig(input=(str(path),), output_prefix=prefix, tokenizer="bytes", append_eod=True, workers=1))
    return path


def _prefix(text: Path) -> Path:
    return text.with_suffix("")
