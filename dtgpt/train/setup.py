"""What a run is set up with: processes that meet, agree on what they run and watch each other, data, and a trainer.

Each process was started by itself, with its own command line, files and clock, and knows of the others only how many
they are. So each checks the job against its own machine first; then they meet, and hold what they are about to run
against rank 0's. A difference that is not found here would hang the run at its first collective, or train replicas
apart. Processes that the plan leaves over do not come here (`util/peers.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from dtgpt.checkpoint.load import find_checkpoint
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.open import check_size, ends_of
from dtgpt.config.execution import Settings, choose_device
from dtgpt.config.recipe import Recipe
from dtgpt.data.dataset import Dataset, default_cache
from dtgpt.data.open import DataRequest, open_dataset, without_effect
from dtgpt.parallel.launch import open_mesh
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.folder import values_of
from dtgpt.train.checkpoints import restore
from dtgpt.train.objective import objective_of
from dtgpt.train.observer import Observer
from dtgpt.train.start import Job, ResumePoint, make_job
from dtgpt.train.trainer import Trainer
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import check_device, memory_errors_as_user_errors, total_memory
from dtgpt.util.peers import Process, Watch, peers

MOST_STATE = 128  # bytes of a parameter on a rank: weights, gradients, their sums and moments, of a tied table twice


class Setup:
    """A job on this machine, and what its processes make of it, in this order."""

    settings: Settings
    observers: list[Observer]  # that capabilities bring
    watch: Watch  # over the other processes, those that wait too
    mesh: Mesh

    def __init__(self, job: Job):
        self.recipe, self.resume, self.begin, self.choice = job.recipe, job.resume, job.begin, job.choice
        self.everyone = Process.from_environment()
        self.process = self.everyone.among(job.choice.plan.world)  # this one among those that the plan uses

    def join(self, stack: ExitStack) -> None:
        """Check the job against this machine, then bring the processes of its plan together; `stack` ends the process
        group. Raises UserError in a process that the plan leaves over."""
        recipe, everyone, plan = self.recipe, self.everyone, self.choice.plan
        if everyone.rank >= plan.world:
            raise UserError(f"the plan {plan.name} leaves rank {everyone.rank} over; only dtgpt train lets it wait")
        for line in self.choice.describe():
            say(line)
        # All that one process can refuse comes before it meets the others, who would wait for it.
        # An observer raises UserError where it cannot do its part here: a package or a file is missing.
        self.observers = [observe(recipe.log, recipe.num_steps) for observe in seams.listed("observers", recipe)]
        self.settings = self.settings_here()
        check_state_fits(self.settings, self.process)
        stack.enter_context(memory_errors_as_user_errors(_remedy_for_memory(self.settings)))

        # From the watch on, a process that dies ends the others too, and they say which it was.
        self.watch, others = Watch(), peers(everyone.world)
        if everyone.world > 1 and not dist.is_initialized():
            watch = others.watch(everyone, recipe.timeout, recipe.lost_after, plan.name, len(self.choice.fits) > 1)
            self.watch = stack.enter_context(watch)
        stack.enter_context(others.losses_as_user_errors(recipe.timeout, lambda: "start the run again"))
        values = self.what_ranks_agree_on()
        self.mesh = stack.enter_context(open_mesh(self.settings, recipe.timeout, self.process, values, self.watch))

    def settings_here(self) -> Settings:
        """Return the settings of the job on this machine. Raises UserError where a device is missing."""
        recipe = self.recipe
        device = choose_device(recipe.device, self.process.local_rank)
        check_device(device)
        for note in recipe.notes(self.choice, device.type):
            say(note, warning=True)
        settings = recipe.settings(self.choice.plan, device)
        for note_on in seams.listed("device_notes") if device.type == "cuda" else ():
            if note := note_on(settings):
                say(note, warning=True)
        return settings

    def what_ranks_agree_on(self) -> dict[str, str]:
        """Return the values of the recipe by name. That of `resume` is the checkpoint or the run that was found."""
        values = {name: str(value) for name, value in values_of(self.recipe).items()}
        found = self.resume.checkpoint or self.resume.run
        return values if found is None else {**values, "resume": str(found)}

    def read_dataset(self) -> Dataset:
        """Return the data. One process of each node reads them first and fills the node's cache, from which the others
        read."""
        return read_on_every_node(lambda: read_dataset(self.recipe), self.mesh, self.process)

    def make_trainer(self, dataset: Dataset, checkpoint: Checkpoint | None = None) -> Trainer:
        """Return a trainer at its first step, with the weights with which the run begins. A run that goes on leaves
        them to the `checkpoint` that is loaded next, but for those that it freezes."""
        recipe, run = self.recipe, self.resume.run
        begin = self.begin if checkpoint is None else self.begin.beside(checkpoint, recipe.freezes_weights)
        named = begin.model_of_ends(recipe.data, dataset.tokenizer)
        ends = ends_of(run or named, dataset.tokenizer, recipe.model.vocab_size).ids
        kind, given = objective_of(recipe)
        draw_weights = begin.path is None and run is None
        trainer = Trainer(recipe, self.settings, self.mesh, kind(given, dataset), draw_weights, ends)
        begin.give_weights(trainer, recipe.batch_sizes)
        return trainer


@contextmanager
def open_trainer(recipe: Recipe, run: Path | None = None) -> Iterator[Trainer]:
    """Connect the processes that torchrun started, and yield a trainer with the recipe's data, model and optimizer. It
    is before its first step, or, with a run folder `run`, after the step of its newest checkpoint. No run folder is
    created. Every rank must call it."""
    setup = Setup(make_job(recipe, ResumePoint(run=run), Process.from_environment().world))
    with ExitStack() as stack:
        setup.join(stack)
        checkpoint = None if run is None else find_checkpoint(setup.mesh, run, own=type(recipe.model))
        trainer = setup.make_trainer(setup.read_dataset(), checkpoint)
        if checkpoint is not None:
            restore(checkpoint, trainer, setup.recipe.batch_sizes)
        trainer.objective.prepare(trainer.step, run)
        yield trainer


def _remedy_for_memory(settings: Settings) -> str:
    """Return what makes a step need less memory, without a change of the curve, as a sentence goes on."""
    helps = {
        "lower micro_batch_size (the curve stays the same)": settings.micro_batch_size > 1,
        "raise recompute_blocks or leave it out (the curve stays the same)": settings.recompute_blocks is not None,
        "use --recompute full (the curve stays the same)": settings.recompute != "full",
        "use a plan that cuts the model over more processes (dtgpt plan shows them)": True,
    }
    return next(remedy for remedy, may_help in helps.items() if may_help)


def check_state_fits(settings: Settings, process: Process) -> None:
    """Raise UserError where weights, gradients and the optimizer's state do not fit into the device's memory. Of most
    models all of it fits, however the plan cuts it: then nobody has to count what this rank holds."""
    most = settings.model.num_parameters * MOST_STATE * process.local_world
    if settings.freezes_weights or most > total_memory(settings.device):
        for check in seams.listed("memory_checks"):
            check(settings, process.rank, process.local_world)


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
    kind, given = objective_of(recipe)
    kind.check(given, dataset)
    dataset.check(recipe.sample_length, recipe.model.vocab_size)
    for check in seams.listed("data_checks", recipe.data):
        samples = recipe.batch_sizes().before(recipe.num_steps)
        check(recipe.data, dataset, samples, recipe.sample_length, recipe.seed)
    return dataset


def read_on_every_node(read: Callable[[], Dataset], mesh: Mesh, process: Process) -> Dataset:
    """Return what `read` returns. One process of each node calls it first and fills the node's cache, from which the
    others read."""
    found: list[Dataset] = []
    mesh.turns(lambda: found.append(read()), lambda rank: process.local_rank == 0)
    mesh.turns(lambda: found.append(read()), lambda rank: process.local_rank != 0)
    mesh.agree({"the text": found[0].digest}, "give every node the same data")
    return found[0]
