"""What a run is made of before its first step: data, a trainer, weights, a run folder."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dtgpt.checkpoint.ends import ends_of
from dtgpt.checkpoint.load import check_same_model, find_checkpoint, load_foreign_training, load_weights
from dtgpt.checkpoint.manifest import Checkpoint, quarantine_newer
from dtgpt.checkpoint.open import formats, open_config, open_source
from dtgpt.checkpoint.tokenizer import check_size
from dtgpt.config.batch_size import BatchSizes
from dtgpt.config.recipe import Recipe
from dtgpt.data.checks import without_effect
from dtgpt.data.dataset import Dataset, default_cache
from dtgpt.data.open import DataRequest, open_dataset
from dtgpt.data.tokenizers.open import load_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import TrainingSource
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.folder import RunLock, changes_since, create_run
from dtgpt.train.checkpoints import bases, restore
from dtgpt.train.job import Job, ResumePoint, make_job
from dtgpt.train.objective import objective_of
from dtgpt.train.own_tokenizer import check_own_tokenizer, model_to_begin_with
from dtgpt.train.processes import Group, join
from dtgpt.train.trainer import Trainer
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.process import Process

LOOKED_AT = 64  # samples that are read at a time


@contextmanager
def open_trainer(recipe: Recipe, run: Path | None = None) -> Iterator[Trainer]:
    """Yield a trainer of the recipe without a run of its own: processes, data, model, optimizer. It is at its first
    step, or at that of the newest checkpoint in the folder of `run`."""
    job = make_job(recipe, ResumePoint(run=run), Process.from_environment().world)
    with ExitStack() as stack:
        group = join(job, stack)
        checkpoint = None if run is None else find_checkpoint(group.mesh, run, own=type(recipe.model))
        dataset = read_on_every_node(lambda: read_dataset(job.recipe), group.mesh, group.process)
        trainer = make_trainer(job, group, dataset, checkpoint)
        if checkpoint is not None:
            restore(checkpoint, trainer, job.recipe.batch_sizes)
        trainer.objective.prepare(trainer.step, run)
        yield trainer


def make_trainer(job: Job, group: Group, dataset: Dataset, checkpoint: Checkpoint | None = None) -> Trainer:
    """Return a trainer at its first step. Its weights are random ones, or those that the recipe's `init_from` names; a
    run that goes on leaves them to the `checkpoint` that is loaded next, but for those that it freezes."""
    recipe = job.recipe
    if checkpoint is None:
        begin = model_to_begin_with(recipe.init_from, recipe.resume)
    else:
        places = (base.place(checkpoint, recipe.init_from) for base in bases())
        begin = next(places, None) if recipe.freezes_weights else None
    same = begin is not None and check_own_tokenizer(begin, recipe.data, dataset.tokenizer)
    draw_weights = begin is None and job.resume.run is None
    ends = ends_of(job.resume.run or (begin if same else None), dataset.tokenizer, recipe.model.vocab_size).ids
    objective = objective_of(recipe).make(dataset)
    trainer = Trainer(recipe, group.settings, group.mesh, objective, draw_weights, ends)
    if begin is not None and job.resume.foreign is None:
        load_initial_weights(begin, trainer)
    return trainer


def load_initial_weights(path: Path, trainer: Trainer) -> None:
    """Fill the shards of a new run with the weights at `path`, of another run or of another library. Raises UserError
    where it holds another model."""
    config = trainer.settings.model
    source = open_source(path, trainer.mesh, own=type(config))
    held = source.config
    if config.seq_length < held.seq_length and held.learns_positions:
        say(f"{path} has {held.seq_length} positions, of which this run takes the first {config.seq_length}")
        held = replace(held, seq_length=config.seq_length)
    elif not held.learns_positions:
        if config.seq_length > held.seq_length:
            say(f"{path} has {held.seq_length} positions; those up to {config.seq_length} are new to it", warning=True)
        held = replace(held, seq_length=config.seq_length)
    if type(held) is type(config):  # else the check says so
        held = _continued(path, held, config)
    check_same_model(path, held, config)
    for note in source.notes:
        say(note, warning=True)
    frozen = trainer.shards.frozen
    load_weights(source, frozen or trainer.shards)
    if frozen is not None:
        said = {base.entry: partial(base.describe, trainer.settings, path, source) for base in bases()}
        trainer.bases = {name: trainer.mesh.on_rank_0(describe) for name, describe in said.items()}


def _continued(path: Path, held: ModelConfig, config: ModelConfig) -> ModelConfig:
    """Return the model at `path` with those values of the run's that are asked for in spite of its own, and say so."""
    changed = [name for name in sorted(config.continued) if getattr(held, name) != getattr(config, name)]
    if changed:
        values = ", ".join(f"model.{name} {getattr(held, name)} -> {getattr(config, name)}" for name in changed)
        say(f"the weights of {path} go on with other positions: {values}")
    return replace(held, **{name: getattr(config, name) for name in changed})


