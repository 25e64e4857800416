"""`plan=auto`: the plan, micro-batch size and recomputation of a recipe, by the time and the memory of a step.

The choice is a function of the recipe, the number of processes, and the kind and memory of a GPU, so that every rank
finds the same. It becomes the plan `CHOICE | auto` of the run's recipe: a resume keeps it as long as it fits all
processes, and chooses again where it does not.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from dtgpt.config.execution import Recompute, Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import AUTO, OR, resolve
from dtgpt.config.recipe import Recipe
from dtgpt.parallel.recompute.rules import recomputes
from dtgpt.planning.gpus import CPU, GIB, Gpu, known_gpu, this_gpu
from dtgpt.planning.search import LISTED, Candidate, Ranking, Search, TooLarge, numbers_of_processes, rank_plans
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import total_memory


def is_auto(plan: str) -> bool:
    """Return whether a recipe's plan is `auto`, or has it as its last alternative."""
    return plan.rpartition(OR)[2].strip() == AUTO


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """The choice of a plan for a recipe, for `world` processes of `gpu`, by default those of this machine."""

    recipe: Recipe
    world: int
    gpu: Gpu | None = None

    def settled(self) -> Recipe:
        """Return the recipe with a plan that is not to be chosen any more. A recipe without `auto`, and one of which an
        alternative fits all of the processes, stays as it is. Raises UserError where no plan fits."""
        return with_choice(self.recipe, self.ranking(most=1).best) if self.is_open() else self.recipe

    def is_open(self) -> bool:
        """Return whether a plan is to be chosen."""
        return is_auto(self.recipe.plan) and not self.is_settled()

    def is_settled(self) -> bool:
        """Return whether an alternative before `auto` fits all processes."""
        if OR not in self.recipe.plan:
            return False
        for plan in self.recipe.alternatives().values():
            with suppress(UserError):
                resolve(plan, self.world, self.recipe.check_plan)
                return True
        return False

    def ranking(self, most: int = LISTED) -> Ranking:
        """Return the plans for all processes, or for the largest number below that any fits."""
        recipe, gpu = self.recipe, self.gpu or machine(self.recipe.device, self.world)
        if gpu.rates is None:
            gpu = replace(gpu, rates=known_gpu("H100").rates)  # to rank by
        device = torch.device("cpu" if gpu.rates is CPU else "cuda")

        def make(plan: ResolvedPlan, micro: int, recompute: Recompute) -> Settings:
            changed = replace(recipe, micro_batch_size=micro, recompute=recompute, recompute_blocks=None)
            changed.check_plan(plan)
            return changed.settings(plan, device, here=False)

        plain = replace(recipe, recompute="none", recompute_blocks=None)
        alone = plain.settings(ResolvedPlan(dp=1), device, here=False)
        search = Search(
            model=recipe.model,
            world=self.world,
            samples=recipe.global_batch_size,
            seq_length=recipe.sample_length,
            recomputes=recomputes(alone),
            make=make,
        )
        refused = None
        for count in numbers_of_processes(search):
            try:
                return rank_plans(replace(search, world=count), gpu, most)
            except TooLarge:
                raise
            except UserError as error:
                refused = refused or error
        assert refused is not None
        raise refused


def settle_plan(recipe: Recipe, world: int) -> Recipe:
    """Return the recipe with the plan that `auto` means for `world` processes of this machine's GPUs, and say which."""
    chosen = AutoPlan(recipe=recipe, world=world).settled()
    if chosen.plan != recipe.plan:
        name, ranks = chosen.plan.partition(OR)[0].strip(), counted(world, "process", "processes")
        micro, recompute, blocks = chosen.micro_batch_size, chosen.recompute, chosen.recompute_blocks
        first = "" if blocks is None else f" in the first {counted(blocks, 'block')} of a stage"
        say(f"plan auto: {name} on {ranks}, micro-batches of {micro}, recompute {recompute}{first}")
    return chosen


def machine(device: str, world: int) -> Gpu:
    """Return what a process of this machine computes with, the same on each of `world` processes."""
    if device == "cpu" or not torch.cuda.is_available():
        size = total_memory(torch.device("cpu")) // max(1, world) // GIB * GIB
        return Gpu("this machine", max(size, GIB), rates=CPU)
    gpu = this_gpu(torch.device("cuda", 0))
    return replace(gpu, size=gpu.size // GIB * GIB)


def with_choice(recipe: Recipe, chosen: Candidate) -> Recipe:
    """Return the recipe with the plan, micro-batch size and recomputation of a candidate."""
    own = chosen.settings
    return replace(
        recipe,
        plan=f"{own.plan.name} {OR} {AUTO}",
        micro_batch_size=own.micro_batch_size,
        recompute=own.recompute,
        recompute_blocks=own.recompute_blocks,
    )
