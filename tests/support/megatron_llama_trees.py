"""LLaMAs in checkpoints as Megatron-LM writes them, by a few lines of their own that share nothing with the export, on
top of separate q, k, v, gate and up. Used by tests only."""

from argparse import Namespace

import torch

from dtgpt.models.llama import LlamaConfig
from dtgpt.models.source import parameter_shapes
from tests.support.megatron_trees import pad_rows

LAYERS, H, D, F, V = 4, 32, 16, 24, 131
CONFIG = LlamaConfig(
    num_layers=LAYERS, hidden_size=H, num_heads=4, num_kv_heads=2, head_dim=D, ffn_hidden_size=F, seq_length=16,
    vocab_size=V, rope_theta=500000.0, norm_eps=1e-6,
)  # fmt: skip
# dtgpt's name in a block, Megatron's of 2023, mcore's, mcore's with Transformer Engine.
NAMES = [
    ("norm_1", "input_norm", "input_layernorm", "self_attention.linear_qkv.layer_norm"),
    ("attn.q_norm", "self_attention.q_layernorm", "self_attention.q_layernorm", "self_attention.q_layernorm"),
    ("attn.k_norm", "self_attention.k_layernorm", "self_attention.k_layernorm", "self_attention.k_layernorm"),
    ("attn.qkv", "self_attention.query_key_value", "self_attention.linear_qkv", "self_attention.linear_qkv"),
    ("attn.proj", "self_attention.dense", "self_attention.linear_proj", "self_attention.linear_proj"),
    ("norm_2", "post_attention_norm", "pre_mlp_layernorm", "mlp.linear_fc1.layer_norm"),
    ("mlp.gate_up", "mlp.dense_h_to_4h", "mlp.linear_fc1", "mlp.linear_fc1"),
    ("mlp.down", "mlp.dense_4h_to_h", "mlp.linear_fc2", "mlp.linear_fc2"),
]
COLUMN = {"nested": 1, "local": 2, "transformer_engine": 3}


def make_weights(config=CONFIG):
    """Every parameter, random and all different; rows of padding are zero, as `read` gives them."""
    generator = torch.Generator().manual_seed(11)
    tensors = {n: 0.3 * torch.randn(s, generator=generator) for n, s in parameter_shapes(config).items()}
    tables = [name for name in (config.table_name, config.output_name) if name in tensors]
    return tensors | {name: pad_rows(tensors[name], config) for name in tables}


def fused_qkv(q, k, v, groups):
    """q `[N, D, H]`, k and v `[G, D, H]` -> the queries of a group, its key, its value, group by group."""
    per_group = q.shape[0] // groups
    rows = []
    for g in range(groups):
        rows += [*q[g * per_group : (g + 1) * per_group], k[g], v[g]]
    return torch.cat(rows)


def rank_of_layer(name, tensor, config, tp, t):
    """One rank's part of a parameter in a block, in Megatron's order."""
    if name == "attn.qkv":
        parts = tensor.view(config.num_kv_heads, -1, config.head_dim, *tensor.shape[1:])
        q, k, v = parts[:, :-2].flatten(0, 1), parts[:, -2], parts[:, -1]
        return fused_qkv(q, k, v, config.num_kv_heads).chunk(tp)[t]
    if name == "mlp.gate_up":
        gate, up = tensor[0::2], tensor[1::2]
        return torch.cat([gate.chunk(tp)[t], up.chunk(tp)[t]])
    return tensor.chunk(tp, 1)[t] if name in ("attn.proj", "mlp.down") else tensor


def table_of(table, config, tp, t):
    rows = (config.vocab_size + 128 * tp - 1) // (128 * tp) * 128 * tp
    last = table[config.vocab_size - 1 : config.vocab_size]
    whole = torch.cat([table[: config.vocab_size], last.expand(rows - config.vocab_size, -1)])
    return whole.chunk(tp)[t].clone()


