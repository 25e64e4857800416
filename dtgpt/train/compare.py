"""`dtgpt compare`: run the same steps under several plans and hold each against one process.

What is compared: the loss of every step, the gradients of the first and of the last step, the initial and the final
weights. Gradients and weights are compared tensor by tensor, ||a - b|| / ||b||, and the worst tensor counts; a weight's
difference is held against how far AdamW may have moved it where that is more, since a bias that begins at zero makes
whole steps by the sign of what may be rounding. Elements whose gradient is rounding alone stay out
(`ModelConfig.comparable`).
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dtgpt.config.plan import Plan
from dtgpt.config.plan_names import SINGLE, parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.parallel.process import VARIABLES
from dtgpt.parallel.shards import Shard
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.train.settle import check_run
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import counted, hanging, say, say_error
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import peak_memory

REFERENCE = SINGLE
# (loss, tensors): sums in another order differ by rounding. bf16 keeps 8 bits of an activation, and AdamW makes whole
# steps of small gradients, so that single tensors differ more than the loss does.
TOLERANCE = {"torch.float32": (1e-5, 1e-4), "torch.bfloat16": (2e-3, 1e-1), "torch.float16": (1e-3, 5e-2)}


@dataclass
class Record:
    """What one plan did, whole tensors on the CPU; gathered on rank 0."""

    dtype: str
    losses: list[float]
    norms: list[float]
    memory: list[float]  # peak of each rank in GiB
    planned: float | None  # what `dtgpt plan` says of the fullest rank; None on a CPU, whose memory is not counted so
    initial: str  # digest of the initial weights
    travel: float  # how far AdamW may have moved a weight: the sum of the learning rates
    tensors: dict[str, Tensor]  # "first gradient/NAME", "last gradient/NAME", "weight/NAME"


@dataclass
class Difference:
    """The largest relative differences of a plan from the reference, and the tensors in which they lie."""

    loss: float
    gradient: float
    gradient_in: str
    weight: float
    weight_in: str
    same_initial: bool

    def within(self, loss: float, tensors: float) -> bool:
        """Whether the differences are at most these; never where the initial weights differ or there is a NaN."""
        return self.same_initial and self.loss <= loss and self.gradient <= tensors and self.weight <= tensors


def record(trainer: Trainer, steps: int, after_step: Callable[[], None] = lambda: None) -> Record | None:
    """Train `steps` steps, in each process of the plan, and return the record on rank 0. `after_step` is called after
    each."""
    mesh, settings = trainer.mesh, trainer.settings
    kept: dict[str, Tensor] = {}

    def keep(kind: str, value: Callable[[Shard], Tensor]) -> None:
        for name, whole in trainer.shards.gather(value):
            if whole is not None:
                kept[f"{kind}/{name}"] = settings.model.comparable(name, whole)

    digest, losses, norms, travel = hashlib.sha256(), [], [], 0.0
    for _, whole in trainer.shards.gather(attrgetter("local")):
        digest.update(b"" if whole is None else whole.numpy().tobytes())
    for step in range(steps):
        loss = trainer.gradients()
        if step == 0:
            keep("first gradient", trainer.gradient)
        if step == steps - 1:
            keep("last gradient", trainer.gradient)
        result = trainer.update(loss)
        losses.append(trainer.mean_loss(result))
        norms.append(result.norm.item())
        travel += trainer.optimizer.lr.item()
        after_step()
    memory = mesh.gather(peak_memory(mesh.device))
    keep("weight", attrgetter("local"))
    planned = None
    if mesh.device.type == "cuda":
        planned = fullest(memory_by_rank(settings)).total / 2**30
    made = Record(str(settings.dtype), losses, norms, memory, planned, digest.hexdigest(), travel, kept)
    return made if mesh.rank == 0 else None


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
    return Record(**values, tensors=tensors)


def difference(record: Record, reference: Record, least: float = 0.0) -> Difference:
    """Return the largest differences; `least` as of `tensor_differences`."""
    worst = {"gradient": (0.0, ""), "weight": (0.0, "")}
    for name, value in tensor_differences(record, reference, least).items():
        kind, _, parameter = name.partition("/")
        kind = kind.split()[-1]
        worst[kind] = max(worst[kind], (value, parameter), key=lambda pair: (math.isnan(pair[0]), pair[0]))
    losses = [abs(a - b) / abs(b) for a, b in zip(record.losses, reference.losses, strict=True)]
    loss = max(losses, key=lambda value: (math.isnan(value), value))
    return Difference(loss, *worst["gradient"], *worst["weight"], record.initial == reference.initial)


def tensor_differences(record: Record, reference: Record, least: float = 0.0) -> dict[str, float]:
    """Return the relative difference of each tensor of the reference, by its key in `Record.tensors`. That of a
    gradient is held against `least` of the norm of all gradients where that is more than its own norm."""
    found = {}
    for name, theirs in reference.tensors.items():
        kind, floor = name.partition("/")[0], reference.travel * math.sqrt(theirs.numel())
        if kind != "weight":
            floor = least * reference.norms[0 if kind == "first gradient" else -1]
        found[name] = relative(record.tensors[name], theirs, floor)
    return found


def relative(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """Return ||a - b|| / ||b||, or ||a - b|| / `least` where that is less."""
    scale = torch.linalg.vector_norm(b, dtype=torch.float64).clamp(min=least)
    distance = torch.linalg.vector_norm(a - b, dtype=torch.float64)
    return (distance / scale).item() if scale > 0 else (0.0 if distance == 0 else math.inf)


def compare(
    recipe: Recipe, path: Path, names: list[str], steps: int, tolerance: float | None, options: list[str]
) -> int:
    """Run the reference and each plan in processes of their own and print how they differ. Returns 0, or 1 where a plan
    is further from the reference than `tolerance` (None: by precision)."""
    check_run(recipe)
    most = recipe.num_steps
    if steps > most:
        raise UserError(f"--steps {steps} is more than the recipe's {most}; use {most} or fewer")
    if recipe.resume:
        raise UserError("dtgpt compare begins with initial weights; leave --resume out")
    plans = {name: fitting_plan(name, names, recipe.plans) for name in [REFERENCE, *names]}
    for name, plan in plans.items():
        try:
            replace(recipe, plan=name).plan_for(plan.world)
        except UserError as error:
            raise UserError(f"plan {name}: {error}") from None
    with tempfile.TemporaryDirectory(prefix="dtgpt-compare-") as folder:
        records: dict[str, Record] = {}
        differences: dict[str, Difference] = {}
        for name, plan in plans.items():
            say(f"{name}: {counted(plan.world, 'process', 'processes')}, {counted(steps, 'step')}")
            file = Path(folder) / f"{len(records)}.safetensors"
            records[name] = run_plan(path, name, plan.world, steps, options, file)
            if not all(map(math.isfinite, records[name].norms)) and recipe.precision == "fp16":
                raise UserError(
                    f"plan {name} skipped steps of fp16, whose gradients cannot be compared; use a smaller scale such "
                    "as --loss_scale.initial 4096"
                )
            differences[name] = difference(records[name], records[REFERENCE])
            file.unlink()
            if name != REFERENCE:
                records[name].tensors.clear()  # gigabytes
    limits = TOLERANCE[records[REFERENCE].dtype] if tolerance is None else (tolerance, tolerance)
    say(report(records, differences, limits))
    return 0 if all(d.within(*limits) for d in differences.values()) else 1


def fitting_plan(name: str, names: list[str], own: Mapping[str, Plan]) -> Plan:
    """Return the plan of a name with dp filled in; `own`: the plans of the recipe. A name without a data parallel
    degree has one replica where tensor or pipeline parallelism say how many processes there are; `dp` and `zero3` fill
    as many processes as the largest other plan, 2 at least."""
    plan = parse_plan(name, own)
    if plan.dp is not None or plan.tp * plan.pp > 1:
        return plan.for_world((plan.dp or 1) * plan.tp * plan.pp)
    others = [parse_plan(other, own) for other in names]
    return plan.for_world(max([2, *(p.world for p in others)]))


def run_plan(path: Path, name: str, world: int, steps: int, options: list[str], file: Path) -> Record:
    """Start the processes of a plan through torchrun, wait for them, and read what they recorded."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    worker = ["-m", "dtgpt", "record", str(path), str(file), str(steps), *options, "--plan", name]
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES.values()}
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        [sys.executable, *launcher, *worker], env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        output = done.stdout + done.stderr
        sentence = next((line for line in output.splitlines() if line.startswith("dtgpt: ")), None)
        if sentence is None:
            say_error(output[-5000:])
        raise UserError(
            f"plan {name}: {sentence.removeprefix('dtgpt: ') if sentence else 'failed; see its output above'}"
        )
    return read_record(file)


