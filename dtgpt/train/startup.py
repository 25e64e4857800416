"""Before the first step: check the recipe, bring the processes together, find what to resume, read data."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from dtgpt.checkpoint.load import check_same_model, find_checkpoint, load_foreign_training, load_weights
from dtgpt.checkpoint.manifest import Checkpoint, quarantine_newer
from dtgpt.config.batch_size import BatchSizes
from dtgpt.config.execution import Settings, choose_device
from dtgpt.config.plan_choice import PlanChoice
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig
from dtgpt.data.checks import with_tokenizer
from dtgpt.data.dataset import Dataset, default_cache, load_dataset
from dtgpt.data.megatron.prepared import is_prepared, load_prepared
from dtgpt.data.tokenizers.open import load_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.hf.origin import origin_of
from dtgpt.interop.open import open_config, open_source, open_training
from dtgpt.interop.tokenizer import check_size
from dtgpt.liveness.losses import lost_peers_as_user_errors
from dtgpt.liveness.watch import Watch, watch_peers
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import TrainingSource
from dtgpt.parallel.launch import open_mesh
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import Shards
from dtgpt.planning.parameters import state_bytes
from dtgpt.run.folder import AUTO, RunLock, create_run, run_to_resume, values_of, why_new_run
from dtgpt.run.signals import StopRequest
from dtgpt.run.sinks import check_wandb
from dtgpt.run.tensorboard import import_tensorboard
from dtgpt.train.checkpoints import restore
from dtgpt.train.interval_loss import check_interval
from dtgpt.train.own_tokenizer import check_own_tokenizer, model_to_begin_with, with_own_tokenizer
from dtgpt.train.settle import check_run, counted
from dtgpt.train.tasks import tasks_of
from dtgpt.train.trainer import Trainer
from dtgpt.util import console
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import check_memory, memory_errors_as_user_errors
from dtgpt.util.process import Process


class Started(NamedTuple):
    """What a run has once its processes have met."""

    recipe: Recipe  # with a number of steps, and the tokenizer that `auto` means
    settings: Settings
    mesh: Mesh
    process: Process  # among those that the plan uses
    watch: Watch | None  # over the other processes, those that wait too


def start(recipe: Recipe, stack: ExitStack) -> Started:
    """Check a recipe, which `check_run` accepts, against the plan and the machine, then bring the processes of the plan
    together; `stack` ends the process group. Raises UserError in a process that the plan leaves over."""
    everyone = Process.from_environment()
    recipe = with_own_tokenizer(counted(recipe))
    recipe = replace(recipe, data=with_tokenizer(recipe.data, recipe.model.vocab_size))
    choice = recipe.choose_plan(everyone.world)
    if everyone.rank >= choice.plan.world:
        raise UserError(f"the plan {choice.plan.name} leaves rank {everyone.rank} over; only dtgpt train lets it wait")
    for line in choice.describe():
        say(line)
    process = everyone.among(choice.plan.world)
    check_wandb(recipe.log.wandb)
    if recipe.log.tensorboard:
        import_tensorboard()
    tasks_of(recipe.log)
    device = choose_device(recipe.device, process.local_rank)
    for note in recipe.notes(choice, device.type):
        say(note, warning=True)
    settings = recipe.settings(choice.plan, device)
    check_memory(state_bytes(settings, process.rank), process.local_world, device)
    stack.enter_context(memory_errors_as_user_errors("lower micro_batch_size (the curve stays the same)"))
    watch = None
    if everyone.world > 1 and not dist.is_initialized():
        watch = stack.enter_context(watch_over(everyone, choice, recipe.timeout, recipe.lost_after))
    stack.enter_context(lost_peers_as_user_errors(recipe.timeout, lambda: "start the run again"))
    values = {name: str(value) for name, value in values_of(recipe).items()}
    mesh = stack.enter_context(open_mesh(settings, recipe.timeout, process, values, watch))
    return Started(recipe, settings, mesh, process, watch)


def wait_for_others(process: Process, choice: PlanChoice, timeout: float, lost_after: float, stop: StopRequest) -> int:
    """Return the exit code of the run, for which a process that the plan leaves over waits without memory of a GPU. It
    ends like the others where a process is lost, and passes a signal that it gets on to rank 0."""
    with watch_over(process, choice, timeout, lost_after) as watch, stop:
        watch.remedy = lambda: "go on with --resume if the run has a checkpoint, else start it again"
        return watch.wait_for_end(lambda: stop.requested)


def run_watched(begun: Started, stop: StopRequest, work: Callable[[], int]) -> int:
    """Return the exit code that `work` returns, and tell it to the processes that wait. What one of these asks for by a
    signal, rank 0's `stop` is asked for."""
    if begun.watch is None:
        return work()
    begun.watch.on_stop = stop.ask
    code = work()
    if begun.process.rank == 0:
        begun.watch.end_run(code)
    return code


