"""`dtgpt.load`: a model from its files, over the processes that torchrun started."""

from os import PathLike
from types import NoneType
from typing import Literal

from dtgpt.checkpoint.open import check_size, named_tokenizer
from dtgpt.config.execution import MOST_SLOTS
from dtgpt.config.plan import Plan
from dtgpt.config.recipe import Recipe
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.base_options import check_switches
from dtgpt.inference.library.model import LibraryModel
from dtgpt.inference.open import open_model
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import located


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
) -> LibraryModel:
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
    path = located(path)
    source, settings, mesh = open_model(path, plan, device, precision, max_length, exact, adapter, recipe)
    if isinstance(tokenizer, str):
        tokenizer = named_tokenizer(source.config, tokenizer, None, None)
    elif tokenizer is not None:
        check_size(tokenizer, source.config)
    return LibraryModel.read(source, settings, mesh, path, None if slots == "auto" else slots, tokenizer, exact)
