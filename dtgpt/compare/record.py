"""What a plan does in some steps, as one process can be compared with it: losses, norms, rates, whole tensors."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dtgpt.compare.choices import Choices, Flip, as_the_run, choices_of_ranks, file_of_choices, loads_of, open_choices
from dtgpt.compare.float64 import move, trace_in_float64
from dtgpt.compare.own_check import OwnFault, Snapshot, far_from_float64, repeat_step
from dtgpt.compare.rounding import comparable
from dtgpt.compare.shared_state import (
    Apart,
    differences,
    has_state,
    names_of_states,
    save_state,
    state_of,
    take_state,
)
from dtgpt.compare.trace import FP8_EPS, traced
from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.config.execution import Settings
from dtgpt.config.recipe import Recipe
from dtgpt.optim.fp8.precision import FP8
from dtgpt.parallel.gradients import choose_sums
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shard
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.train.objective import LanguageModel
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import load_recipe
from dtgpt.train.trainer import Trainer
from dtgpt.util.hardware import peak_memory

# How a step of a plan rounds otherwise than one process with the same micro-batches: it only adds gradients in another
# order, in fp32; adds them in 16 bits where weights have 16 bits; or also computes products in other pieces. With
# `--reduce exact` it may have the same bits.
Rounding = Literal["none", "order", "sums", "products"]

PRECISIONS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


@dataclass
class Record:
    """What one plan did, whole tensors on the CPU; gathered on rank 0."""

    dtype: str
    rounding: Rounding
    losses: list[float]  # of each step, as the following three
    norms: list[float]  # of the gradient; infinite in a step that fp16 skips
    rates: list[float]  # learning rates
    scales: list[float]  # loss scales after the step; none but in fp16
    memory: list[float]  # peak of each rank in GiB
    planned: float | None  # what `dtgpt plan` says of the fullest rank; None on a CPU, whose memory is not counted so
    initial: str  # digest of the initial weights
    # "first gradient/NAME", "last gradient/NAME", "weight/NAME"; of a traced run "first update/NAME", too
    tensors: dict[str, Tensor]
    stale: list[str] = field(default_factory=list)  # parameters whose 16-bit copy is not that of the new weights
    fp8: bool = False  # whether products are in fp8
    # The following are of traced runs, and not of those of older code.
    tokens: list[list[str]] = field(default_factory=list)  # of each step, numbers and digests of the samples
    held_out: float | None = None  # validation loss after the last step
    apart: list[Apart] = field(default_factory=list)  # weights and the optimizer's state, beside those of one process
    unrepeated: OwnFault | None = None  # where the reference does not repeat itself
    loads: list[dict[str, list[int]]] = field(default_factory=list)  # of each step: choices of experts, by block
    flips: list[Flip] = field(default_factory=list)  # choices of experts that are not those of the reference
    turned: int = 0  # how many there are
    chosen: int = 0  # tokens that chose, in each layer
    far: OwnFault | None = None  # where it is further from float64 than its precision explains

    @property
    def flips_per_million(self) -> float:
        """How many of a million tokens have other experts than in the reference, in each layer."""
        return 1e6 * self.turned / max(1, self.chosen)

    @property
    def told_choices(self) -> str:
        """How many choices of experts rounding has turned over, in words; empty where none was compared."""
        if not self.chosen:
            return ""
        rate = (
            f"choices of experts: {self.turned} of {self.chosen:,} are others ({self.flips_per_million:.3g} per "
            "million)"
        )
        return f"{rate}; {min(self.flips, key=lambda flip: (flip.step, -flip.gap))}" if self.flips else rate

    @property
    def eps(self) -> float:
        """The relative distance of neighbours in the type of the activations."""
        return torch.finfo(getattr(torch, self.dtype.removeprefix("torch."))).eps

    @property
    def precision(self) -> str:
        """The type of products, in words."""
        return "fp8" if self.fp8 else PRECISIONS[self.dtype]

    @property
    def eps_of_products(self) -> float:
        """The same of what products take."""
        return FP8_EPS if self.fp8 else self.eps

    @property
    def travel(self) -> float:
        """How far the optimizer may have moved a weight."""
        return sum(self.rates)


@dataclass(frozen=True)
class Tracing:
    """What a run leaves for `dtgpt.compare.gate` beside its record.

    file: where the first step is traced. shared: the weights and the state of the optimizer from which the last step of
    every run begins; the reference writes it. is_reference: whether this run does, and computes the first step in
    float64. moved: by which seed weights are moved before the first and the last step; 0: not at all.
    """

    file: Path
    shared: Path
    is_reference: bool
    moved: int = 0


def record_run(words: list[str]) -> None:
    """Record the steps of a recipe, in each process of its plan. words: RECIPE.py, FILE, STEPS, MOVED, SHARED and ROLE
    of `dtgpt record`, then options."""
    path, file, steps, moved, shared, role, *options = words
    tracing = Tracing(Path(file), Path(shared), role == "reference", int(moved))
    with open_trainer(without_graphs(load_recipe(Path(path), options))) as trainer:
        if tracing.moved:
            move_weights(trainer, tracing.moved)
        save_record(record(trainer, int(steps), tracing=tracing), tracing.file)


def without_graphs(recipe: Recipe) -> Recipe:
    """Return a recipe whose choices of experts can be seen in each step: neither captured nor compiled, unless it says
    so."""
    if not hasattr(recipe.model, "num_experts"):
        return recipe
    graph, compiles = ("off" if given == "auto" else given for given in (recipe.graph, recipe.compile))
    return replace(recipe, graph=graph, compile=compiles)


def record(
    trainer: Trainer,
    steps: int,
    after_step: Callable[[], None] = lambda: None,
    tracing: Tracing | None = None,
    choices: Choices | None = None,
) -> Record | None:
    """Train `steps` steps, in each process of the plan, and return the record on rank 0. `after_step` is called after
    each. With `tracing`, the first step is traced, and the last one begins from the weights of the reference. choices:
    what sees those of experts; with `tracing` this is opened here."""
    mesh, settings, optimizer = trainer.mesh, trainer.settings, trainer.optimizer
    kept: dict[str, Tensor] = {}

    def keep(kind: str, value: Callable[[Shard], Tensor], chosen: Callable[[Shard], bool] | None = None) -> None:
        for name, whole in gather_whole(trainer.shards, value, chosen):
            if whole is not None:
                kept[f"{kind}/{name}"] = comparable(settings.model, name, whole)

    digest = hashlib.sha256()
    losses: list[float] = []
    norms: list[float] = []
    rates: list[float] = []
    scales: list[float] = []
    for _, whole in gather_whole(trainer.shards, attrgetter("local")):
        digest.update(b"" if whole is None else whole.numpy().tobytes())
    stale: list[str] = []
    apart: list[Apart] = []
    unrepeated = far = None
    tokens = {} if tracing is None else note_tokens(trainer)
    checked = tracing is not None and tracing.is_reference
    if tracing is not None:
        choices = open_choices(trainer, tracing.shared, tracing.is_reference)
    loads: list[dict[str, list[int]]] = []
    prepare = partial(as_the_run, trainer, choices)
    for step in range(steps):
        if tracing is not None and 0 < step == steps - 1:
            apart += share_state(trainer, tracing, tracing.shared, sum(rates))
            take_shared(trainer, tracing)
        begin = Snapshot(trainer) if tracing is not None and step == 0 else None
        trainer.expect_batch()
        seen = nullcontext() if choices is None else choices.of_step(trainer.step + 1, first_sample(trainer))
        with seen, nullcontext() if tracing is None or step > 0 else traced(trainer, tracing.file):
            loss = trainer.gradients()
        if step == 0:
            keep("first gradient", trainer.gradient)
        if step == steps - 1:
            keep("last gradient", trainer.gradient)
        if tracing is not None and step == 0 and checked:
            trace_in_float64(trainer, tracing.file, prepare=prepare)
            far = far_from_float64(trainer, tracing.file, kept, prepare)
        result = trainer.update(loss)
        if choices is not None:
            loads.append(loads_of(trainer) if choices.saw_all else {})
        if begin is not None:
            keep("first update", begin.moved)
            for name in names_of_states(trainer):
                keep(f"first {name}", partial(state_of, optimizer, name), partial(has_state, optimizer, name))
            stale = stale_copies(trainer)
        losses.append(trainer.mean_loss(result))
        norms.append(result.norm.item())
        rates.append(optimizer.lr.item())
        if optimizer.scaler is not None:
            scales.append(optimizer.scaler.scale.item())
        if tracing is not None and begin is not None and checked:
            unrepeated = repeat_step(trainer, begin, tracing.file)
        after_step()
    if choices is not None and tracing is not None and checked:
        choices.save(file_of_choices(tracing.shared))
    memory = mesh.gather(peak_memory(mesh.device))
    keep("weight", attrgetter("local"))
    held_out = None
    if tracing is not None:
        apart += share_state(trainer, tracing, tracing.shared.with_name(f"{tracing.shared.name}-last"), sum(rates))
        held_out = held_out_loss(trainer)
    planned = None
    if mesh.device.type == "cuda":
        planned = fullest(memory_by_rank(settings)).total / 2**30
    made = Record(
        dtype=str(settings.dtype),
        rounding=rounding_of(settings),
        losses=losses,
        norms=norms,
        rates=rates,
        scales=scales,
        memory=memory,
        planned=planned,
        initial=digest.hexdigest(),
        tensors=kept,
        stale=stale,
        fp8=trainer.settings.products == FP8,
        tokens=tokens_of_steps(mesh, tokens),
        held_out=held_out,
        apart=apart,
        unrepeated=unrepeated,
        loads=loads,
        **choices_of_ranks(mesh, choices),
        far=far if all(map(math.isfinite, norms[:1])) else None,
    )
    return made if mesh.rank == 0 else None


def note_tokens(trainer: Trainer) -> dict[int, dict[int, str]]:
    """Return a dict to which every later step adds the digests of this rank's samples, by their numbers."""
    steps: dict[int, dict[int, str]] = {}
    assert isinstance(trainer.objective, LanguageModel)
    batches = trainer.objective.batches
    take = batches.take

    def noted(step: int) -> tuple[Tensor, ...]:
        windows, sample_ids, *_ = taken = take(step)
        digests = (hashlib.sha256(window.numpy().tobytes()).hexdigest()[:16] for window in windows.cpu())
        steps[step] = dict(zip(sample_ids.tolist(), digests, strict=True))
        return taken

    batches.take = noted  # type: ignore[method-assign]
    return steps


