"""`dtgpt convert`: write a model in another format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from dtgpt.checkpoint.open import (
    check_recipe,
    named_tokenizer,
    open_source,
    tokenizer_beside,
    tokenizer_place,
)
from dtgpt.commands.command import Command
from dtgpt.commands.model_options import Addend, MergeFile, RecipeFile, VocabFile
from dtgpt.config.execution import DTYPES
from dtgpt.config.recipe_file import model_class
from dtgpt.data.library_tokenizers.export import class_note, export_note, transformers_files
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.hub.push import check_push, push
from dtgpt.interop.foreign import Watched
from dtgpt.interop.hf.model import ARCHITECTURES, save_huggingface
from dtgpt.interop.hf.origin import Origin, origin_of
from dtgpt.interop.hf.peft import save_peft
from dtgpt.interop.megatron.export import export_notes, save_megatron
from dtgpt.interop.megatron.model import Megatron
from dtgpt.interop.megatron.torch_dist import TorchDist
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.config import ModelConfig, class_of
from dtgpt.posttrain.lora.checkpoint import SavedAdapter
from dtgpt.posttrain.lora.source import open_adapter, with_addend
from dtgpt.util.console import parameters, say
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Changed, Given, Is, Rule, Rules, check_rules
from dtgpt.util.storage import located

SIZES = tuple(f"target_{kind}_parallel_size" for kind in ("tensor", "pipeline", "expert"))  # of a Megatron-LM tree


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Convert a model to another format. MODEL is a run folder, a checkpoint, a Hugging Face folder, a Megatron-LM
    tree, or a file of nanoGPT or llm.c; its format is detected. TARGET is a path that does not exist yet. If an option
    does not apply or the source is damaged, nothing is written."""

    to: Annotated[
        Literal["dtgpt", "hf", "megatron", "peft"],
        "a checkpoint of weights, a Hugging Face folder, a Megatron-LM tree, or the adapters of a run alone, for peft",
    ] = "dtgpt"
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], "type of the written weights; fp32 for --to dtgpt"] = "fp32"
    adapter: Addend = None
    recipe: RecipeFile = None
    target_tensor_parallel_size: Annotated[int, "tensor parallel size of the Megatron-LM tree", Bounds(1)] = 1
    target_pipeline_parallel_size: Annotated[int, "pipeline parallel size of the Megatron-LM tree", Bounds(1)] = 1
    target_expert_parallel_size: Annotated[int, "expert parallel size of the Megatron-LM tree", Bounds(1)] = 1
    ckpt_format: Annotated[
        Literal["torch", "torch_dist"],
        "the --ckpt-format of Megatron-LM: a file for each rank, or its default, one folder for every plan",
    ] = "torch"
    transformer_impl: Annotated[
        Literal["local", "transformer_engine"] | None,
        "the --transformer-impl of Megatron-LM that the tree is for; none: transformer_engine for torch_dist, else "
        "local, and for GPT-2 the names of 2023",
    ] = None
    true_vocab_size: Annotated[
        int | None,
        "vocabulary size of a Megatron-LM tree, without padding; none: GPT-2's 50257 or another known one if the tree "
        "allows it",
    ] = None
    tokenizer: Annotated[
        str | None, "tokenizer to save with the model, as for dtgpt prepare; none: the one saved with the source"
    ] = None
    vocab_file: VocabFile = None
    merge_file: MergeFile = None
    push: Annotated[
        str | None, "model of the Hugging Face Hub, ORG/NAME, to which TARGET is sent; a new one is private"
    ] = None

    rules: ClassVar[Rules] = (  # options that would have no effect
        Rule(
            "dtype={dtype}: a checkpoint of dtgpt holds fp32 weights; leave --dtype out",
            Is("dtype", "!=", "fp32"),
            Is("to", "==", "dtgpt"),
        ),
        Rule(
            "to=peft writes the adapters of MODEL, a run with --lora.rank, in fp32; leave --adapter and --dtype out",
            Changed("adapter", "dtype"),
            Is("to", "==", "peft"),
        ),
        Rule(
            "{field}={value} applies to --to megatron only; leave it out",
            Changed(*SIZES, "ckpt_format", "transformer_impl"),
            Is("to", "!=", "megatron"),
        ),
        Rule(
            "{field}={value} applies to ckpt_format=torch only, since every plan reads a folder of torch_dist; leave "
            "it out",
            Changed(*SIZES[1:]),
            Is("ckpt_format", "==", "torch_dist"),
        ),
        Rule(
            "push={push} applies to --to hf and --to peft only; leave it out",
            Given("push"),
            Is("to", "!=", "hf"),
            Is("to", "!=", "peft"),
        ),
        Rule(
            "a Megatron-LM tree cannot hold the tokenizer {value}; leave it out",
            Given("tokenizer", "vocab_file", "merge_file"),
            Is("to", "==", "megatron"),
        ),
        Rule(
            "a folder of peft cannot hold the tokenizer {value}; leave it out",
            Given("tokenizer", "vocab_file", "merge_file"),
            Is("to", "==", "peft"),
        ),
    )


