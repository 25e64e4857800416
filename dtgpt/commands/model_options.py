"""Options that several commands have: how a model is opened, and which tokenizer it has.

Each is an annotation, and no call of a parser: a command has it as a field, with a default of its own, and the help,
the bounds and what it means are the same in all of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from dtgpt.checkpoint.open import named_tokenizer
from dtgpt.config.execution import Settings
from dtgpt.config.plan import Plan
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.open import open_model
from dtgpt.inference.prompts import tokenizer_of
from dtgpt.models.source import Source
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.field_types import PATH, Bounds

Addend = Annotated[
    str | None, "adapter (LoRA) to add to the weights: a run or checkpoint with adapters, or a folder of peft", PATH
]
RecipeFile = Annotated[
    str | None, "recipe file of the run, where the class of its model is not dtgpt's; it is executed", PATH
]
VocabFile = Annotated[str | None, "vocab.json of a BPE like GPT-2's, with --merge-file"]
MergeFile = Annotated[str | None, "merges.txt, with --vocab-file"]


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a model is opened, and with which tokenizer."""

    plan: Annotated[
        str | None, "parallel plan, such as tp2_pp2; none: tensor parallel over all processes that torchrun started"
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], "device; auto: cuda if there is one"] = "auto"
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"], "type of weights and activations; auto: bf16 on cuda, else fp32"
    ] = "auto"
    exact: Annotated[
        bool, "log-probabilities of tokens with the bits of training's forward pass: on a GPU, tp2 at most; slower"
    ] = False
    recipe: RecipeFile = None
    max_length: Annotated[
        int | None,
        "most tokens of a sequence with its prompt; fewer need less memory; none: the model's positions",
        Bounds(1),
    ] = None
    tokenizer: Annotated[
        str | None, "tokenizer file, or a name such as gpt2; none: the tokenizer saved with the model"
    ] = None
    vocab_file: VocabFile = None
    merge_file: MergeFile = None


def open_as_asked(path: Path, options: Any, plan: Plan | str | None = None) -> tuple[Source, Settings, Mesh, Tokenizer]:
    """Return what a `Model` is made of: the model at `path`, opened by all options of this file. plan: None for that of
    the options. Raise UserError where one is wrong."""
    source, settings, mesh = open_model(
        path,
        options.plan if plan is None else plan,
        options.device,
        options.precision,
        options.max_length,
        options.exact,
        options.adapter,
        options.recipe,
    )
    named = named_tokenizer(source.config, options.tokenizer, options.vocab_file, options.merge_file)
    return source, settings, mesh, named or tokenizer_of(path, source.config)