def first_sample(trainer: Trainer) -> int:
    """Return the number in the global batch of the first sample of this rank in the next step."""
    return trainer.mesh.place.dp * trainer.micro_batches * trainer.settings.micro_batch_size


def tokens_of_steps(mesh: Mesh, own: Mapping[int, Mapping[int, str]]) -> list[list[str]]:
    """Return of each step the numbers and digests of the samples of all ranks."""
    ranks = mesh.gather(own)
    return [
        [f"{number} {text}" for number, text in sorted({pair for rank in ranks for pair in rank[step].items()})]
        for step in sorted(own)
    ]


def held_out_loss(trainer: Trainer) -> float | None:
    """Return the validation loss on as many samples as a step has, and one more, by which one replica has a batch more
    than others; None where there is no validation text."""
    most = trainer.sizes.at(trainer.step - 1) + 1
    trainer.log = replace(trainer.log, eval_samples=min(trainer.log.eval_samples, most))
    found = trainer.held_out_loss()
    return None if found is None else found[0]


def stale_copies(trainer: Trainer) -> list[str]:
    """Return the parameters of which any rank computes with another copy than that of its own weights."""
    pairs = [(shard, shard.low_precision) for shard in trainer.shards]
    own = [s.name for s, copy in pairs if copy is not None and not torch.equal(copy, s.local.to(copy.dtype))]
    return sorted({name for names in trainer.mesh.gather(own) for name in names})


