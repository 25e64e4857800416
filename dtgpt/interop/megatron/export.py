"""Models written as Megatron-LM checkpoints: the `torch` format, checkpoint_version 3.0.

GPT-2 has the names of 2023 unless others are asked for, others mcore's. Of experts each has a module of its own, as
Megatron-LM has them without --moe-grouped-gemm.
"""

from argparse import Namespace
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.config.plan import divisors
from dtgpt.interop.foreign import cast, check_architecture, check_dtype
from dtgpt.interop.marks import TRACKER
from dtgpt.interop.megatron.architecture import MegatronArchitecture
from dtgpt.interop.megatron.config import ARCHITECTURES
from dtgpt.interop.megatron.experts import CORRECTION, has_experts
from dtgpt.interop.megatron.names import Family, copy_key, cut_dimension, is_stack, of_expert, padded_rows, their_key
from dtgpt.interop.megatron.tree import FILE_NAMES, Rank, rank_folder
from dtgpt.interop.new_folder import new_folder
from dtgpt.models.config import VOCAB_MULTIPLE, ModelConfig
from dtgpt.models.inventory import Shape, inventory
from dtgpt.models.shared.foreign import has_vocabulary
from dtgpt.models.source import Ranges, Source
from dtgpt.parallel.layout import chunk
from dtgpt.util.console import listed
from dtgpt.util.errors import UserError

VERSION = 3.0
# Modules that store extra state with their weight, which is empty without 8-bit floats.
WITH_STATE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Target(NamedTuple):
    """The tree to be written."""

    architecture: MegatronArchitecture
    family: Family
    dtype: torch.dtype
    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel_size: int


def save_megatron(
    source: Source,
    folder: Path,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: torch.dtype = torch.float32,
    iteration: int | None = None,
    consumed_samples: int = 0,
    family: Family | None = None,
    expert_parallel_size: int = 1,
) -> None:
    """Write the weights of `source` as the root of a new checkpoint with a file for each rank, one in memory at a time.

    `iteration`: of the training so far, 1 or more; None: a release, from which Megatron-LM starts at 0. `family` of
    names; None: that of 2023 for GPT-2, which later versions read with --use-legacy-models, and mcore's `local` for
    others. `expert_parallel_size` ranks share experts. Raises UserError, before anything is written, for sizes
    that do not divide the model; and for weights beyond fp16.
    """
    config = source.config
    architecture = architecture_of(config)
    sizes = tensor_parallel_size, pipeline_parallel_size, expert_parallel_size
    check_sizes(architecture, config, *sizes)
    check_dtype(dtype)
    architecture.check_export(config)
    target = Target(architecture, family or architecture.FAMILY, dtype, *sizes)
    state = {"checkpoint_version": VERSION, "iteration": iteration or 0}
    name = folder_name(iteration)
    with new_folder(folder) as partial:
        for number, (p, e, t) in enumerate(product(*map(range, (sizes[1], sizes[2], sizes[0])))):
            rank = Rank(t, p, e)
            path = partial / name / rank_folder(rank, sizes[1] > 1, sizes[2] > 1) / FILE_NAMES[0]
            path.parent.mkdir(parents=True)
            args = args_of(config, target, iteration, consumed_samples)
            args.rank = number  # by which readers know files that changed places
            save_file({"args": args, **state, "model": _stage(source, target, rank)}, path)
        (partial / TRACKER).write_text("release" if iteration is None else str(iteration))


def export_notes(config: ModelConfig) -> list[str]:
    """Return what Megatron-LM computes otherwise than dtgpt. Raise UserError for a model that it cannot compute."""
    return architecture_of(config).check_export(config)


def architecture_of(config: ModelConfig) -> MegatronArchitecture:
    check_architecture(config, ARCHITECTURES, "Megatron-LM tree")
    return ARCHITECTURES[config.architecture]


