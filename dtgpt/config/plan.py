"""A plan: how one model is spread over processes. `dtgpt.config.plan_choice` makes a plan from its name, and
`dtgpt.parallel` applies it.

A plan changes who computes what, never what is computed: the loss curve is the same under every plan. So whatever a
plan cannot do with a model or a batch is refused here, in one sentence with a remedy, from numbers alone, before a
process is started. What a capability brings (cut samples, styles of modules) it checks itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from dtgpt.models.config import ModelConfig
from dtgpt.util import seams
from dtgpt.util.console import counted, listed
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import Bounds, check_fields
from dtgpt.util.rules import Given, Is, Other, Rule, Rules, check_rules

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
STAGES_OF_RANK: Mapping[str, tuple[int, float]] = {  # at least, which it is where nothing is said, and at most
    "GPipe": (1, 1),
    "1F1B": (1, 1),
    "Interleaved1F1B": (2, math.inf),
    "ZBVZeroBubble": (2, 2),
}
DEGREE = Bounds(1, 1_000_000)
GPUS_OF_HOST = 8  # that reach each other's memory

# Of a plan with sp and the tokens of a sample, `length`, of which some are `left` over; named: the option that sets it;
# near: lengths that can be split.
SEQUENCE_RULES: Rules = (
    Rule(
        "sequence parallelism (sp) shares the tp ranks, but tp=1; add tp2 or more, or leave sp out",
        Is("tp", "==", 1),
    ),
    Rule(
        "{named}={length} cannot be split over tp={tp} under sequence parallelism ({left} left over); use --{named} "
        "{near}, or leave sp out",
        Given("left"),
    ),
)
# Of a plan and the blocks of a model, `layers`; least, most: stages of a rank that the schedule takes.
STAGE_RULES: Rules = (
    *(
        Rule(
            "the stages of schedule {schedule} need a pipeline, but pp=1; add pp2 or more to the plan",
            Is("pp", "==", 1),
            asks,
        )
        for asks in (Is("schedule", "!=", "1F1B"), Is("num_stages", ">", 1), Given("blocks_per_stage"))
    ),
    *(
        Rule(
            "the schedule {schedule} takes {taken}, not {stages_of_rank}; use interleaved{remedy}, or 1f1b, or leave "
            "stages_per_rank out",
            Is("pp", ">", 1),
            wrong,
            remedy=lambda plan: str(max(2, plan.stages_of_rank)),
        )
        for wrong in (Is("stages_of_rank", "<", Other("least")), Is("stages_of_rank", ">", Other("most")))
    ),
    Rule(
        "model.num_layers={layers} cannot fill pp={pp} x {stages_of_rank} = {num_stages} stages; use {fewer}"
        "--model.num_layers {num_stages} or more",
        Is("pp", ">", 1),
        Is("num_stages", ">", Other("layers")),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees, a schedule, and what the recipe wants otherwise in the table of modules (`dtgpt.parallel.tensor`)."""

    dp: Annotated[int | None, DEGREE] = None  # data parallel: replicas of the model; None: as the processes make
    cp: Annotated[int, DEGREE] = 1  # context parallel: ranks that each have a slice of the tokens of every sample
    ep: Annotated[int, DEGREE] = 1  # expert parallel: neighbours within dp x cp that hold other experts each
    tp: Annotated[int, DEGREE] = 1  # tensor parallel: ranks that share every layer
    pp: Annotated[int, DEGREE] = 1  # pipeline parallel: ranks that share the depth
    zero: Annotated[int, Bounds(0, 3)] = 0  # cut over dp x cp: 1 optimizer state, 2 and gradients, 3 and parameters
    sequence_parallel: bool = False  # between tensor parallel layers, cut activations along the sequence
    schedule: Schedule = "1F1B"
    stages_per_rank: Annotated[int | None, DEGREE] = None  # None: 2 for Interleaved1F1B and ZBVZeroBubble, else 1
    blocks_per_stage: tuple[int, ...] | None = None  # None: balanced by cost
    table: Mapping[str, Any] = field(default_factory=dict)  # module pattern -> ParallelStyle, or None: replicated

    def __post_init__(self) -> None:
        """Raise UserError for a value that no plan can have, whatever the model."""
        check_fields(self)
        cut = self.blocks_per_stage
        if cut is not None and not (isinstance(cut, tuple | list) and all(type(n) is int for n in cut)):
            raise UserError(f"blocks_per_stage={shown(cut)} is not a tuple of whole numbers; use one such as (14, 10)")
        for check in seams.listed("own_tables") if self.table != {} else ():
            check(self.table)

    @property
    def world(self) -> int:
        """Processes that the plan needs, once dp is known."""
        return self.ranks_of_stage * self.pp

    @property
    def ranks_of_stage(self) -> int:
        """Ranks that hold the same pipeline stages, or parts of them."""
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that compute with the same weights on other tokens: over them gradients are summed, and ZeRO cuts."""
        return (self.dp or self.least_dp) * self.cp

    @property
    def least_dp(self) -> int:
        """The fewest replicas whose ranks of data can hold the experts."""
        return self.ep // math.gcd(self.ep, self.cp)

    @property
    def own_axes(self) -> dict[str, int]:
        """The axes, among the ranks of data, of stacks whose matrices not all of these ranks hold."""
        return {"ep": self.ep} if self.ep > 1 else {}

    @property
    def stages_of_rank(self) -> int:
        return self.stages_per_rank or STAGES_OF_RANK[self.schedule][0]

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_of_rank

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed apart from those of inputs: then blocks cannot be compiled."""
        return self.pp > 1 and self.schedule == "ZBVZeroBubble"

    @property
    def asks_host(self) -> bool:
        """Whether shapes in a step follow from what is computed: then it is neither captured nor compiled. Rows of
        experts go to other hosts so; within a host, whose ranks are neighbours, shapes are static."""
        return self.ep > 1 and self.ep * self.tp > GPUS_OF_HOST

    @property
    def narrows_weights(self) -> bool:
        """Whether modules hold weights in the type of the activations, beside fp32 masters. `fully_shard` keeps the
        masters and casts what it gathers; a schedule that cuts backward in two sums the micro-batches in the weights'
        own type, which must then be fp32."""
        return not self.zero and not self.splits_backward

    @property
    def reshards(self) -> bool:
        """Whether the weights of a block are freed between its forward and its backward pass."""
        return self.zero == 3 and self.pp == 1

    @property
    def replicate(self) -> int:
        """Ranks that hold the same optimizer state."""
        return 1 if self.zero else self.data_ranks

    @property
    def shard(self) -> int:
        """Ranks over which ZeRO cuts."""
        return self.data_ranks if self.zero else 1

    @property
    def name(self) -> str:
        """The canonical name, `dp2_tp2_pp2`, without what the recipe defines by itself."""
        degrees = ("dp", self.dp or 1), ("cp", self.cp), ("ep", self.ep), ("tp", self.tp), ("pp", self.pp)
        parts = [f"{part}{n}" for part, n in degrees if n > 1]
        parts += [f"zero{self.zero}"] * (self.zero > 0) + ["sp"] * self.sequence_parallel
        if self.pp > 1 and self.schedule != "1F1B":
            word = next(word for word, schedule in SCHEDULES.items() if schedule == self.schedule)
            parts.append(word + (str(self.stages_per_rank) if self.stages_per_rank else ""))
        return "_".join(parts) or "single"

    def stage_rank(self, stage: int) -> int:
        """Return the pipeline rank that holds `stage`: in turn, or for ZBVZeroBubble down and up again."""
        lap, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.schedule == "ZBVZeroBubble" and lap % 2 else place

    def for_world(self, world: int, started: bool = True) -> "ResolvedPlan":
        """Return the plan with dp filled in for `world` processes; raises UserError where they do not make it. started:
        False where `dtgpt plan --world` asks about processes that do not exist."""
        one = self.cp * self.tp * self.pp
        degrees = ("dp", self.dp), ("cp", self.cp), ("tp", self.tp), ("pp", self.pp)
        known = [f"{n}={value}" for n, value in degrees if value != 1]
        factors = " x ".join(part for part in known if not part.endswith("None")) or "one"
        given, remedy = f"--world is {world}", "use --world {}"
        if started:
            given = f"{world} {'was' if world == 1 else 'were'} started"
            remedy = "start {} (torchrun --nproc-per-node)"
        if self.dp is not None:
            if self.dp * one != world:
                fitting = max(1, round(world / one))
                other = f", or use dp{fitting} with {fitting * one}" if fitting != self.dp else ""
                raise UserError(
                    f"the plan {self.name} needs {factors} = {counted(self.dp * one, 'process', 'processes')}, but "
                    f"{given}; {remedy.format(self.dp * one)}{other}"
                )
        elif world % one:
            low = max(1, world // one)
            near = f"{low * one} or {(low + 1) * one}" if world > one else f"{one}"
            raise UserError(
                f"the plan {self.name} needs {factors} = {one} processes for each replica, but {given}, which is not a "
                f"multiple; {remedy.format(near)}"
            )
        return ResolvedPlan(**{**vars(self), "dp": world // one})


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan(Plan):
    """A plan whose data parallel degree is known: what `Plan.for_world` returns, and all that runs is built from."""

    dp: Annotated[int, DEGREE] = 1

    def without_idle_zero(self) -> "ResolvedPlan":
        """Return the plan without ZeRO where there is one rank of data, over which ZeRO cuts nothing."""
        return replace(self, zero=0) if self.zero and self.data_ranks == 1 else self

    def for_inference(self) -> "ResolvedPlan":
        """Return the plan without what concerns training alone. Raises UserError where it cuts samples."""
        if self.cp > 1:
            raise UserError(
                f"the plan {self.name} cuts samples over cp={self.cp}, in training alone; use tp or dp here"
            )
        return replace(self, zero=0, ep=1, sequence_parallel=False)

    def validate(self, model: ModelConfig, micro_batch_size: int, global_batch_size: int, seq_length: int) -> None:
        """Raise UserError, one sentence with its remedy, where the model or the batch cannot be cut in this way. No
        process group is needed. `for_world` comes first."""
        check_rules(model.plan_rules, model, plan=self)
        self._validate_tensor(model)
        if self.sequence_parallel:
            named, near = field_of_length(model, seq_length), multiples_beside(seq_length, self.tp)
            check_rules(SEQUENCE_RULES, self, length=seq_length, left=seq_length % self.tp, named=named, near=near)
        # What capabilities bring about, and check.
        for name, wanted in (("cp", self.cp > 1), ("ep", self.ep > 1), ("table", self.table)):
            check = seams.added("degrees").get(name) if wanted else None
            if wanted and check is None:
                raise UserError(f"the plan has {name}, but no capability here brings it about; leave {name} out")
            if check is not None:
                seams.load(check)(self, model, seq_length)
        self._validate_batch(micro_batch_size, global_batch_size)
        self._validate_stages(model)
        if self.pp > 1:
            self._validate_micro_batches(micro_batch_size, global_batch_size)

    def _validate_tensor(self, model: ModelConfig) -> None:
        vocab = model.padded_vocab_size
        dividing = divisors(math.gcd(*model.cut_by_tp.values()))
        fitting = [n for n in dividing if _every_rank_has_rows(vocab, n)]
        for name, size in model.cut_by_tp.items():
            if size % self.tp:
                wanted = [n for n in fitting if n > self.sequence_parallel]
                remedy = f"use tp={listed(wanted)}" if wanted else "leave tp and sp out"
                raise UserError(f"model.{name}={size} cannot be split over tp={self.tp}; {remedy}")
        if not _every_rank_has_rows(vocab, self.tp):
            raise UserError(
                f"the vocabulary of {vocab} (model.vocab_size={model.vocab_size}, padded) leaves a rank of "
                f"tp={self.tp} without a row; use tp={max(fitting)} or less"
            )

    def _validate_batch(self, micro: int, whole: int) -> None:
        dp = self.dp
        smallest = micro * dp
        if whole % smallest == 0:
            return
        if whole % dp == 0:
            fitting = max(m for m in divisors(whole // dp) if m <= micro)
            remedy = f"--micro_batch_size {fitting} (the curve stays the same)"
        else:
            low = whole // smallest * smallest
            remedy = "--global_batch_size " + (f"{low} or {low + smallest}" if low else f"{smallest}")
        raise UserError(
            f"global_batch_size={whole} cannot be split into micro-batches of micro_batch_size={micro} on "
            f"dp={dp} replicas; use {remedy}"
        )

    def _validate_stages(self, model: ModelConfig) -> None:
        (least, most), layers = STAGES_OF_RANK[self.schedule], model.num_layers
        taken = f"{counted(least, 'stage')} a rank{' or more' * (most > least)}"
        fitting = layers // self.stages_of_rank
        fewer = f"pp{fitting}, or " if fitting > 1 else ""
        check_rules(STAGE_RULES, self, layers=layers, least=least, most=most, taken=taken, fewer=fewer)
        cut, stages = self.blocks_per_stage, self.num_stages
        if cut and (len(cut) != stages or sum(cut) != layers or min(cut) < 1):
            raise UserError(
                f"blocks_per_stage={tuple(cut)} does not cut model.num_layers={layers} into {stages} stages; "
                f"give {stages} positive numbers whose sum is {layers}"
            )

    def _validate_micro_batches(self, micro: int, whole: int) -> None:
        dp = self.dp
        count = whole // (micro * dp)
        if self._schedule_runs(count):
            return
        fitting = [m for m in divisors(whole // dp) if m <= micro and self._schedule_runs(whole // dp // m)]
        if fitting:
            remedy = f"--micro_batch_size {max(fitting)} (the curve stays the same), or gpipe"
        else:
            remedy = f"--global_batch_size {math.ceil(count / self.pp) * self.pp * micro * dp}, or gpipe"
        rule = f"at least pp={self.pp}" if count < self.pp else f"equal rounds of pp={self.pp} or a few more"
        raise UserError(
            f"the schedule {self.schedule} needs {rule} micro-batches a step, but global_batch_size / "
            f"(micro_batch_size x dp) = {count}; use {remedy}"
        )

    def _schedule_runs(self, count: int) -> bool:
        """Return whether the schedule can run `count` micro-batches: 1F1B as many as there are ranks, Interleaved1F1B
        those that make equal rounds (torch.distributed.pipelining), the others any."""
        if self.schedule == "1F1B":
            return count >= self.pp
        return self.schedule != "Interleaved1F1B" or (count >= self.pp and count % (count // self.pp) == 0)


def _every_rank_has_rows(rows: int, ranks: int) -> bool:
    """Return whether pieces of equal size, the last one shorter, leave something for the last rank."""
    return math.ceil(rows / ranks) * (ranks - 1) < rows


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order, in time proportional to its square root."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def field_of_length(model: ModelConfig, seq_length: int) -> str:
    """Return the option that sets the tokens of a sample."""
    return "model.seq_length" if seq_length == model.seq_length else "seq_length"


def multiples_beside(number: int, of: int) -> str:
    """Return the multiples next to a number, in words."""
    low = number // of * of
    return f"{low} or {low + of}" if low else f"{of}"