@contextmanager
def watch_over(process: Process, choice: PlanChoice, timeout: float, lost_after: float) -> Iterator[Watch]:
    """Yield the watch over all processes, which have agreed on the plan; those that wait are not in the process group.
    `lost_after`: as of `watch_peers`. Raises UserError where they do not meet within `timeout` seconds, or this one
    differs from rank 0."""
    with watch_peers(process, timeout, lost_after) as watch:
        store, plan = watch.rendezvous.store, choice.plan.name
        if process.rank == 0:
            store.set("plan", plan)
        if len(choice.fits) > 1 and (theirs := store.get("plan").decode()) != plan:
            raise UserError(
                f"rank {process.rank} differs from rank 0 in the plan: {plan} there, {theirs} on rank 0; start every "
                "rank with the same command on the same code"
            )
        yield watch


@contextmanager
def open_trainer(recipe: Recipe, run: Path | None = None) -> Iterator[Trainer]:
    """Yield a trainer of the recipe without a run of its own: processes, data, model, optimizer. It is at its first
    step, or at that of the newest checkpoint in the folder of `run`."""
    check_run(recipe)
    with ExitStack() as stack:
        begun = start(recipe, stack)
        checkpoint = None if run is None else find_checkpoint(begun.mesh, run)
        dataset = read_on_every_node(lambda: read_dataset(begun.recipe), begun.mesh, begun.process)
        trainer = make_trainer(begun, dataset, resuming=checkpoint is not None)
        if checkpoint is not None:
            restore(checkpoint, trainer, begun.recipe.batch_sizes)
        yield trainer


def make_trainer(begun: Started, dataset: Dataset, resuming: bool = False) -> Trainer:
    """Return a trainer at its first step, with the weights that the recipe begins with. resuming: the weights are left
    to the checkpoint that is loaded next."""
    recipe, mesh, given = begun.recipe, begun.mesh, None if resuming else begun.recipe.init_from
    if resuming and (foreign := model_to_begin_with(None, recipe.resume)):
        check_own_tokenizer(foreign, recipe.data, dataset.tokenizer)
    trainer = Trainer(recipe, begun.settings, mesh, dataset, draw_weights=not resuming and given is None)
    if given is not None:
        load_initial_weights(Path(given), recipe.model, dataset.tokenizer, trainer.shards, mesh, recipe.data)
    return trainer


def find_checkpoint_to_resume(resume: str | None, runs: str, name: str, mesh: Mesh, lock: RunLock) -> Checkpoint | None:
    """Return the checkpoint to resume, every file of which was verified, with its run folder locked by `lock`; None
    for a new run. `resume`, `runs`, `name`: as in a recipe."""
    run, chosen = mesh.on_rank_0(lambda: run_to_resume(resume, Path(runs), name))
    if run is None:
        if resume == AUTO:
            say(mesh.on_rank_0(lambda: why_new_run(Path(runs), name)))
        return None
    mesh.on_rank_0(lambda: lock.take(run))
    return find_checkpoint(mesh, run, chosen, check=check_interval)


def find_foreign_run(resume: str | None, model: ModelConfig, steps: int) -> TrainingSource | None:
    """Return the run of another library that `resume` of a recipe names; None for anything else. Raise UserError where
    it is of another model than the recipe's, or has done all `steps`."""
    run = open_training(resume, model.vocab_size)
    if run is None:
        return None
    held = run.config if run.config.learns_positions else replace(run.config, seq_length=model.seq_length)
    check_same_model(run.path, held, model)
    if (done := run.state["step"]) >= steps:
        raise UserError(f"{run.path} has already done {console.counted(done, 'step')}; raise --steps to go on")
    return run