def folder_name(iteration: int | None) -> str:
    """Return the name of the folder of a checkpoint, None being a release."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def check_sizes(
    architecture: MegatronArchitecture,
    config: ModelConfig,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    expert_parallel_size: int,
) -> None:
    """Raise UserError for sizes that do not divide the model."""
    count = getattr(config, "num_experts", 0)
    if expert_parallel_size > 1 and not count:
        raise UserError(
            f"expert_parallel_size={expert_parallel_size}, but a model of {config.architecture} has no experts; use 1"
        )
    cuts_of: dict[str, tuple[int, Callable[[int], dict[str, int]]]] = {
        "tensor_parallel_size": (tensor_parallel_size, lambda ranks: architecture.cut_sizes(config, ranks)),
        "pipeline_parallel_size": (pipeline_parallel_size, lambda ranks: {"num_layers": config.num_layers}),
        "expert_parallel_size": (expert_parallel_size, lambda ranks: {"num_experts": count or 1}),
    }
    for over, (ranks, cuts) in cuts_of.items():
        for name, size in cuts(max(ranks, 1)).items():
            if ranks < 1 or size % ranks:
                fitting = [n for n in divisors(size) if not any(other % n for other in cuts(n).values())]
                raise UserError(f"{name}={size} cannot be split over {over}={ranks}; use {over}={listed(fitting)}")


def save_file(content: dict[str, Any], path: Path) -> None:
    """Write by torch.save, with a full disk as an OSError like any other."""
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from None


def _stage(source: Source, target: Target, rank: Rank) -> dict[str, Any]:
    """Return what Megatron-LM keeps under `model` for one rank."""
    model: dict[str, Any] = {}
    for key, (name, part) in parameters_of(source.config, target, rank).items():
        *path, last = key
        place = model
        for outer in path:
            place = place.setdefault(outer, {})
        place[last] = piece_of(source, target, rank.tensor, name, part)
        if target.family != "nested" and (module := last.removesuffix(".weight")).rpartition(".")[2] in WITH_STATE:
            place[f"{module}._extra_state"] = None  # without it, its loader says that keys are missing
    if target.family != "nested" and rank.pipeline == target.pipeline_parallel_size - 1:
        model["output_layer._extra_state"] = None  # also where its weight is the token table
    return model


def parameters_of(config: ModelConfig, target: Target, rank: Rank) -> dict[tuple[str, ...], tuple[str, Ranges]]:
    """Return dtgpt's name of each tensor of a rank, and the elements of that parameter of which tensor-parallel ranks
    have pieces, by Megatron-LM's key."""
    stage, architecture = rank.pipeline, target.architecture
    parts, layers = inventory(config), config.num_layers // target.pipeline_parallel_size
    last = stage == target.pipeline_parallel_size - 1
    found: dict[tuple[str, ...], tuple[str, Ranges]] = {}

    def key(name: str, family: Family = target.family) -> tuple[str, ...]:
        return their_key(name, architecture.MODULES, family)

    for p in parts.of_embedding() if stage == 0 else ():
        found[key(p.name)] = p.name, _whole(p.shape)
    for number in range(layers):
        whole = stage * layers + number
        shapes = parts.block(whole).shapes
        apart = "mlp.router.weight" in shapes and target.family == "transformer_engine"  # the norm before a router
        for name, shape in shapes.items():
            own, there = f"blocks.{whole}.{name}", f"blocks.{number}.{name}"
            if is_stack(own, config):
                count = shape[0] // target.expert_parallel_size
                for expert in range(count):
                    at = rank.expert * count + expert
                    found[key(of_expert(there, expert))] = own, (range(at, at + 1), *_whole(shape[1:]))
            else:
                norm = apart and name.startswith(f"{architecture.MODULES['mlp_norm']}.")
                found[key(there, "local" if norm else target.family)] = own, _whole(shape)
    for p in parts.of_head() if last else ():
        if p.name != config.output_name or not config.tied:
            found[key(p.name)] = p.name, _whole(p.shape)
        elif stage:
            found[copy_key(target.family)] = config.table_name, _whole(p.shape)
    return found


