"""The processes of a run: they meet, agree on what they run, and watch each other; those that the plan leaves over
wait."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from dtgpt.config.execution import Settings, choose_device
from dtgpt.config.recipe import Recipe
from dtgpt.parallel.launch import open_mesh
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.folder import values_of
from dtgpt.run.signals import StopRequest
from dtgpt.train.job import Job
from dtgpt.train.observer import Observer, observers_of
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
    if everyone.rank >= choice.plan.world:
        raise UserError(f"the plan {choice.plan.name} leaves rank {everyone.rank} over; only dtgpt train lets it wait")
    for line in choice.describe():
        say(line)
    process = everyone.among(choice.plan.world)
    observers = observers_of(recipe.log, recipe.num_steps)  # each of which can do its part here
    settings = check_machine(job, process)
    stack.enter_context(memory_errors_as_user_errors(_remedy_for_memory(settings)))
    watch = Watch()
    if everyone.world > 1 and not dist.is_initialized():
        watch = stack.enter_context(watch_over(everyone, job))
    stack.enter_context(peers(everyone.world).losses_as_user_errors(recipe.timeout, lambda: "start the run again"))
    mesh = stack.enter_context(open_mesh(settings, recipe.timeout, process, what_ranks_agree_on(job), watch))
    return Group(settings=settings, mesh=mesh, process=process, observers=observers, watch=watch)


def _remedy_for_memory(settings: Settings) -> str:
    """Return what makes a step need less memory, without a change of the curve, as a sentence goes on."""
    if settings.micro_batch_size > 1:
        return "lower micro_batch_size (the curve stays the same)"
    if settings.recompute_blocks is not None:
        return "raise recompute_blocks or leave it out (the curve stays the same)"
    if settings.recompute != "full":
        return "use --recompute full (the curve stays the same)"
    return "use a plan that cuts the model over more processes (dtgpt plan shows them)"


def check_machine(job: Job, process: Process) -> Settings:
    """Return the settings of the job on this machine. Raises UserError where a device or its memory is missing."""
    recipe = job.recipe
    device = choose_device(recipe.device, process.local_rank)
    check_kernels(device)
    for note in recipe.notes(job.choice, device.type):
        say(note, warning=True)
    settings = recipe.settings(job.choice.plan, device)
    if caution := below_ampere(device, settings.dtype, recipe.attention, recipe.model.dropout):
        say(caution, warning=True)
    # Of most models the whole state fits, however the plan cuts it: then nobody has to count what this rank holds.
    most = settings.model.num_parameters * MOST_STATE * process.local_world
    if settings.freezes_weights or most > total_memory(device):
        for state_bytes in seams.listed("state_bytes"):
            check_memory(state_bytes(settings, process.rank), process.local_world, device)
    return settings


def what_ranks_agree_on(job: Job) -> dict[str, str]:
    """Return the values of the recipe by name; as `resume`, the checkpoint or run that was found."""
    values = {name: str(value) for name, value in values_of(job.recipe).items()}
    found = job.resume.checkpoint or job.resume.run
    return values if found is None else {**values, "resume": str(found)}


def wait_for_others(job: Job, stop: StopRequest) -> int:
    """Return the exit code of the run, for which a process that the plan leaves over waits without memory of a GPU. It
    ends like the others where a process is lost, and passes a signal that it gets on to rank 0."""
    with watch_over(Process.from_environment(), job) as watch, stop:
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
def watch_over(process: Process, job: Job) -> Iterator[Watch]:
    """Yield the watch over all processes, which have agreed on the plan; those that wait are not in the process group.
    Raises UserError where they do not meet within the recipe's `timeout`, or this one differs from rank 0."""
    recipe: Recipe = job.recipe
    with peers(process.world).watch(process, recipe.timeout, recipe.lost_after) as watch:
        plan = job.choice.plan.name
        theirs = watch.of_rank_0("plan", plan)
        if len(job.choice.fits) > 1 and theirs != plan:
            raise UserError(
                f"rank {process.rank} differs from rank 0 in the plan: {plan} there, {theirs} on rank 0; start every "
                "rank with the same command on the same code"
            )
        yield watch