def take_over(run: TrainingSource, trainer: Trainer, sizes: Callable[[int, int], BatchSizes]) -> None:
    """Go on with a run of another library, as a new run of dtgpt. `sizes`: as in `restore`."""
    for note in run.notes:
        say(note, warning=True)
    load_foreign_training(run, trainer.shards, trainer.optimizer.rule)
    step, samples = run.state["step"], run.state["consumed_samples"]
    trainer.restore(dict(run.state), sizes(step, samples))
    say(f"going on with {run.path} after step {step} and {counted(samples, 'sample')}")


def new_run(
    runs: str, name: str, lock: RunLock, init_from: str | None, tokenizer: Tokenizer, kind: type[ModelConfig]
) -> Path:
    """Return a new run folder, locked by `lock`, with what a run with this tokenizer and a model of the class `kind`
    keeps of the model that its weights are from. Other arguments: as in a recipe."""
    run = create_run(Path(runs), name)
    lock.take(run)
    if init_from is not None:
        path = Path(init_from)
        config = open_config(path, kind)
        for form in formats():
            form.keep(path, config, tokenizer, run)
    return run


def continue_run(run: Path, values: Mapping[str, Any], step: int) -> None:
    """Say in which `values` of its recipe `run` differs from now on, and rename its checkpoints of later steps than
    this one: they are damaged, or of another history."""
    changes = changes_since(run, values)
    say("\n  ".join(["resuming, with other options than before:" if changes else "resuming", *changes]))
    for name in quarantine_newer(run / "checkpoints", step):
        say(f"a checkpoint that is newer than step {step} is called {name} from now on", warning=True)


def check_tokenizer(run: Path, ours: Tokenizer) -> None:
    """Raise UserError where `run`, which goes on, was trained with another tokenizer than `ours`."""
    if not load_tokenizer(run).is_same(ours):
        raise UserError(f"{run} was trained with another tokenizer; give the --data values that it began with")


def read_dataset(recipe: Recipe) -> Dataset:
    """Return the recipe's text or prepared tokens, checked against the recipe's model and options."""
    data = recipe.data
    for note in without_effect(data):
        say(note, warning=True)
    request = DataRequest(
        seq_length=recipe.sample_length,
        train_samples=data.train_samples or recipe.batch_sizes().before(recipe.num_steps),
        held_out_samples=recipe.log.eval_samples,
        seed=recipe.seed,
        cache=default_cache(),
        vocab_size=recipe.model.vocab_size,
        batch=recipe.global_batch_size,
    )
    dataset = open_dataset(data, request)
    if recipe.init_from:
        check_size(dataset.tokenizer, recipe.model)
    objective_of(recipe).check(dataset)
    dataset.check(recipe.sample_length, recipe.model.vocab_size)
    tokenizer = dataset.tokenizer
    if recipe.log.sample_tokens:
        tokenizer.encode(recipe.log.prompt)  # which raises UserError where the tokenizer cannot
    asked = [n for n in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(data, n)]
    if asked and tokenizer.end_of_text is None:
        raise UserError(
            f"data.{asked[0]}=on needs an end of text between documents, which the tokenizer {tokenizer.name} does not "
            "have; leave it out"
        )
    if data.eod_mask_loss and tokenizer.end_of_text is not None:
        samples = recipe.batch_sizes().before(recipe.num_steps)
        check_counted(dataset, tokenizer.end_of_text, samples, recipe.sample_length, recipe.seed)
    return dataset


def check_counted(dataset: Dataset, end: int, samples: int, seq_length: int, seed: int) -> None:
    """Raise UserError where all tokens of so many samples are ends of text, after which nothing counts."""
    key = fold(root_key(seed), "data")
    for first in range(0, samples, LOOKED_AT):  # of which the first ones say so for nearly all texts
        windows = dataset.windows(torch.arange(first, min(first + LOOKED_AT, samples)), seq_length, key)
        if windows[:, :-1].ne(end).any():
            return
    raise UserError(
        f"all tokens of {dataset.source} are ends of text, after which data.eod_mask_loss lets nothing count; leave it "
        "out, or give another text"
    )


def read_on_every_node(read: Callable[[], Dataset], mesh: Mesh, process: Process) -> Dataset:
    """Return what `read` returns. One process of each node calls it first and fills the node's cache, from which the
    others read."""
    found: list[Dataset] = []
    mesh.turns(lambda: found.append(read()), lambda rank: process.local_rank == 0)
    mesh.turns(lambda: found.append(read()), lambda rank: process.local_rank != 0)
    mesh.agree({"the text": found[0].digest}, "give every node the same data")
    return found[0]
