"""GPT-2 written as a Megatron-LM checkpoint: the `torch` format, checkpoint_version 3.0, with the names of 2023, which
its later versions also read with --use-legacy-models."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.interop.foreign import cast, check_dtype
from dtgpt.interop.megatron.names import BLOCK_NAMES, POSITIONS, cut_dimension, padded_rows
from dtgpt.interop.megatron.tree import FILE_NAMES, TRACKER, rank_folder
from dtgpt.models.config import VOCAB_MULTIPLE
from dtgpt.models.gpt2 import GPT2_124M, TABLE, GPT2Config
from dtgpt.models.source import Source, parameter_shapes
from dtgpt.parallel.coordinates import chunk
from dtgpt.util.errors import UserError
from dtgpt.util.storage import new_folder

VERSION = 3.0


def save_megatron(
    source: Source,
    folder: Path,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: torch.dtype = torch.float32,
    iteration: int | None = None,
    consumed_samples: int = 0,
) -> None:
    """Write the weights of `source` as the root of a new checkpoint with a file for each rank, one in memory at a time.

    `iteration`: of the training so far, 1 or more; None: a release, from which Megatron-LM starts at 0. Raises
    UserError, before anything is written, for sizes that do not divide the model; and for weights beyond fp16.
    """
    sizes = tensor_parallel_size, pipeline_parallel_size
    config = source.config
    if not isinstance(config, GPT2Config):
        raise UserError(f"a Megatron-LM tree holds a GPT-2, and this model is {config.architecture}; use --to hf")
    for what, size, over, ranks in (
        ("num_heads", config.num_heads, "tensor_parallel_size", tensor_parallel_size),
        ("num_layers", config.num_layers, "pipeline_parallel_size", pipeline_parallel_size),
    ):
        if ranks < 1 or size % ranks:
            raise UserError(f"{what}={size} cannot be split over {over}={ranks}; use a divisor of {size}")
    check_dtype(dtype)
    state = {
        "args": _args(config, sizes, dtype, iteration, consumed_samples),
        "checkpoint_version": VERSION,
        "iteration": iteration or 0,
    }
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    with new_folder(folder) as partial:
        for t in range(tensor_parallel_size):
            for p in range(pipeline_parallel_size):
                path = partial / name / rank_folder(t, p, pipeline_parallel_size > 1) / FILE_NAMES[0]
                path.parent.mkdir(parents=True)
                _save({**state, "model": _stage(source, dtype, (t, p), sizes)}, path)
        (partial / TRACKER).write_text("release" if iteration is None else str(iteration))


def _save(content: dict[str, Any], path: Path) -> None:
    """Write by torch.save, with a full disk as an OSError like any other."""
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from None


def _stage(source: Source, dtype: torch.dtype, rank: tuple[int, int], sizes: tuple[int, int]) -> dict[str, Any]:
    """Return what Megatron-LM keeps under `model` for the (tensor, pipeline) rank."""
    config, shapes = source.config, parameter_shapes(source.config)
    (t, p), (tensor_parallel_size, pipeline_parallel_size) = rank, sizes
    first, last, layers = p == 0, p == pipeline_parallel_size - 1, config.num_layers // pipeline_parallel_size

    def piece(name: str) -> Tensor:
        part = [range(n) for n in shapes[name]]
        if (dim := cut_dimension(name)) is not None:
            part[dim] = chunk(part[dim], tensor_parallel_size, t)
        return cast(source.read(name, part), dtype, name)  # version 3.0 has dtgpt's order of QKV

    table = _table(source, dtype, t, tensor_parallel_size) if first or last else None
    encoder = {
        f"layers.{n}.{theirs[0]}.{kind}": piece(f"blocks.{p * layers + n}.{ours}.{kind}")
        for n in range(layers)
        for ours, theirs in BLOCK_NAMES.items()
        for kind in ("weight", "bias")
    }
    if last:
        encoder |= {f"final_layernorm.{kind}": piece(f"head.ln_f.{kind}") for kind in ("weight", "bias")}
    language_model: dict[str, Any] = {"encoder": encoder}
    if first:
        embedding = {"word_embeddings": {"weight": table}, "position_embeddings": {"weight": piece(POSITIONS)}}
        language_model = {"embedding": embedding, **language_model}
    copy = {"word_embeddings_for_head": {"weight": table}} if last and not first else {}
    return {"language_model": language_model, **copy}


def _table(source: Source, dtype: torch.dtype, rank: int, tensor_parallel_size: int) -> Tensor:
    """Return one rank's rows of the token table. Rows of padding repeat the last token's, as in Megatron-LM's
    converter: their logits take part in its softmax, and zeros would outweigh rare tokens."""
    config = source.config
    size = padded_rows(config.vocab_size, tensor_parallel_size) // tensor_parallel_size
    columns, last = range(config.hidden_size), config.vocab_size - 1
    rows = range(min(rank * size, last), min((rank + 1) * size, config.vocab_size))
    true = source.read(TABLE, [rows, columns])
    index = torch.arange(rank * size, (rank + 1) * size).clamp(max=last) - rows.start
    return cast(true[index], dtype, TABLE)


def _args(
    config: GPT2Config, sizes: tuple[int, int], dtype: torch.dtype, iteration: int | None, consumed_samples: int
) -> Namespace:
    """Return the arguments that Megatron-LM compares with its own when it loads, takes over with
    --use-checkpoint-args, and that its converters read. Enums are left out, so that the file opens without
    Megatron-LM."""
    gpt2 = config.vocab_size == GPT2_124M.vocab_size
    tensor_parallel_size, pipeline_parallel_size = sizes
    return Namespace(
        padded_vocab_size=padded_rows(config.vocab_size, tensor_parallel_size),
        make_vocab_size_divisible_by=VOCAB_MULTIPLE,
        tokenizer_type="GPT2BPETokenizer" if gpt2 else "NullTokenizer",
        vocab_size=None if gpt2 else config.vocab_size - 1,  # NullTokenizer adds the end of text
        tensor_model_parallel_size=tensor_parallel_size,
        pipeline_model_parallel_size=pipeline_parallel_size,
        transformer_pipeline_model_parallel_size=pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=None,
        num_layers_per_virtual_pipeline_stage=None,
        data_parallel_size=1,
        world_size=tensor_parallel_size * pipeline_parallel_size,
        sequence_parallel=False,
        params_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        iteration=iteration or 0,
        consumed_train_samples=consumed_samples,
        data_parallel_random_init=False,
        bert_binary_head=True,
        num_layers=config.num_layers,
        encoder_num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=4 * config.hidden_size,
        num_attention_heads=config.num_heads,
        kv_channels=config.hidden_size // config.num_heads,
        group_query_attention=False,
        num_query_groups=1,
        seq_length=config.seq_length,
        encoder_seq_length=config.seq_length,
        max_position_embeddings=config.seq_length,
        position_embedding_type="learned_absolute",
        add_position_embedding=True,
        use_rotary_position_embeddings=False,
        rotary_percent=1.0,
        normalization="LayerNorm",
        apply_layernorm_1p=False,
        layernorm_epsilon=config.layer_norm_eps,
        norm_epsilon=config.layer_norm_eps,  # its name since 2024
        apply_residual_connection_post_layernorm=False,
        add_bias_linear=True,
        swiglu=False,
        squared_relu=False,
        openai_gelu=False,
        onnx_safe=None,
        bias_gelu_fusion=True,  # the fused GELU is the tanh form
        untie_embeddings_and_output_weights=False,
        num_experts=None,
        apply_query_key_layer_scaling=False,
        attention_dropout=config.dropout,
        hidden_dropout=config.dropout,
        init_method_std=config.init_std,
    )
