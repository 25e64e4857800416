"""A recipe: everything that decides a run, as frozen dataclasses. One experiment is one short file in `recipes/`.

A run folder keeps its recipe, and so says how to get its losses again. A recipe names no machine: `choose_plan` and
`settings` say what becomes of it on a number of processes and a device, and everything that runs is built from their
results (`dtgpt.config.execution`). A plan and the rest of the execution may change when a run goes on, and the curve
stays.

Every field can be overridden on the command line, `--optimizer.lr 3e-4` (`dtgpt.config.overrides`). Capabilities add
sections of their own, and precisions: `Recipe` has a field for each section, and asks it what a run cannot have. What
values exclude each other is in tables (`dtgpt.config.recipe_rules`), which `validate` checks before anything is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch

from dtgpt.config.execution import Recompute, Settings, choose_dtype, choose_graphs
from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.config.plan_choice import OR, PlanChoice, parse_alternatives, resolve
from dtgpt.config.recipe_rules import MOST_STEPS, NOTES, PRECISIONS, RULES
from dtgpt.config.schedule import BatchSizes, Schedule, schedules
from dtgpt.config.sections import (
    Added,
    CheckpointConfig,
    CoreSection,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    Section,
    precision_of,
    section_of,
    with_sections,
)
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.ops.attention.core import Backend, check_backend
from dtgpt.util import seams
from dtgpt.util.field_types import PATH, Bounds, Pattern, check_all_rules, check_annotations
from dtgpt.util.rules import Rules, broken, check_rules

RUN_NAME = Pattern(r"[A-Za-z0-9_-]{1,100}", "cannot name a run; use up to 100 of A-Z, a-z, 0-9, '_' and '-'")
if TYPE_CHECKING:  # type checkers do not see what capabilities add
    PrecisionName = str
    Reduce = str
else:
    Reduce = Literal[("fast", *seams.added("sums"))]
    PrecisionName = Literal[(*PRECISIONS, *seams.added("precisions"))]


@dataclass(frozen=True, kw_only=True)
@with_sections(before="data")
class Recipe(CoreSection, seam="recipe_fields"):
    """A run: model, data, optimizer, batch, plan, log and checkpoints. Each field is also an option."""

    headings: ClassVar[dict[str, str]] = {  # in `--help`, from the named field on
        "name": "experiment",
        "plan": "execution",
        "runs": "run folder",
    }
    # Options on the first screen of `--help`.
    common: ClassVar[frozenset[str]] = frozenset(
        {
            "model.num_layers",
            "model.hidden_size",
            "model.num_heads",
            "model.seq_length",
            "optimizer.lr",
            "optimizer.min_lr",
            "optimizer.warmup",
            "optimizer.weight_decay",
            "micro_batch_size",
            "global_batch_size",
            "steps",
            "seed",
            "plan",
            "device",
            "precision",
            "runs",
            "resume",
            "init_from",
            "data.path",
            "data.valid_path",
            "data.tokenizer",
            "log.interval",
            "log.eval_interval",
            "checkpoint.interval",
        }
    )

    rules: ClassVar[Rules] = RULES
    aliases: ClassVar[dict[str, str]] = {}  # other names of options, which sections have

    name: Annotated[str, "name of the experiment; its runs are folders NAME-001, NAME-002, ...", RUN_NAME]
    model: ModelConfig
    optimizer: OptimizerConfig
    seq_length: Annotated[
        int | None, "number of tokens in a training sample; none: as many as the model has positions", Bounds(1)
    ] = None
    micro_batch_size: Annotated[int, "number of samples in a forward and backward pass on one device", Bounds(1)]
    global_batch_size: Annotated[int, "number of samples in an optimizer step", Bounds(1)]
    steps: Annotated[int | None, "number of optimizer steps; none: by train_samples", Bounds(1, MOST_STEPS)] = None
    train_samples: Annotated[int | None, "number of samples to train on, in place of steps", Bounds(1)] = None
    seed: Annotated[int, "seed of weights, order of samples, dropout masks and generated texts", Bounds(0)] = 1234
    plan: Annotated[
        str,
        "parallel plan, such as dp4, zero3, tp2_sp or tp2_pp2; dp: a replica for each process; 'tp4 | tp2': the first "
        "that fits the processes that are there; auto: the fastest that fits, with micro_batch_size, recompute and "
        "recompute_blocks",
    ] = "dp"
    plans: Mapping[str, Plan] = field(default_factory=dict)  # user-defined plans by the names that `plan` can have
    device: Annotated[Literal["auto", "cpu", "cuda"], "device; auto: cuda if there is one"] = "auto"
    precision: Annotated[
        PrecisionName,
        "type of weights and activations, with fp32 master weights; auto: bf16 on cuda, else fp32"
        + "".join(f"; {name}: {words}" for name, words in seams.added("precision_help").items()),
    ] = "auto"
    attention: Annotated[
        Backend,
        "implementation of the attention core; auto: the fastest, if possible one with the same bits in every run",
    ] = "auto"
    recompute: Annotated[
        Recompute,
        "recompute activations in backward: of the attention core (selective), of blocks but that core "
        "(around_attention) or of whole blocks (full)",
    ] = "none"
    recompute_blocks: Annotated[
        int | None,
        "number of blocks, from the first, that each pipeline stage recomputes; none: all",
        Bounds(1),
    ] = None
    reduce: Annotated[
        Reduce,
        "sums of gradients, losses and norms: fast, or exact, in 64-bit fixed point, with the same bits for any number "
        "of replicas, ZeRO level and pipeline; exact_tp: and for any tp, with products in pieces",
    ] = "fast"
    compile: Annotated[
        Literal["auto", "on", "off"], "use torch.compile for each block; auto: on cuda if graph is off"
    ] = "auto"
    graph: Annotated[Literal["auto", "on", "off"], "replay steps as CUDA graphs; auto: on cuda"] = "auto"
    timeout: Annotated[float, "seconds that a process waits for another before the run ends", Bounds(above=0)] = 600.0
    lost_after: Annotated[
        float,
        "seconds after which a process that does not answer counts as lost, and all others end",
        Bounds(5),
    ] = 20.0
    runs: Annotated[str, "folder that contains the run folders", PATH] = "runs"
    resume: Annotated[
        str | None,
        "run folder or checkpoint to resume, also of Megatron-LM; auto: the newest run of this name, or a new run",
        PATH,
    ] = None
    init_from: Annotated[
        str | None, "initial weights of a new run: a run, a checkpoint, or any model that dtgpt convert reads", PATH
    ] = None
    data: DataConfig = field(default_factory=DataConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    if TYPE_CHECKING:  # the fields of capabilities' sections

        def __init__(self, **values: Any) -> None: ...

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections of capabilities, without those that are as their capability has them: these are off."""
        off = {name: seams.load(part)() for name, part in seams.added("sections").items()}
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        # A class of a recipe's own is asked whatever its values are: its defaults may turn it on.
        return tuple(value for name, value in values.items() if isinstance(value, Section) and value != off.get(name))

    def section(self, kind: type[Added]) -> Added:
        """Return the section of this class, with its defaults where there is none."""
        return section_of(self.sections, kind)

    @property
    def freezes_weights(self) -> bool:
        """Whether other modules than the model's own are trained."""
        return any(section.freezes_weights for section in self.sections)

    @property
    def sample_length(self) -> int:
        """The number of tokens in a training sample."""
        return self.seq_length or self.model.seq_length

    @property
    def counts_samples(self) -> bool:
        """Whether the learning rate is a function of the samples seen, and not of the steps taken."""
        own = self.optimizer
        return own.decay_samples is not None or (self.train_samples is not None and own.decay_steps is None)

    @property
    def num_steps(self) -> int:
        """The optimizer steps of the run: `steps`, or as many as `train_samples` fill."""
        return self.steps or self.batch_sizes().steps_within(self.train_samples or 0)

    @property
    def schedule(self) -> Schedule:
        """The learning rate, with the ends of warmup and decay in the unit that it counts."""
        own = self.optimizer
        end = own.decay_steps or self.num_steps
        if self.counts_samples:
            end = own.decay_samples or self.train_samples or 0
        warmup = own.warmup if own.warmup_samples is None else own.warmup_samples
        kind = schedules()[own.schedule]
        return kind(
            shape=own.schedule,
            lr=own.lr,
            min_lr=own.min_lr,
            warmup=round(warmup * end) if warmup < 1 else round(warmup),
            end=end,
            counts_samples=self.counts_samples,
            **{name.rpartition(".")[2]: attrgetter(name)(self) for name in kind.options},
        )

    @property
    def schedule_ends_with_run(self) -> bool:
        """Whether the warmup may be as long as the schedule, since the run ends with both."""
        ends_with_samples = self.counts_samples or self.schedule.end == self.num_steps
        return self.optimizer.decay_samples is None and ends_with_samples

    def batch_sizes(self, first_step: int = 0, first_sample: int = 0) -> BatchSizes:
        """Return the batch size of every step of a run that begins with `first_step`, after `first_sample` samples. The
        sizes of earlier steps are known where they were these all along."""
        make = partial(BatchSizes, self.global_batch_size)
        for ramped in seams.listed("rampups", self):
            make = partial(ramped, self)
        # A checkpoint says after how many samples its step began, and not what sizes earlier steps had. Where these
        # sizes make as many, they were these all along.
        all_along = make()
        return all_along if all_along.before(first_step) == first_sample else make(first_step, first_sample)

    def counted(self, first_step: int = 0, first_sample: int = 0) -> "Recipe":
        """Return the same run with `steps` in place of `train_samples`: as many whole steps as the samples fill. A run
        that goes on does so with `first_step`, after `first_sample` samples."""
        if self.train_samples is None:
            return self
        steps = self.batch_sizes(first_step, first_sample).steps_within(self.train_samples)
        decay = self.schedule.end if self.counts_samples else None
        optimizer = replace(self.optimizer, decay_samples=decay)
        return replace(self, steps=steps, train_samples=None, optimizer=optimizer)

    def alternatives(self) -> dict[str, Plan]:
        """Return the plans that `plan` names, in its order, with dp as each says; one where there is no choice."""
        return parse_alternatives(self.plan, self.plans)

    def choose_plan(self, world: int, started: bool = True) -> PlanChoice:
        """Return the plan for `world` processes, or fewer of them where `plan` has alternatives, checked against the
        model and the batch; raises UserError, one sentence. started: False where the processes need not exist."""
        alternatives = self.alternatives()
        if OR in self.plan:
            choose = seams.load(seams.added("alternatives")["choose"])
            micro_batches = self.global_batch_size // self.micro_batch_size
            return choose(alternatives, world, micro_batches, self.check_plan, started)
        ((name, named),) = alternatives.items()
        plan = resolve(named, world, self.check_plan, started)
        return PlanChoice(plan=plan, named=named, name=name, world=world)

    def fewest_processes(self) -> int:
        """Return the processes of one replica of the first alternative of `plan`. Raises UserError, one sentence, where
        no number of processes can run it."""
        plan = next(iter(self.alternatives().values()))
        self.check_plan(plan.for_world(plan.world))
        return plan.world

    def plan_for(self, world: int, started: bool = True) -> ResolvedPlan:
        """Return the plan that `choose_plan` chooses."""
        return self.choose_plan(world, started).plan

    def check_plan(self, plan: ResolvedPlan) -> None:
        """Raise UserError, one sentence, where this recipe cannot run the plan."""
        micro, whole, length = self.micro_batch_size, self.global_batch_size, self.sample_length
        plan.validate(self.model, micro, whole, length)
        for section in self.sections:
            section.check_plan(plan)
        self.batch_sizes().check_plan(plan, self.model, micro, length)
        if part := seams.added("sums").get(self.reduce):
            seams.load(part).check_plan(plan)
        # What capabilities cannot do under a plan, by values of the recipe, which the checks of a plan do not see.
        for rules in seams.listed("plan_rules", self):
            check_rules(rules, self, plan=plan)

    def settings(self, plan: ResolvedPlan, device: torch.device, here: bool = True) -> Settings:
        """Return what the model is built and run with under `plan` on `device`. here: False where this machine does not
        run it, so that what is installed does not matter."""
        graphs, added = choose_graphs(self.graph, device, plan), precision_of(self.precision)
        needs = "compile=on needs a capability, which is not here; use --compile off"
        by_default = seams.listed("compilers") if device.type == "cuda" else []
        compilers = [seams.first("compilers", needs)] if self.compile == "on" else by_default
        if added is not None and here:
            added.check_device(device)
        made = Settings(
            model=self.model,
            plan=plan,
            device=device,
            dtype=choose_dtype(self.precision, device),
            seq_length=self.sample_length,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            attention=self.attention,
            recompute=self.recompute,
            recompute_blocks=self.recompute_blocks,
            reduce=self.reduce,
            compile=added is None and any(choose(self.compile, device, graphs, plan, here) for choose in compilers),
            graphs=graphs,
            products=None if added is None else self.precision,
            data=self.data,
            optimizer=self.optimizer,
            sections=self.sections,
        )
        if part := seams.added("sums").get(self.reduce):
            seams.load(part).check_settings(made)
        for section in self.sections:
            section.check_settings(made)
        for rules in seams.listed("settings_rules", self):
            check_rules(rules, made)
        return made

    def planned_choice(self, world: int | None) -> PlanChoice:
        """Return the choice for `world` processes that need not exist yet, None for the fewest that the first
        alternative needs; raises UserError."""
        first = next(iter(self.alternatives().values()))
        return self.choose_plan(world or first.world, started=world is None)

    def planned(self, world: int | None) -> Settings:
        """Return the settings under `planned_choice`, on a machine that need not exist yet."""
        device = torch.device("cpu" if self.device == "cpu" else "cuda")
        return self.settings(self.planned_choice(world).plan, device, here=False)

    def resolved(self) -> "Recipe":
        """Return the same run with every default that depends on other fields written out."""
        recipe = self.counted()
        if recipe.counts_samples:
            return recipe
        return replace(recipe, optimizer=replace(recipe.optimizer, decay_steps=recipe.schedule.end))

    def validate(self) -> None:
        """Raise UserError, one sentence, for the first value, or combination of values, that cannot be trained with."""
        check_annotations(self)
        self.batch_sizes()  # or raises for a ramp-up that is none, of which no rule can ask
        check_all_rules(self)
        check_rules(self.schedule.rules, self.schedule)
        self.model.validate()
        cores = inventory(self.model).kinds_of_cores()
        kinds = sorted({(core.softcap, core.sinks) for core in cores})
        check_backend(self.attention, self.model.dropout, self.model.head_dim, kinds)
        for section in self.sections:
            section.check_recipe(self)

    def notes(self, choice: PlanChoice, device_type: str) -> list[str]:
        """Return what a user should know about a valid recipe under the chosen plan on this kind of device."""
        length = self.num_steps
        if self.counts_samples:
            length = self.train_samples or self.batch_sizes().before(length)
        tables = [NOTES, *seams.listed("recipe_notes", self)]
        found = [
            note for rules in tables for note in broken(rules, self, choice=choice, device=device_type, length=length)
        ]
        if (added := precision_of(self.precision)) is not None:
            found += added.notes_on(self.model, choice.plan, self.micro_batch_size, self.sample_length, device_type)
        found += self.optimizer.notes(self.model)
        return found + [note for section in self.sections for note in section.notes_on(choice.plan)]
