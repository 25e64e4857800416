"""Checkpoints in Megatron-LM's format `torch_dist`, written by torch.distributed.checkpoint itself."""

import itertools
import re
import warnings
from argparse import Namespace

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.source import parameter_shapes
from tests.support import megatron_llama_trees, megatron_trees


class Pieces(torch.Tensor):
    """A tensor that is saved as rectangles, each given by (offset, size) in every dimension."""

    def __new__(cls, tensor, rectangles):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

    def __init__(self, tensor, rectangles):
        self.tensor, self.rectangles = tensor, rectangles

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)

    def __create_write_items__(self, name, _):
        about = TensorProperties.create_from_tensor(self.tensor), self.tensor.size()
        return [
            WriteItem(
                MetadataIndex(name, offset), WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offset, size), *about),
            )
            for offset, size in self.rectangles
        ]  # fmt: skip

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(*rectangle) for rectangle in self.rectangles]

    def __get_tensor_shard__(self, index):
        size = next(size for offset, size in self.rectangles if offset == index.offset)
        where = tuple(slice(o, o + n) for o, n in zip(index.offset, size, strict=True))
        return self.tensor[where].clone()


def cut(tensor, stacked):
    """Rectangles as two tensor-parallel ranks leave them: each layer for itself, and the longest dimension in two."""
    ends = []
    longest = max(range(stacked, tensor.dim()), key=lambda d: tensor.shape[d])
    for d, n in enumerate(tensor.shape):
        first = 1 if d < stacked else n // 3 or n if d == longest else n
        bounds = [*range(0, n, first), n] if d < stacked else sorted({0, first, n})
        ends.append(list(itertools.pairwise(bounds)))
    return [
        (torch.Size(a for a, _ in corner), torch.Size(b - a for a, b in corner)) for corner in itertools.product(*ends)
    ]


def write(folder, tensors, common, as_file=False, objects=None):
    """Write tensors by Megatron-LM's keys, and what all ranks have in common: as an object, or as common.pt."""
    state = {}
    for key, tensor in tensors.items():
        stacked = int(bool(re.search(r"decoder\.layers\.(?!\d)", key)))
        state[key] = Pieces(tensor.contiguous(), cut(tensor, stacked))
    shared = {} if as_file else {"common_state/shard_0_1": [common]}
    state |= {**shared, "rng_state/shard_0.0_1.1": [torch.rand(3)], **(objects or {})}
    folder.mkdir(parents=True, exist_ok=True)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    if as_file:
        torch.save(common, folder / "common.pt")
    return folder


def keys_of(weights, config, family="transformer_engine", stacked=True):
    """dtgpt's tensors of the shapes of parameters, be they weights or moments, by Megatron-LM's keys."""
    layers = range(config.num_layers)
    if isinstance(config, GPT2Config):
        flat = gpt2_keys(weights, layers, "te" if family == "transformer_engine" else "mcore")
    else:
        flat = megatron_llama_trees.stage(weights, config, 1, 0, layers, True, True, family)
    flat = {key: tensor for key, tensor in flat.items() if tensor is not None}
    if not stacked:
        return flat
    found = {}
    for key, tensor in flat.items():
        found.setdefault(re.sub(r"layers\.\d+\.", "layers.", key), []).append(tensor)
    return {k: torch.stack(ts) if ".layers." in k else ts[0] for k, ts in found.items()}


def gpt2_keys(weights, layers, family):
    flat = {
        "embedding.word_embeddings.weight": weights["embedding.wte.weight"],
        "embedding.position_embeddings.weight": weights["embedding.wpe.weight"],
    }
    for layer in layers:
        for _, name, _, _, ours in megatron_trees.LAYER:
            for plain, folded in megatron_trees.TRANSFORMER_ENGINE.items() if family == "te" else ():
                name = name.replace(plain, folded)
            flat[f"decoder.layers.{layer}.{name}"] = weights[f"blocks.{layer}.{ours}"]
    return flat | {f"decoder.final_layernorm.{kind}": weights[f"head.ln_f.{kind}"] for kind in ("weight", "bias")}


def args_of(config, **changes):
    """Megatron-LM's args for a model of any size."""
    own = {
        "num_layers": config.num_layers, "hidden_size": config.hidden_size, "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.seq_length, "seq_length": config.seq_length,
        "padded_vocab_size": config.padded_vocab_size, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "make_vocab_size_divisible_by": 128, "consumed_train_samples": 0,
    }  # fmt: skip
    if isinstance(config, GPT2Config):
        own |= {"ffn_hidden_size": 4 * config.hidden_size, "layernorm_epsilon": config.layer_norm_eps}
        return Namespace(**own | changes)
    sizes = {"hidden_size": config.hidden_size, "ffn_hidden_size": config.ffn_hidden_size}
    return Namespace(**vars(megatron_llama_trees.args_of(config, 1, 1)) | own | sizes | changes)


def common_of(config, step=2, optimizer=None, **changes):
    """What all ranks have in common. optimizer: its counters."""
    common = {"args": args_of(config, **changes), "checkpoint_version": 3.0, "iteration": step}
    return common | ({} if optimizer is None else {"optimizer": optimizer})


def training(tensors, prefixes=("", ".exp_avg", ".exp_avg_sq"), masters=None, **options):
    """Weights and AdamW's state by Megatron-LM's keys, of dtgpt's tensors NAME, NAME.exp_avg and NAME.exp_avg_sq."""
    config = options["config"]
    found = {}
    for suffix in prefixes:
        own = {name: tensors[name + suffix] for name in parameter_shapes(config)}
        where = f"optimizer.state{suffix}." if suffix else ""
        found |= {where + key: tensor for key, tensor in keys_of(own, **options).items()}
    if masters:
        plain = {key: tensor for key, tensor in found.items() if not key.startswith("optimizer.")}
        found |= {f"optimizer.state.{masters}.{key}": tensor for key, tensor in plain.items()}
        found |= {key: tensor.bfloat16() for key, tensor in plain.items()}
    return found
