"""What a rank does with a case: a few steps, an evaluation, and digests of all that copies must agree in."""

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.checkpoint.save import Saver
from dtgpt.compare.choices import file_of_choices, open_choices
from dtgpt.compare.fuzz.case import Case, Run, Setting
from dtgpt.compare.record import Record, move_weights, note_tokens, record, without_graphs
from dtgpt.compare.shared_state import rows_of_states, whole_states
from dtgpt.models.batch import Batch
from dtgpt.optim.fp8.scales import Fp8Scales
from dtgpt.parallel.build import scale_gradients
from dtgpt.parallel.engine import TrainingEngine
from dtgpt.parallel.gradients import local_gradient
from dtgpt.train.checkpoints import state_of
from dtgpt.train.observer import is_due
from dtgpt.train.setup import open_trainer
from dtgpt.train.texts.generate import generate_text
from dtgpt.train.trainer import Trainer


class Seen(NamedTuple):
    """What one rank saw."""

    record: Record | None  # of the plan, on rank 0
    held_out: float | None  # mean loss
    dp: int  # the coordinate of this rank
    samples: list[list[tuple[int, str]]]  # (sample, digest of its tokens) of each step
    copies: list[tuple[str, str]]  # (name and region, digest) of each tensor that this rank holds
    between: tuple[float | None, ...] = ()  # mean validation losses after earlier steps
    texts: tuple[str | None, ...] = ()  # generated after earlier steps and the last
    begin: str = ""  # digest of weights and the optimizer's state, on rank 0, before the first step
    end: str = ""  # after the last


def measure(setting: Setting, case: Case, run: Run) -> Seen | None:
    """Train the steps of a case: in each process of its plan, or all of them on one process as its reference. Where the
    case has two plans, the steps under the `first` end with a checkpoint, from which the `plan` goes on. To know what
    rounding does to the case: on one process in fp32 (`exact`; None if the case is in fp32), or from initial weights
    that are `moved` by a last bit. One process takes all steps, and in fp32 each as one pass over its whole batch. All
    runs of a model with experts take the choices of the reference, which runs first."""
    recipe = setting.recipe_for(case, run)
    if recipe is None:
        return None
    if case.first and case.first.batch and run not in ("plan", "first"):  # sums know the most micro-batches of a step
        largest = max(case.first.batch, recipe.global_batch_size)
        recipe = replace(recipe.counted(), global_batch_size=largest)
    resumes = case.first is not None and run == "plan"
    with open_trainer(without_graphs(recipe), setting.run_folder if resumes else None) as trainer:
        if run == "moved":
            move_weights(trainer)
        if run not in ("plan", "first"):
            _set_batch_sizes(trainer, setting, case)
            if recipe.precision == "fp32" and recipe.reduce == "fast":
                trainer.engine = WholeBatchEngine(trainer)
        tokens, notes, begin = note_tokens(trainer), _Notes(trainer), _digest_of_state(trainer)
        last = case.first.steps if case.first and run == "first" else trainer.steps
        choices = open_choices(trainer, setting.shared, run == "reference")
        made = record(trainer, last - trainer.step, notes.after_step, choices=choices)
        if choices is not None and run == "reference":
            choices.save(file_of_choices(setting.shared))
        seen = Seen(
            record=made,
            held_out=notes.held_out,
            dp=trainer.mesh.place.dp,
            samples=[list(step.items()) for step in tokens.values()],
            copies=_copies(trainer),
            between=tuple(notes.between),
            texts=tuple(notes.texts),
            begin=begin,
            end=_digest_of_state(trainer),
        )
        if run == "first":
            _save(trainer, setting.run_folder / "checkpoints", asdict(recipe))
        return seen