def _whole(shape: Shape) -> list[range]:
    return [range(n) for n in shape]


def piece_of(source: Source, target: Target, tensor_rank: int, name: str, part: Ranges) -> Tensor:
    """Return one rank's part of a parameter, or of one expert's matrix, as Megatron-LM stores it."""
    config = source.config
    if has_vocabulary(name, config):
        return table_of(source, target, tensor_rank, name)
    dim, stacked, part = cut_dimension(name, config), is_stack(name, config), list(part)
    if dim is not None:
        part[dim + stacked] = chunk(part[dim + stacked], target.tensor_parallel_size, tensor_rank)
    tensor = source.read(name, part)
    dtype = torch.float32 if name.endswith(CORRECTION) else target.dtype
    return cast(target.architecture.to_theirs(tensor[0] if stacked else tensor, name, config), dtype, name)


def table_of(source: Source, target: Target, tensor_rank: int, name: str) -> Tensor:
    """Return one rank's rows of a table with a row for each token. Rows of padding repeat the last token's, as in
    Megatron-LM's converter: their logits take part in its softmax, and zeros would outweigh rare tokens."""
    config = source.config
    size = padded_rows(config.vocab_size, target.tensor_parallel_size) // target.tensor_parallel_size
    columns, last = range(config.hidden_size), config.vocab_size - 1
    rows = range(min(tensor_rank * size, last), min((tensor_rank + 1) * size, config.vocab_size))
    true = source.read(name, [rows, columns])
    index = torch.arange(tensor_rank * size, (tensor_rank + 1) * size).clamp(max=last) - rows.start
    return cast(true[index], target.dtype, name)


def args_of(config: ModelConfig, target: Target, iteration: int | None, consumed_samples: int) -> Namespace:
    """Return the arguments that Megatron-LM compares with its own when it loads, takes over with
    --use-checkpoint-args, and that its converters read. Enums are left out, so that the file opens without
    Megatron-LM."""
    own = {"num_experts": None, "rotary_percent": 1.0, **target.architecture.write_args(config)}
    if has_experts(own):
        own["expert_model_parallel_size"] = target.expert_parallel_size
        own["expert_tensor_parallel_size"] = target.tensor_parallel_size
    return Namespace(
        **own,
        padded_vocab_size=padded_rows(config.vocab_size, target.tensor_parallel_size),
        make_vocab_size_divisible_by=VOCAB_MULTIPLE,
        tensor_model_parallel_size=target.tensor_parallel_size,
        pipeline_model_parallel_size=target.pipeline_parallel_size,
        transformer_pipeline_model_parallel_size=target.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=None,
        num_layers_per_virtual_pipeline_stage=None,
        data_parallel_size=target.expert_parallel_size,
        world_size=target.tensor_parallel_size * target.pipeline_parallel_size * target.expert_parallel_size,
        sequence_parallel=False,
        params_dtype=target.dtype,
        fp16=target.dtype == torch.float16,
        bf16=target.dtype == torch.bfloat16,
        iteration=iteration or 0,
        consumed_train_samples=consumed_samples,
        data_parallel_random_init=False,
        bert_binary_head=True,
        num_layers=config.num_layers,
        encoder_num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        seq_length=config.seq_length,
        encoder_seq_length=config.seq_length,
        max_position_embeddings=config.seq_length,
        add_position_embedding=True,
        apply_layernorm_1p=False,
        norm_epsilon=own["layernorm_epsilon"],  # its name in 2023 and 2024
        apply_residual_connection_post_layernorm=False,
        squared_relu=False,
        openai_gelu=False,
        onnx_safe=None,
        apply_query_key_layer_scaling=False,
        attention_dropout=config.dropout,
        hidden_dropout=config.dropout,
        init_method_std=config.init_std,
    )
