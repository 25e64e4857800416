"""What a run is set up with: processes that meet, agree on what they run and watch each other, data, and a trainer.

Processes that the plan leaves over wait for the end of the run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dtgpt.checkpoint.ends import ends_of
from dtgpt.checkpoint.load import find_checkpoint
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.tokenizer import check_own_tokenizer, check_size
from dtgpt.config.execution import Settings, choose_device
from dtgpt.config.plan_choice import PlanChoice
from dtgpt.config.recipe import Recipe
from dtgpt.data.checks import check_counted, check_ends, without_effect
from dtgpt.data.dataset import Dataset, default_cache
from dtgpt.data.open import DataRequest, open_dataset
from dtgpt.parallel.launch import open_mesh
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.folder import values_of
from dtgpt.run.signals import StopRequest
from dtgpt.train.checkpoints import bases, load_initial_weights, restore
from dtgpt.train.objective import objective_of
from dtgpt.train.observer import Observer, observers_of
from dtgpt.train.start import Job, ResumePoint, make_job, model_to_begin_with
from dtgpt.train.trainer import Trainer
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import below_ampere, check_kernels, check_memory, memory_errors_as_user_errors, total_memory
from dtgpt.util.peers import Watch, peers
from dtgpt.util.process import Process

MOST_STATE = 128  # bytes of a parameter on a rank: weights, gradients, their sums and moments, of a tied table twice


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of a run once they have met, as one of them sees them."""

    settings: Settings
    mesh: Mesh
    process: Process  # this one among those that the plan uses
    observers: list[Observer]  # that capabilities bring
    watch: Watch  # over the other processes, those that wait too


def join(job: Job, stack: ExitStack) -> Group:
    """Check the job against this machine, then bring the processes of its plan together; `stack` ends the process
    group. Raises UserError in a process that the plan leaves over."""
    recipe, choice, everyone = job.recipe, job.choice, Process.from_environment()
    check_is_used(everyone, choice)
    for line in choice.describe():
        say(line)
    process = everyone.among(choice.plan.world)
    observers = observers_of(recipe.log, recipe.num_steps)  # each of which can do its part here
    settings = settings_here(job, process)
    stack.enter_context(memory_errors_as_user_errors(_remedy_for_memory(settings)))
    watch = Watch()
    if everyone.world > 1 and not dist.is_initialized():
        watch = stack.enter_context(watch_over(everyone, choice, recipe.timeout, recipe.lost_after))
    stack.enter_context(peers(everyone.world).losses_as_user_errors(recipe.timeout, lambda: "start the run again"))
    mesh = stack.enter_context(open_mesh(settings, recipe.timeout, process, what_ranks_agree_on(job), watch))
    return Group(settings=settings, mesh=mesh, process=process, observers=observers, watch=watch)


def check_is_used(process: Process, choice: PlanChoice) -> None:
    """Raise UserError where the plan leaves this process over."""
    if process.rank >= choice.plan.world:
        raise UserError(f"the plan {choice.plan.name} leaves rank {process.rank} over; only dtgpt train lets it wait")


def _remedy_for_memory(settings: Settings) -> str:
    """Return what makes a step need less memory, without a change of the curve, as a sentence goes on."""
    if settings.micro_batch_size > 1:
        return "lower micro_batch_size (the curve stays the same)"
    if settings.recompute_blocks is not None:
        return "raise recompute_blocks or leave it out (the curve stays the same)"
    if settings.recompute != "full":
        return "use --recompute full (the curve stays the same)"
    return "use a plan that cuts the model over more processes (dtgpt plan shows them)"


def settings_here(job: Job, process: Process) -> Settings:
    """Return the settings of the job on this machine. Raises UserError where a device or its memory is missing."""
    recipe, choice = job.recipe, job.choice
    device = choose_device(recipe.device, process.local_rank)
    check_kernels(device)
    for note in recipe.notes(choice, device.type):
        say(note, warning=True)
    settings = recipe.settings(choice.plan, device)
    if caution := below_ampere(device, settings.dtype, recipe.attention, recipe.model.dropout):
        say(caution, warning=True)
    check_state_fits(settings, process)
    return settings