def stage(weights, config, tp, t, layers, first, last, family):
    """The `model` of one rank."""
    flat = {}
    for local, layer in enumerate(layers):
        for names in NAMES:
            if f"blocks.{layer}.{names[0]}.weight" in weights:
                tensor = rank_of_layer(names[0], weights[f"blocks.{layer}.{names[0]}.weight"], config, tp, t)
                name = names[COLUMN[family]]
                flat[f"layers.{local}.{name}{'_' if name.endswith('layer_norm') else '.'}weight"] = tensor.clone()
                if f"blocks.{layer}.{names[0]}.bias" in weights:  # of qkv
                    bias = rank_of_layer(names[0], weights[f"blocks.{layer}.{names[0]}.bias"], config, tp, t)
                    flat[f"layers.{local}.{name}.bias"] = bias.clone()
                if family != "nested" and "linear_" in name and "layer_norm" not in name:
                    flat[f"layers.{local}.{name}._extra_state"] = None
    if last:
        flat["final_norm.weight" if family == "nested" else "final_layernorm.weight"] = weights["head.norm.weight"]
    tokens = table_of(weights["embedding.tokens.weight"], config, tp, t)
    output = tokens if config.tied else table_of(weights["head.output.weight"], config, tp, t)
    if family == "nested":
        model = {"language_model": {"encoder": flat}}
        if first:
            model["language_model"]["embedding"] = {"word_embeddings": {"weight": tokens}}
        if last and not config.tied:
            model["language_model"]["output_layer"] = {"weight": output}
        return model | ({"word_embeddings_for_head": {"weight": tokens}} if last and config.tied and not first else {})
    model = {f"decoder.{name}": tensor for name, tensor in flat.items()}
    if first:
        model["embedding.word_embeddings.weight"] = tokens
    if last:
        model["output_layer._extra_state"] = None
        if not (config.tied and first):
            model["output_layer.weight"] = output
    return model


def args_of(config, tp, pp, **changes):
    args = {
        "num_layers": config.num_layers, "hidden_size": H, "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.seq_length, "seq_length": config.seq_length, "ffn_hidden_size": F,
        "kv_channels": config.head_dim, "group_query_attention": True, "num_query_groups": config.num_kv_heads,
        "normalization": "RMSNorm", "layernorm_epsilon": config.norm_eps, "swiglu": True, "add_bias_linear": False,
        "position_embedding_type": "rope", "rotary_base": int(config.rope_theta), "rotary_percent": 1.0,
        "qk_layernorm": config.qk_norm, "add_qkv_bias": config.attention_bias == "qkv",
        "untie_embeddings_and_output_weights": not config.tied,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "make_vocab_size_divisible_by": 128,
        "padded_vocab_size": (config.vocab_size + 128 * tp - 1) // (128 * tp) * 128 * tp,
    }  # fmt: skip
    args |= changes
    return Namespace(**{name: value for name, value in args.items() if value != "absent"})


def write_tree(root, weights, config=CONFIG, tp=1, pp=1, family="local", chunks=1, change=None, **extra):
    """A checkpoint at iteration 30. extra: changes of args. change: a function of a rank's content, before it is
    written."""
    per_chunk = config.num_layers // pp // chunks
    for t in range(tp):
        for p in range(pp):
            parts = []
            for v in range(chunks):
                begin = v * (config.num_layers // chunks) + p * per_chunk
                ends = (p == 0 and v == 0), (p == pp - 1 and v == chunks - 1)
                parts.append(stage(weights, config, tp, t, range(begin, begin + per_chunk), *ends, family))
            content = {"iteration": 30, "checkpoint_version": 3.0, "args": args_of(config, tp, pp, **extra)}
            content |= {"model": parts[0]} if chunks == 1 else {f"model{v}": part for v, part in enumerate(parts)}
            if change:
                change(content)
            folder = root / "iter_0000030" / (f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}")
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    return root


def scaled_tree(root):
    """A tree with something to be known: Megatron-LM computes its positions by another factor than it stores."""
    return write_tree(root, make_weights(), use_rope_scaling=True, rope_scaling_factor=4.0)