def convert(path: Path, target: Path, options: ConvertOptions) -> None:
    """Write the model at `path` to `target`, and send it to the Hub if that is asked for. Raises UserError."""
    if options.push is not None:
        check_push(options.push)
    write(path, target, options)
    if options.push is not None:
        push(target, options.push)


def write(path: Path, target: Path, options: ConvertOptions) -> None:
    """Read the model at `path`, in any known format, and write it to `target`. Raises UserError if an option does not
    apply, the source is damaged or the target exists; then nothing is written."""
    check_rules(options.rules, options)
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already; give another path")
    own = model_class(options.recipe)
    if options.to == "peft":
        adapter = SavedAdapter(open_adapter(path, own=own))
        check_recipe(path, adapter.config, own)
        save_peft(adapter, target)
        say(f"{target}: adapters of rank {adapter.lora.rank} for {adapter.facts['base']}")
        return
    source = open_source(path, true_vocab_size=options.true_vocab_size, own=own)
    check_recipe(path, source.config, own)
    if options.adapter is not None:
        source = with_addend(source, path, located(options.adapter))
    if options.true_vocab_size is not None and not isinstance(source, Megatron | TorchDist):
        raise UserError(
            f"true_vocab_size={options.true_vocab_size} applies to a Megatron-LM tree only, and {path} states its own; "
            "leave it out"
        )
    for note in source.notes:
        say(note, warning=True)
    kind = type(source.config)
    theirs = class_of(kind.architecture) or kind  # another architecture is refused below
    if options.to != "dtgpt" and theirs is not kind:
        say(f"{target}: what {kind.__name__} computes otherwise than {theirs.__name__} is not in it", warning=True)
    dtype, watched = DTYPES[options.dtype], Watched(source)
    named = named_tokenizer(source.config, options.tokenizer, options.vocab_file, options.merge_file)
    if options.to == "dtgpt":
        tokenizer = named or tokenizer_beside(path)
        save_weights(watched, target, str(path), tokenizer, origin_of(path, source.config, tokenizer).save)
    elif options.to == "hf":
        tokenizer = named or tokenizer_beside(path)
        origin = origin_of(path, source.config, tokenizer)
        files = _files_of(tokenizer, origin, origin.whole(source.config), path, target)
        save_huggingface(watched, target, dtype, tokenizer, files, origin)
    else:
        tensor, pipeline, expert = (getattr(options, name) for name in SIZES)
        impl = options.transformer_impl
        for note in export_notes(source.config):
            say(note, warning=True)
        progress = source.iteration or None, source.consumed_samples
        if options.ckpt_format == "torch_dist":
            from dtgpt.interop.megatron.export_dist import save_torch_dist  # which imports a second of torch

            save_torch_dist(watched, target, tensor, dtype, *progress, impl or "transformer_engine")
        else:
            save_megatron(watched, target, tensor, pipeline, dtype, *progress, impl, expert)
        if tokenizer_place(path) is not None:
            say(f"{target} has no tokenizer, which a Megatron-LM tree cannot hold; name that of {path} by --tokenizer")
    if watched.problem:
        say(f"{path} has {watched.problem}: so has {target}", warning=True)
    say(f"{target}: {parameters(source.config.num_parameters)}, {options.dtype}")


def _files_of(
    tokenizer: Tokenizer | None, origin: Origin, config: ModelConfig, path: Path, target: Path
) -> dict[str, Any] | None:
    """Return the tokenizer's files for transformers, by name; None, with a message, if there are none that fit."""
    if tokenizer is None:
        say(f"no tokenizer is saved with {path}, so {target} has none; name one with --tokenizer")
        return None
    try:
        files = origin.tokenizer_files(transformers_files(tokenizer, config.seq_length), config.seq_length)
    except UserError as error:
        say(f"{error}; the model is written without a tokenizer", warning=True)
        return None
    architecture = ARCHITECTURES.get(config.architecture)
    kind = "" if architecture is None else architecture.write_config(config)["model_type"]
    for note in filter(None, (export_note(tokenizer), class_note(files["tokenizer.json"], kind))):
        say(note, warning=True)
    return files


command = Command(
    "convert MODEL TARGET",
    ConvertOptions,
    convert,
    "runs/gpt2_tiny-001 exported --to hf",
)
