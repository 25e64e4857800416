"""Steps of a run that are computed again, from a checkpoint on, under any plan.

`dtgpt audit` starts `dtgpt recompute` in each process of the plan. It opens the run as one that goes on, writes nothing
into its folder, and leaves the lines of the steps in a file.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from dtgpt.checkpoint.load import find_checkpoint, read_part
from dtgpt.checkpoint.manifest import (
    Checkpoint,
    as_tuple,
    list_checkpoints,
    read_state,
    saved_model,
    step_folder,
    step_of,
)
from dtgpt.checkpoint.open import check_tokenizer
from dtgpt.compare.workers import run_workers
from dtgpt.config.overrides import leaves, replace_values
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import call_recipe, load_module, of_kind
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.config import ModelConfig
from dtgpt.receipts.answers import with_kept_answers
from dtgpt.receipts.check import Receipts, tensor
from dtgpt.receipts.start import execution_of
from dtgpt.receipts.state import Receipts as State
from dtgpt.run.saved_recipe import ABSENT, saved_value
from dtgpt.train.checkpoints import restore
from dtgpt.train.setup import Setup
from dtgpt.train.start import Job, ResumePoint, make_job
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process

# Of a run, what steps that are computed again do without.
WITHOUT = {
    "resume": None,
    "init_from": None,
    "exit_after": None,
    "exit_interval": None,
    "log.wandb": "off",
    "trackers.mlflow": "off",
    "trackers.trackio": "off",
    "trackers.comet": "off",
    "trackers.project": "dtgpt",
    "log.tensorboard": False,
    "log.eval_tasks": None,
    "log.sample_tokens": 0,
    "log.timers": False,
}


def own_class(recipe_file: Path | None) -> type[ModelConfig] | None:
    """Return the class of the model of a recipe file; None without one."""
    return None if recipe_file is None else type(call_recipe(load_module(recipe_file).recipe).model)


def recipe_of(receipts: Receipts, step: int, recipe_file: Path | None, plan: str, device: str | None) -> Recipe:
    """Return the recipe with which a run took a step, from its receipts, under another plan. recipe_file: that of the
    run, where it has classes of its own. Raises UserError."""
    start = receipts.start_of(step)
    saved = start["recipe"]
    if recipe_file is not None:
        recipe = call_recipe(load_module(recipe_file).recipe)
    else:
        newest = list_checkpoints(receipts.run / "checkpoints")[-1]
        config = saved_model(newest, read_state(newest), None)
        optimizer = OptimizerConfig(lr=1.0)
        recipe = Recipe(name=saved["name"], model=config, optimizer=optimizer, micro_batch_size=1, global_batch_size=1)
        if saved_value(saved, "grpo.group") not in (ABSENT, 0):
            recipe = with_kept_answers(recipe)
    recipe = of_kind(recipe, saved_value(saved, "optimizer.kind"))
    values = {name: as_tuple(value) for name, *_ in leaves(recipe) if (value := saved_value(saved, name)) is not ABSENT}
    known = {name for name, *_ in leaves(recipe)}  # some are of capabilities
    values |= {name: value for name, value in WITHOUT.items() if name in known}
    values |= {"plan": plan, "precision": start["precision"], "micro_batch_size": start["micro_batch_size"]}
    if device is not None:
        values["device"] = device
    file = values.get("data.tokenizer_file")
    if file is not None and not Path(file).exists():
        values |= {"data.tokenizer": "auto", "data.tokenizer_file": str(receipts.run / "tokenizer.json")}
    return replace_values(recipe, values)


@contextmanager
def opened(job: Job, receipts: Receipts, folder: Path, start: dict[str, Any]) -> Iterator[tuple[Trainer, State]]:
    """Yield a trainer at the step of a checkpoint of the run, and its receipts. start: the line of the start whose
    steps are taken. Raises UserError where the data or the tokenizer are others."""
    setup = Setup(job)
    with ExitStack() as stack:
        setup.join(stack)
        checkpoint = find_checkpoint(setup.mesh, receipts.run, folder, own=type(job.recipe.model))
        dataset = setup.read_dataset()
        if dataset.digest != start["data"]:
            raise UserError(
                f"{dataset.source} is not what {receipts.run} was trained on: its digest is {dataset.digest[:16]}..., "
                f"and the receipts say {start['data'][:16]}...; restore the data"
            )
        check_tokenizer(receipts.run, dataset.tokenizer)
        trainer = setup.make_trainer(dataset, checkpoint)
        state = next(each for each in trainer.optimizer.states if isinstance(each, State))
        state.bind(trainer)
        if state.labels != start["parts"]:
            raise UserError(
                f"the tensors of {receipts.run} have other names or sizes here; use the dtgpt that wrote it"
            )
        restore(checkpoint, trainer, job.recipe.batch_sizes)
        state.pending = []
        if state.answers is not None:
            state.answers.give_back(receipts.run)
        trainer.objective.prepare(trainer.step, receipts.run)
        yield trainer, state


def take_steps(trainer: Trainer, state: State, receipts: Receipts, last: int) -> dict[str, Any]:
    """Take the steps up to `last`, and return their lines; digests of the weights with which they began, and where a
    checkpoint is kept of a step; and where these are not those of its receipt, by how much its tensors differ."""
    found: dict[str, Any] = {"lines": [], "tables": {trainer.step: state.table()["digests"]}, "apart": {}}
    kept = {step_of(folder) for folder in list_checkpoints(receipts.run / "checkpoints")}
    while trainer.step < last:
        trainer.train_step()
        found["lines"] += state.collect()
        step = trainer.step
        if step in kept and step in receipts.tables:
            found["tables"][step] = state.table()["digests"]
            if found["tables"][step] != receipts.tables[step].value["digests"]:
                folder = step_folder(receipts.run / "checkpoints", step)
                found["apart"][step] = differences(trainer, state, Checkpoint(folder, own=type(trainer.settings.model)))
    return found


def differences(trainer: Trainer, state: State, checkpoint: Checkpoint) -> dict[str, float]:
    """Return by how much each tensor of a checkpoint differs from what the trainer has, ||a - b|| / ||b|| with b from
    the trainer, by label. Every rank calls it, and reads what it holds."""
    own: dict[str, tuple[float, float]] = {}
    for label, shape, part, values in state.held():
        there = torch.empty(values.shape)
        read_part(checkpoint, tensor(label), shape, part, there)
        here = values.double().cpu()
        own[label] = float((there.double() - here).square().sum()), float(here.square().sum())
    sums: dict[str, tuple[float, float]] = {}
    for each in trainer.mesh.gather(own):
        for label, (apart, size) in each.items():
            one, other = sums.get(label, (0.0, 0.0))
            sums[label] = one + apart, other + size
    return {label: (apart / max(size, 1e-300)) ** 0.5 if apart else 0.0 for label, (apart, size) in sums.items()}


def work(words: list[str]) -> int:
    """Run `dtgpt recompute RUN FIRST LAST FILE PLAN DEVICE RECIPE`, which `dtgpt audit` starts in each process."""
    if len(words) != 7:
        raise UserError("dtgpt recompute is internal to dtgpt audit; use dtgpt audit")
    run, first, last, file, plan, device, recipe_file = words
    receipts = Receipts(Path(run))
    path = Path(recipe_file) if recipe_file != "none" else None
    recipe = recipe_of(receipts, int(last), path, plan, None if device == "none" else device)
    folder = step_folder(receipts.run / "checkpoints", int(first))
    job = make_job(recipe, ResumePoint(run=receipts.run, checkpoint=folder), Process.from_environment().world)
    with opened(job, receipts, folder, receipts.start_of(int(last))) as (trainer, state):
        found = {"execution": execution_of(trainer), **take_steps(trainer, state, receipts, int(last))}
        if trainer.mesh.rank == 0:
            Path(file).write_text(json.dumps(found))
    return 0


def start_processes(world: int, words: list[str]) -> dict[str, Any]:
    """Start `dtgpt recompute` in the processes of a plan, wait for them, and return what they found. words: its
    arguments. Raises UserError with the sentence of a process that fails."""
    failed = run_workers(world, ["recompute", *words])
    if failed is not None:
        raise UserError(failed or "the steps could not be computed again; see the output above")
    return json.loads(Path(words[3]).read_text())
