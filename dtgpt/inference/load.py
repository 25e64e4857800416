"""`dtgpt.load`: a model from its files, over the processes that torchrun started.

Everything that can be wrong is checked before the processes meet, and again before weights are read: a model of a
hundred gigabytes takes minutes, and its user should not wait for a sentence on a wrong option.
"""

import atexit
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Literal
from weakref import WeakSet

import torch.distributed as dist

from dtgpt.checkpoint.open import check_recipe, check_size, ends_of, named_tokenizer, open_source, with_addend
from dtgpt.config.execution import MOST_SLOTS, Settings, choose_device, choose_dtype
from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import model_class
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.base_options import check_switches
from dtgpt.inference.model import Model
from dtgpt.inference.step import exact_bits
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import Source
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.hardware import check_device
from dtgpt.util.peers import Process

DEVICES, PRECISIONS = ("auto", "cpu", "cuda"), ("auto", "fp32", "bf16", "fp16")
TIMEOUT = 600.0  # s that a rank waits for others

_meshes: WeakSet[Mesh] = WeakSet()  # of the models that are in use


def load(
    path: str | PathLike,
    plan: Plan | str | None = None,
    device: str = "auto",
    precision: str = "auto",
    slots: int | Literal["auto"] = "auto",
    tokenizer: Tokenizer | str | None = None,
    max_length: int | None = None,
    exact: bool = False,
    adapter: str | PathLike | None = None,
    recipe: Recipe | str | PathLike | None = None,
) -> Model:
    """Return the model at `path`: a run folder, a checkpoint, or a model of another library.

    plan: how to distribute the model over the processes that torchrun started; None: tensor parallel over all of them.
    ZeRO and sequence parallelism have no effect on inference, and are left out with a note. device: "auto", "cpu" or
    "cuda". precision: "auto", "fp32", "bf16" or "fp16". slots: number of sequences to generate at the same time, each
    with memory for `max_length` positions; "auto": as many as a call needs, up to 512 and as fit into memory.
    tokenizer: a tokenizer of dtgpt, its file, or a name such as gpt2; None: the one that is saved with the model.
    max_length: largest number of tokens of a sequence with its prompt; None: all positions of the model. A smaller
    number needs less memory, and does not change what is generated. exact: compute log-probabilities with the bits of a
    forward pass of training (docs/bits.md); slower. adapter: adapters (LoRA) to add to the weights: a run, a
    checkpoint, or a folder of peft. recipe: the recipe of the run, or its file, which is executed; needed if the class
    of the model is not dtgpt's.

    Raise UserError if an argument is wrong.
    """
    for name, value, kinds, advice in (
        ("path", path, (str, PathLike), "a run folder or another model"),
        ("plan", plan, (str, Plan, NoneType), "tp2"),
        ("tokenizer", tokenizer, (str, Tokenizer, NoneType), "the path or name of one"),
        ("adapter", adapter, (str, PathLike, NoneType), "a run folder"),
        ("recipe", recipe, (Recipe, str, PathLike, NoneType), "the file of one"),
    ):
        if not isinstance(value, kinds):
            raise UserError(f"{name}={shown(value)} is not a {name}; give one, such as {advice}")
    check_switches(exact=exact)
    if not (isinstance(slots, str) and slots == "auto") and not (type(slots) is int and 1 <= slots <= MOST_SLOTS):
        raise UserError(f"slots={shown(slots)} is not a number of sequences; use 1 to {MOST_SLOTS}, or auto")
    source, settings, mesh = open_model(Path(path), plan, device, precision, max_length, exact, adapter, recipe)
    if isinstance(tokenizer, str):
        tokenizer = named_tokenizer(source.config, tokenizer, None, None)
    elif tokenizer is not None:
        check_size(tokenizer, source.config)
    return Model.read(source, settings, mesh, Path(path), None if slots == "auto" else slots, tokenizer, exact)


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
    Other arguments and errors are those of `load`. The settings' model has `max_length` positions, the source's all."""
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
        source = with_addend(source, path, Path(addend), mesh)
    for note in source.notes:
        say(note, warning=True)
    source.config.validate()
    ends_of(path, None, source.config.vocab_size)  # which refuses what is not an id, before weights are read
    if exact:
        exact_bits().check_blocks(source.config)
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
    )
    return source, settings, mesh


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
    return [f"inference ignores {' and '.join(ignored)} of the plan {plan.name}"] if ignored else []


def _leave_group() -> None:
    with suppress(Exception):  # another rank may be gone
        for release in [release for mesh in _meshes for release in mesh.before_end]:
            release()
        end_process_group()
