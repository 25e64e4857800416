"""A model from its files, over the processes that torchrun started, before its weights are read.

Everything that can be wrong is checked before the processes meet, and again before weights are read: a model of a
hundred gigabytes takes minutes, and its user should not wait for a sentence on a wrong option.
"""

import atexit
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from dtgpt.checkpoint.open import check_recipe, ends_of, open_source, with_addend
from dtgpt.config.execution import Settings, choose_device, choose_dtype
from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import model_class
from dtgpt.config.sections import Section
from dtgpt.inference.step import exact_bits
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import Source
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.hardware import check_device
from dtgpt.util.peers import Process
from dtgpt.util.storage import located

DEVICES, PRECISIONS = ("auto", "cpu", "cuda"), ("auto", "fp32", "bf16", "fp16")
TIMEOUT = 600.0  # s that a rank waits for others

_meshes: WeakSet[Mesh] = WeakSet()  # of the models that are in use


def open_model(
    path: Path,
    plan: Plan | str | None,
    device: str,
    precision: str,
    max_length: int | None = None,
    exact: bool = False,
    addend: str | PathLike | None = None,
    recipe: Recipe | str | PathLike | None = None,
) -> tuple[Source, Settings, Mesh]:
    """Return what a `Model` is made of, with the processes together, before weights are read. `addend`: the adapter.
    The class of the model is that of a `recipe`, or of its file, which is executed. Raise UserError if an argument is
    wrong. The settings' model has `max_length` positions, the source's all."""
    for name, value, known in (("device", device, DEVICES), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise UserError(f"{name}={shown(value)} is not known; use {', '.join(known)}")
    own = model_class(recipe)
    process = Process.from_environment()
    given = Plan(tp=process.world) if plan is None else parse_plan(plan, {}) if isinstance(plan, str) else plan
    resolved = given.for_world(process.world)
    place = choose_device(device, process.local_rank)
    dtype = choose_dtype(precision, place)
    check_device(place)
    if exact:
        exact_bits().check_exact(place, resolved, dtype)
    if process.world > 1 and not dist.is_initialized():
        start_process_group(place, TIMEOUT)
        atexit.register(_leave_group)  # a thread of gloo that outlives its group may abort the process
    mesh = Mesh(resolved.for_inference(), place)
    _meshes.add(mesh)
    for note in notes_on(resolved):
        say(note, warning=True)
    source = open_source(path, mesh, own=own)
    check_recipe(path, source.config, own)
    if addend is not None:
        source = with_addend(source, path, located(addend), mesh)
    for note in source.notes:
        say(note, warning=True)
    source.config.validate()
    ends_of(path, None, source.config.vocab_size)  # which refuses what is not an id, before weights are read
    if exact:
        exact_bits().check_blocks(source.config)
    reduce, sections = sums_of(source.recipe) if exact else ("fast", ())
    config = shortened(source.config, max_length)
    batch = resolved.dp * 2 * resolved.pp  # the fewest samples that every schedule takes
    resolved.validate(config, 1, batch, config.seq_length)
    settings = Settings(
        model=config,
        plan=mesh.plan,
        device=place,
        dtype=dtype,
        attention="flash" if exact else "auto",
        seq_length=config.seq_length,
        micro_batch_size=1,
        global_batch_size=batch,
        reduce=reduce,
        sections=sections,
    )
    if exact:
        exact_bits().check_sums(settings)
    return source, settings, mesh


def sums_of(recipe: Mapping[str, Any]) -> tuple[str, tuple[Section, ...]]:
    """Return how a training with this recipe summed, and the options of that."""
    reduce = recipe.get("reduce", "fast")
    if reduce not in seams.added("sums"):
        return "fast", ()
    part = seams.added("sections").get(reduce)
    return reduce, (seams.load(part)(**recipe[reduce]),) if part and reduce in recipe else ()


def shortened(config: ModelConfig, max_length: int | None) -> ModelConfig:
    """Return the model with its first `max_length` positions; None: with all. Raise UserError where it has fewer."""
    if max_length is None:
        return config
    if type(max_length) is not int or not 1 <= max_length <= config.seq_length:
        raise UserError(
            f"max_length={shown(max_length)} is not a number of the model's positions; use 1 to {config.seq_length}, "
            "or leave it out"
        )
    return replace(config, seq_length=max_length)


def notes_on(plan: ResolvedPlan) -> list[str]:
    """Return what the user of a plan should know of it where a model is loaded."""
    ignored = [f"ZeRO-{plan.zero}"] if plan.zero else []
    ignored += ["sequence parallelism"] if plan.sequence_parallel else []
    ignored += [words for degree, words in seams.added("idle_degrees").items() if getattr(plan, degree) > 1]
    return [f"inference ignores {' and '.join(ignored)} of the plan {plan.name}"] if ignored else []


def _leave_group() -> None:
    with suppress(Exception):  # another rank may be gone
        for release in [release for mesh in _meshes for release in mesh.before_end]:
            release()
        end_process_group()