class _Notes:
    """Validation losses and generated texts of a trainer: after its last step, and in between as its recipe wants."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.held_out: float | None = None
        self.between: list[float | None] = []
        self.texts: list[str | None] = []

    def after_step(self) -> None:
        log, step, is_last = self.trainer.log, self.trainer.step, self.trainer.step == self.trainer.steps
        if is_last:
            self.held_out = self._evaluate()
        elif is_due(step, log.eval_interval):
            self.between.append(self._evaluate())
        if is_last or is_due(step, log.sample_interval):
            self.texts.append(generate_text(self.trainer))

    def _evaluate(self) -> float | None:
        found = self.trainer.held_out_loss()
        return found and found[0]


def _save(trainer: Trainer, folder: Path, recipe: dict[str, Any]) -> None:
    """Write a checkpoint while the next step, which is not part of the case, changes weights and the optimizer's state.
    recipe: its fields."""
    background = recipe["checkpoint"]["background"]
    with Saver(folder, trainer.shards, trainer.optimizer.rule, background=background) as saver:
        trainer.before_update = saver.before_update
        saver.save(trainer.step, state_of(trainer, recipe))
        trainer.train_step()


def _digest_of_state(trainer: Trainer) -> str:
    """Return a digest of all weights, the optimizer's state and the history of fp8's scales, the same under every plan;
    without weights and state on ranks other than 0."""
    found = hashlib.sha256()
    for name, whole in (*whole_states(trainer), *sorted(rows_of_states(trainer).items())):
        found.update(f"{name} {digest(whole)}".encode())
    found.update(repr(trainer.optimizer.state().get("fp8_exponents")).encode())
    return found.hexdigest()


class WholeBatchEngine(TrainingEngine):
    """The gradient of the mean loss over a whole batch, by one backward pass of autograd: without micro-batches, their
    fractions, sums of gradients or a schedule, which a plan could get wrong in the same way as one process. Works on
    one process in fp32."""

    def __init__(self, trainer: Trainer):
        (self.model,), self.shards, self._engine = trainer.stages, trainer.shards, trainer.engine
        scale_gradients(trainer.stages, None)

    def gradients(self, micro_batches: int, batch: Batch) -> Tensor:
        for shard in self.shards:
            shard.parameter.grad = None
        loss = self.model(*batch)
        loss.backward()
        self.shards.gradients = [local_gradient(shard.parameter) for shard in self.shards]
        return loss.detach()

    def evaluate(self, batch: Batch) -> Tensor | None:
        return self._engine.evaluate(batch)


def _set_batch_sizes(trainer: Trainer, setting: Setting, case: Case) -> None:
    """Give a run without interruption the batch sizes that a case with two plans has, and the learning rates that
    follow from them."""
    first = setting.recipe_for(case, "first")
    if case.first is None or case.first.batch is None or first is None:
        return
    earlier = first.batch_sizes()
    sizes = setting.recipe_of(case).batch_sizes(case.first.steps, earlier.before(case.first.steps))
    sizes.pieces = [piece for piece in earlier.pieces if piece[0] < case.first.steps] + sizes.pieces
    trainer.sizes = sizes
    rates = trainer.schedule.rates(trainer.steps, trainer.sizes)
    trainer.optimizer.schedule = torch.tensor(rates, device=trainer.mesh.device)


def _copies(trainer: Trainer) -> list[tuple[str, str]]:
    found, rule = [], trainer.optimizer.rule
    for shard in trainer.shards:
        where = f"{shard.name} {[(part.start, part.stop) for part in shard.region]}"
        found.append((where, digest(shard.local)))
        states = {name: tensor for name, tensor in rule.state(shard.index).items() if len(tensor)}
        found += [(f"{where}.{name}", digest(tensor.float())) for name, tensor in states.items()]
        if shard.low_precision is not None:
            found.append((f"{where} in 16 bits", digest(shard.low_precision.float())))
    for state in trainer.optimizer.states:
        if isinstance(state, Fp8Scales):
            found += [("history of fp8", digest(state.history)), ("scales of fp8", digest(state.scale))]
    return found


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