def report(records: dict[str, Record], differences: dict[str, Difference], limits: tuple[float, float]) -> str:
    """The losses by step, then the largest differences and the memory of the fullest rank."""
    names, width = list(records), max(10, *(len(name) + 2 for name in records))
    beside = max(1, (shutil.get_terminal_size().columns - 6) // width)
    lines = []
    for first in range(0, len(names), beside):
        some = names[first : first + beside]
        lines += ["", "loss".ljust(6) + "".join(name.rjust(width) for name in some)]
        for step, losses in enumerate(zip(*(records[name].losses for name in some), strict=True), start=1):
            lines.append(f"{step:<6}" + "".join(f"{loss:{width}.6f}" for loss in losses))
    lines += ["", "largest relative differences, initial weights bit by bit, memory in GiB"]
    lines += [f"{'':<{width}}{'loss':>9}{'gradient':>10}{'weight':>10}{'initial':>9}{'GiB':>7}{'planned':>9}"]
    for name, d in differences.items():
        figures = f"{d.loss:9.1e}{d.gradient:10.1e}{d.weight:10.1e}{'equal' if d.same_initial else 'DIFFER':>9}"
        planned = f"{records[name].planned:9.2f}" if records[name].planned else f"{'-':>9}"
        lines.append(f"{name:<{width}}{figures}{max(records[name].memory):7.2f}{planned}")
        if not d.within(*limits):
            worst = f"gradient in {d.gradient_in}, weight in {d.weight_in}"
            lines.append(hanging(f"  MORE THAN {limits[0]:g} (loss) or {limits[1]:g} (tensors): {worst}", 4))
    return "\n".join(lines)