def share_state(trainer: Trainer, tracing: Tracing, file: Path, travel: float) -> list[Apart]:
    """Write the weights and the optimizer's state of the reference; return by how much those of another run differ.
    travel: how far the optimizer may have moved a weight."""
    if tracing.is_reference:
        save_state(trainer, file)
    return [] if tracing.is_reference or not file.exists() else differences(trainer, file, travel)


def take_shared(trainer: Trainer, tracing: Tracing) -> None:
    """Take the weights and the optimizer's state that the reference has written, so that the next step of each run
    begins with the same ones."""
    if not tracing.is_reference:
        take_state(trainer, tracing.shared)
        if tracing.moved:
            move_weights(trainer, tracing.moved)


def rounding_of(settings: Settings) -> Rounding:
    """Return how a step rounds otherwise than one process does."""
    plan, sums = settings.plan, choose_sums(settings)
    if (plan.tp > 1 and not sums.spans_tp) or plan.cp > 1 or plan.splits_backward:
        return "products"
    if sums.orderless:
        return "none"
    if plan.ep > 1:  # of rows of several ranks
        return "products"
    return "order" if plan.world == 1 or (plan.zero and plan.pp == 1) else "sums"


def move_weights(trainer: Trainer, seed: int = 0) -> None:
    """Move each initial weight by what the last bit of the run's type can add. What follows differs from the run of
    these weights by rounding alone. Works on one process."""
    bit = max(2.0**-23, torch.finfo(trainer.settings.dtype).eps / 2)
    move([shard.local for shard in trainer.shards], bit, seed)
    trainer.shards.publish()


def save_record(found: Record | None, file: Path) -> None:
    """Write on rank 0 the record that `read_record` reads."""
    if found is not None:
        values = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "tensors"}
        save_file(found.tensors, file, metadata={"record": json.dumps(values)})


def read_record(file: Path) -> Record:
    """Return what `save_record` wrote."""
    with safe_open(file, "pt") as saved:
        tensors = {key: saved.get_tensor(key) for key in saved.keys()}  # noqa: SIM118
        values = json.loads(saved.metadata()["record"])
    values["apart"] = [Apart(*each) for each in values.get("apart", [])]
    values["flips"] = [Flip(*each) for each in values.get("flips", [])]
    for name in ("unrepeated", "far"):
        values[name] = OwnFault(*values[name]) if values.get(name) else None
    return Record(**values, tensors=tensors)