def check_state_fits(settings: Settings, process: Process) -> None:
    """Raise UserError where weights, gradients and the optimizer's state do not fit into the device's memory. Of most
    models all of it fits, however the plan cuts it: then nobody has to count what this rank holds."""
    most = settings.model.num_parameters * MOST_STATE * process.local_world
    if settings.freezes_weights or most > total_memory(settings.device):
        for state_bytes in seams.listed("state_bytes"):
            check_memory(state_bytes(settings, process.rank), process.local_world, settings.device)


def what_ranks_agree_on(job: Job) -> dict[str, str]:
    """Return the values of the recipe by name; as `resume`, the checkpoint or run that was found."""
    values = {name: str(value) for name, value in values_of(job.recipe).items()}
    found = job.resume.checkpoint or job.resume.run
    return values if found is None else {**values, "resume": str(found)}


def wait_for_others(choice: PlanChoice, timeout: float, lost_after: float, stop: StopRequest) -> int:
    """Return the exit code of the run, for which a process that the plan leaves over waits without memory of a GPU. It
    ends like the others where a process is lost, and passes a signal that it gets on to rank 0."""
    with watch_over(Process.from_environment(), choice, timeout, lost_after) as watch, stop:
        watch.remedy = lambda: "go on with --resume if the run has a checkpoint, else start it again"
        return watch.wait_for_end(lambda: stop.requested)


def run_watched(group: Group, stop: StopRequest, work: Callable[[], int]) -> int:
    """Return the exit code that `work` returns, and tell it to the processes that wait. A signal that one of these gets
    reaches rank 0 as a request to its `stop`."""
    group.watch.on_stop = stop.ask
    code = work()
    if group.process.rank == 0:
        group.watch.end_run(code)
    return code


@contextmanager
def watch_over(process: Process, choice: PlanChoice, timeout: float, lost_after: float) -> Iterator[Watch]:
    """Yield the watch over all processes, which have agreed on the plan; those that wait are not in the process group.
    Raises UserError where they do not meet within `timeout` seconds, or this one differs from rank 0."""
    with peers(process.world).watch(process, timeout, lost_after) as watch:
        plan = choice.plan.name
        theirs = watch.of_rank_0("plan", plan)
        if len(choice.fits) > 1 and theirs != plan:
            raise UserError(
                f"rank {process.rank} differs from rank 0 in the plan: {plan} there, {theirs} on rank 0; start every "
                "rank with the same command on the same code"
            )
        yield watch


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


def read_dataset(recipe: Recipe) -> Dataset:
    """Return the recipe's text or prepared tokens, checked against the recipe's model and options."""
    for note in without_effect(recipe.data):
        say(note, warning=True)
    request = DataRequest(
        seq_length=recipe.sample_length,
        train_samples=recipe.data.train_samples or recipe.batch_sizes().before(recipe.num_steps),
        held_out_samples=recipe.log.eval_samples,
        seed=recipe.seed,
        cache=default_cache(),
        vocab_size=recipe.model.vocab_size,
        batch=recipe.global_batch_size,
    )
    dataset = open_dataset(recipe.data, request)
    if recipe.init_from:
        check_size(dataset.tokenizer, recipe.model)
    objective_of(recipe).check(dataset)
    dataset.check(recipe.sample_length, recipe.model.vocab_size)
    if recipe.log.sample_tokens:
        dataset.tokenizer.encode(recipe.log.prompt)  # which raises UserError where the tokenizer cannot
    check_ends(recipe.data, dataset.tokenizer)
    if recipe.data.eod_mask_loss:
        check_counted(dataset, recipe.batch_sizes().before(recipe.num_steps), recipe.sample_length, recipe.seed)
    return dataset


def read_on_every_node(read: Callable[[], Dataset], mesh: Mesh, process: Process) -> Dataset:
    """Return what `read` returns. One process of each node calls it first and fills the node's cache, from which the
    others read."""
    found: list[Dataset] = []
    mesh.turns(lambda: found.append(read()), lambda rank: process.local_rank == 0)
    mesh.turns(lambda: found.append(read()), lambda rank: process.local_rank != 0)
    mesh.agree({"the text": found[0].digest}, "give every node the same data")
    return found[0]