def take_over(run: TrainingSource, trainer: Trainer, sizes: BatchSizes) -> None:
    """Go on with a run of another library, as a new run of dtgpt. `sizes`: of the steps that are left."""
    for note in run.notes:
        say(note, warning=True)
    load_foreign_training(run, trainer.shards, trainer.optimizer.rule)
    trainer.restore(dict(run.state), sizes)
    seen = console.counted(run.state["consumed_samples"], "sample")
    say(f"going on with {run.path} after step {run.state['step']} and {seen}")


def new_run(
    runs: str, name: str, mesh: Mesh, lock: RunLock, init_from: str | None = None, tokenizer: Tokenizer | None = None
) -> Path:
    """Return a new run folder, locked by `lock`, with what a run with this tokenizer keeps of the model `init_from`."""
    run = mesh.on_rank_0(lambda: create_run(Path(runs), name))
    mesh.on_rank_0(lambda: lock.take(run))
    if init_from is not None:
        path = Path(init_from)
        mesh.on_rank_0(lambda: origin_of(path, open_config(path), tokenizer).save(run))
    return run


def leave_newer(run: Path, step: int) -> None:
    """Rename checkpoints of later steps than the one from which the run goes on: they are damaged, or of another
    history."""
    for name in quarantine_newer(run / "checkpoints", step):
        say(f"a checkpoint that is newer than step {step} is called {name} from now on", warning=True)


def load_initial_weights(
    path: Path, config: ModelConfig, tokenizer: Tokenizer | None, shards: Shards, mesh: Mesh,
    data: DataConfig | None = None,
) -> None:  # fmt: skip
    """Fill the shards of a new run with the weights of another one, or of another library. `tokenizer`: of `data`."""
    source = open_source(path, mesh)
    held = source.config
    if config.seq_length < held.seq_length and held.learns_positions:
        say(f"{path} has {held.seq_length} positions, of which this run takes the first {config.seq_length}")
        held = replace(held, seq_length=config.seq_length)
    elif not held.learns_positions:
        if config.seq_length > held.seq_length:
            say(f"{path} has {held.seq_length} positions; those up to {config.seq_length} are new to it", warning=True)
        held = replace(held, seq_length=config.seq_length)
    check_same_model(path, held, config)
    if tokenizer is not None:
        check_own_tokenizer(path, data or DataConfig(), tokenizer)
    for note in source.notes:
        say(note, warning=True)
    load_weights(source, shards)


def check_tokenizer(run: Path, ours: Tokenizer) -> None:
    """Raise UserError where `run`, which goes on, was trained with another tokenizer than `ours`."""
    if not load_tokenizer(run).is_same(ours):
        raise UserError(f"{run} was trained with another tokenizer; give the --data values that it began with")


def read_dataset(recipe: Recipe) -> Dataset:
    """Return the recipe's text or prepared tokens, checked against the recipe's model and options."""
    data = recipe.data
    if is_prepared(data.path):
        samples = data.train_samples or recipe.batch_sizes().before(recipe.num_steps)
        seed, length = recipe.seed, recipe.model.seq_length
        wanted = length, samples, recipe.log.eval_samples, seed
        dataset: Dataset = load_prepared(data, *wanted, default_cache(), recipe.model.vocab_size)
    else:
        dataset = load_dataset(data, default_cache())
    if recipe.init_from:
        check_size(dataset.tokenizer, recipe.model)
    dataset.check(recipe.model.seq_length, recipe.model.vocab_size)
    tokenizer = dataset.tokenizer
    if recipe.log.sample_tokens:
        tokenizer.encode(recipe.log.prompt)  # which raises UserError where the tokenizer cannot
    asked = [n for n in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(data, n)]
    if asked and tokenizer.end_of_text is None:
        raise UserError(
            f"data.{asked[0]}=on needs an end of text between documents, which the tokenizer {tokenizer.name} does not "
            "have; leave it out"
        )
    return dataset


def read_on_every_node(read: Callable[[], Dataset], mesh: Mesh, process: Process) -> Dataset:
    """Return what `read` returns. One process of each node calls it first and fills the node's cache, from which the
    others read."""
    found: list[Dataset] = []
    mesh.turns(lambda: found.append(read()), lambda rank: process.local_rank == 0)
    mesh.turns(lambda: found.append(read()), lambda rank: process.local_rank != 0)
    mesh.agree({"the text": found[0].digest}, "give every node the same data")
    return found[0]
